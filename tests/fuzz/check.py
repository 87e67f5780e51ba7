"""One program through one door: what came of it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from sardonyx.diagnose.bisection.delta import minimal_subset
from sardonyx.errors import SardonyxError

from .doors import DOORS, TRAINING_DOORS, dynamic
from .program import Program
from .reference import Reference, Run, run


@dataclass
class Outcome:
    """What came of programs: counts, and what went wrong."""

    programs: int = 0
    calls: int = 0
    steps: int = 0
    doors: dict[str, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    """Programs that a door says it does not take, by reason."""
    torchs_own: int = 0
    """Programs on which torch.compile goes wrong with the backend aot_eager as well."""
    rejected: int = 0
    """Programs that eager runs line by line, and not as a whole (a gradient of what was edited, say)."""
    wrong: list[str] = field(default_factory=list)
    crashed: list[str] = field(default_factory=list)
    seconds: float = 0.0
    seeds: list[int] = field(default_factory=list)
    """Of the batches."""

    def add(self, other: Outcome) -> None:
        """Add up."""
        for name, value in vars(other).items():
            mine = getattr(self, name)
            setattr(self, name, dict(Counter(mine) + Counter(value)) if isinstance(value, dict) else mine + value)


def check(program: Program, door: str) -> Outcome:
    """Run a program through a door, at each of its sizes, and compare with eager; never raises."""
    outcome = Outcome(1, 0, len(program.lines), {door: 1})
    calls = list(_calls(program))
    if not calls or calls[0][0] != program.sizes:
        outcome.rejected = 1
        return outcome
    try:
        problem = _problem(program, door, calls, outcome)
    except Exception as error:
        problem = _refusal_or_problem(error, door, outcome)
    if problem and _is_torchs_own(program, door, calls):
        outcome.torchs_own = 1
    elif problem:
        outcome.wrong.append(f"{door}: {problem}\n{program}")
    return outcome


def _is_torchs_own(program: Program, door: str, calls: list[tuple[Mapping[str, int], Reference]]) -> bool:
    """Whether `torch.compile` goes wrong with torch's own backend, too: it captures for every backend alike.

    So does torch.export where a program edits in place: both have torch make a functional graph of it. The wrapper
    compiles a module that does so in parts, each for the sizes of its first call.
    """
    torch._dynamo.reset()
    sizes_differ = None if door == "wrapper" else dynamic(program)
    function = torch.compile(program.function(), backend="aot_eager", dynamic=sizes_differ)
    try:
        return any(reference.difference(run(function, program.arguments(sizes))) for sizes, reference in calls)
    except Exception:
        return True


def _problem(program: Program, door: str, calls: list[tuple[Mapping[str, int], Reference]], outcome: Outcome) -> str:
    function, done = DOORS[door](program), []
    for sizes, reference in calls:
        actual = _run(function, program, sizes, door)
        outcome.calls += 1
        problem = reference.difference(actual)
        if problem:
            return f"at {dict(sizes)}: {problem}"
        done.append((sizes, reference, actual))
    for sizes, reference, actual in done if door in TRAINING_DOORS else ():  # at last: this resets dynamo
        if 1 in sizes.values():  # over sizes of one, torch promises backends other strides than its kernels give
            continue
        problem = reference.difference_in_layout(actual, dynamic=dynamic(program))
        if problem:
            return f"at {dict(sizes)}: {problem}"
    return ""


def _run(function: Callable[..., Any], program: Program, sizes: Mapping[str, int], door: str) -> Run:
    actual = run(function, program.arguments(sizes))
    if door == "export":  # a file cannot edit the caller's tensors
        actual.inputs = run(program.function(), program.arguments(sizes)).inputs
    return actual


def _calls(program: Program) -> list[tuple[Mapping[str, int], Reference]]:
    """The sizes that eager runs at, and what it gives."""
    found = []
    for sizes in program.calls:
        try:
            found.append((sizes, Reference(program.function(), lambda sizes=sizes: program.arguments(sizes))))
        except Exception:
            continue
    return found


def _without_folders(message: str) -> str:
    """Return a message with the names of files only: results are committed, and folders differ by machine."""
    return re.sub(r"/(?:[^\s/]+/)+", "", message)


def _is_refused_export(error: BaseException) -> bool:
    """Whether torch.export gives the program up, or made a constant of a size that is left to it (`Dim.AUTO`)."""
    told = "Got invalid dimensions" in str(error) or "the model was exported" in str(error)
    return told or type(error).__name__ in ("Unsupported", "UserError", "UnsupportedOperator", "CaptureError")


def _refusal_or_problem(error: Exception, door: str, outcome: Outcome) -> str:
    """Empty for a clear refusal, which is counted; elsewhere what was raised."""
    cause: BaseException | None = error
    while cause is not None:
        refuses = isinstance(cause, NotImplementedError) and isinstance(cause, SardonyxError)
        if refuses or (door == "export" and _is_refused_export(cause)):
            outcome.refused = {_without_folders(str(cause).split("\n")[0])[:120]: 1}
            return ""
        cause = getattr(cause, "inner_exception", None) or cause.__cause__
    return f"{type(error).__name__}: {str(error)[:500]}"


def reduced(program: Program, door: str) -> Program:
    """The program with as few of its calls, results and lines as still go wrong."""

    def fails(candidate: Program) -> bool:
        return bool(check(candidate, door).wrong)

    program = next(filter(fails, _with_fewer_calls_and_results(program)), program)
    lines = minimal_subset(program.lines, lambda some: fails(replace(program, lines=tuple(some))))
    return replace(program, lines=tuple(lines)) if lines else program


def _with_fewer_calls_and_results(program: Program) -> Iterator[Program]:
    once = replace(program, other_sizes=())
    yield from (replace(once, results=(name,)) for name in program.results)
    yield from (replace(program, results=(name,)) for name in program.results)
    yield once
