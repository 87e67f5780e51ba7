"""Engines that take turns on the same models: what measuring inference and training share.

Every engine has a process of its own for each model, unless the suite puts some together. They take turns, round by
round, so that whatever slows the machine for a while slows all of them; only one works at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import geometric_mean, median
from types import TracebackType
from typing import Any, TypeAlias

from benchmarks.machine import describe, note_if_busy
from benchmarks.processes import WorkerFailed, WorkerProcess
from benchmarks.tables import Progress, Table, milliseconds, progress, say

_ROUND_SECONDS = 0.3
_LEAST_CALLS = 3
_PAUSE_SECONDS = 0.05  # a thread pool spins for a moment after a run; the next engine must not share the cores with it


@dataclass(frozen=True)
class Prepared:
    """A call ready to be timed, and how the first one went."""

    call: Callable[[], Any]
    first_call_seconds: float
    error_vs_eager: float
    graphs: int | None
    details: Mapping[str, Any] = field(default_factory=dict)
    """What else a suite has to tell of an engine."""


@dataclass(frozen=True)
class Suite:
    """What the module `benchmarks.NAME` measures in turns.

    There a function `prepare(model, engine)` gives a `Prepared`; it is called in a process of its own, or in one
    process for all engines of `together`: the same engine differs by a tenth from one process to the next. The engines
    of `ours` are sardonyx, and `benchmarks.against` compares them with those of an earlier revision. Caches are empty
    in each process if `cold`. An engine of `pythons` runs in that Python, with packages that this one lacks.
    """

    name: str
    doc: str
    models: Sequence[str]
    engines: Sequence[str]
    together: Sequence[str] = ()
    ours: Sequence[str] = ()
    cold: bool = True
    pythons: Mapping[str, str] = field(default_factory=dict)

    def processes(self, engines: Sequence[str]) -> list[list[str]]:
        """Which of these engines share a process, in the order they take turns."""
        shared = [engine for engine in engines if engine in self.together]
        return [[engine] for engine in engines if engine not in self.together] + [shared] * bool(shared)


@dataclass
class Measured:
    """What one engine did with one model."""

    model: str
    engine: str
    first_call_seconds: float | None = None
    error_vs_eager: float | None = None
    round_seconds: list[float] = field(default_factory=list)
    calls: int = 0
    graphs: int | None = None
    details: dict[str, Any] = field(default_factory=dict)
    busy_cores: float | None = None
    failed: str | None = None

    @property
    def seconds(self) -> float | None:
        """The median over the rounds; None if it failed."""
        return median(self.round_seconds) if self.round_seconds and not self.failed else None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "seconds": self.seconds}


class Worker:
    """The process that runs some engines, and what they have measured.

    `source` is the folder with the package sardonyx of another revision.
    """

    def __init__(
        self, suite: Suite, model: str, engines: Sequence[str], timeout: float, source: Path | None = None
    ) -> None:
        self.measured = [Measured(model, engine) for engine in engines]
        self._estimates = [0.0] * len(engines)
        self._folder = tempfile.TemporaryDirectory()
        python = suite.pythons.get(engines[0], sys.executable)
        command = [python, "-m", "benchmarks.worker", suite.name, model, *engines]
        self._process = WorkerProcess(command, timeout, environment(source, self._folder.name if suite.cold else None))

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.close()
        self._folder.cleanup()

    def prepare(self) -> None:
        """Wait until the first calls are done."""
        for index, measured in enumerate(self.measured):
            with self._noting_failure(measured):
                ready = self._process.answer()
                measured.first_call_seconds = ready["first"]
                measured.error_vs_eager = ready["error_vs_eager"]
                measured.graphs = ready["graphs"]
                measured.details = ready["details"]
                self._estimates[index] = ready["call"]

    def round(self, number: int) -> None:
        """Measure one round of each engine that has not failed, in another order each time: one may slow the next."""
        for index in random.Random(number).sample(range(len(self.measured)), len(self.measured)):
            if self.measured[index].failed is None:
                time.sleep(_PAUSE_SECONDS)
                with self._noting_failure(self.measured[index]):
                    self._round(index)

    def _round(self, index: int) -> None:
        calls = max(_LEAST_CALLS, math.ceil(_ROUND_SECONDS / self._estimates[index]))
        self._estimates[index] = self._process.ask(f"round {index} {calls}")["seconds"]
        self.measured[index].round_seconds.append(self._estimates[index])
        self.measured[index].calls += calls

    @contextlib.contextmanager
    def _noting_failure(self, measured: Measured) -> Iterator[None]:
        try:
            yield
        except (WorkerFailed, OSError) as error:
            measured.failed = str(error)


def environment(source: Path | None = None, caches: str | None = None) -> dict[str, str]:
    """The environment of a process that finds sardonyx in `source`, and its caches in a folder.

    PYTHONPATH comes before what is installed, an editable installation included. In an empty folder a first call
    compiles.
    """
    changed = {}
    if source:
        changed["PYTHONPATH"] = os.pathsep.join(filter(None, [str(source), os.environ.get("PYTHONPATH")]))
    if caches:
        changed |= {"TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor", "SARDONYX_CACHE_DIR": f"{caches}/sardonyx"}
    return {**os.environ, **changed}


def measure(
    suite: Suite, model: str, engines: Sequence[str], rounds: int, timeout: float, shown: Progress
) -> list[Measured]:
    """Prepare the engines one after the other, then let them take turns.

    All of them wait when `busy_cores` is taken, so it is what other programs use.
    """
    with contextlib.ExitStack() as stack:
        workers = []
        for group in suite.processes(engines):
            shown.step(f"{model}: preparing {', '.join(group)}")
            workers.append(stack.enter_context(Worker(suite, model, group, timeout)))
            workers[-1].prepare()
        busy = note_if_busy()
        for number in range(rounds):
            shown.step(f"{model}: round {number + 1} of {rounds}")
            for worker in workers:
                worker.round(number)
        results = [measured for worker in workers for measured in worker.measured]
        for measured in results:
            measured.busy_cores = busy
        return results


def ratio(other: Measured, ours: Measured | None) -> float | None:
    """How many times as long the other takes; above one, sardonyx is faster."""
    if ours is None or other.seconds is None or ours.seconds is None:
        return None
    return other.seconds / ours.seconds


def _ours(results: Sequence[Measured], model: str) -> Measured | None:
    return next((m for m in results if m.model == model and m.engine == "sardonyx"), None)


def table(suite: str, results: Sequence[Measured]) -> Table:
    """A row for each model and engine."""
    made = Table(suite, ["model", "engine", "ms", "÷ sardonyx", "first call s", "max rel. error"], text_columns=2)
    for index, m in enumerate(results):
        made.add(m.model, m.engine, *_cells(m, ratio(m, _ours(results, m.model))))
        if index + 1 == len(results) or results[index + 1].model != m.model:
            made.end_section()
    return made


def _cells(m: Measured, times: float | None) -> tuple[str, ...]:
    if m.seconds is None or m.first_call_seconds is None or m.error_vs_eager is None:
        return ("failed", "", "", "")
    shown_ratio = "" if times is None else f"{times:.2f}"
    return milliseconds(m.seconds), shown_ratio, f"{m.first_call_seconds:.2f}", f"{m.error_vs_eager:.1e}"


def summary(results: Sequence[Measured]) -> dict[str, float]:
    """For each other engine the geometric mean of its ratios over the models where both ran."""
    ratios: dict[str, list[float]] = {}
    for m in results:
        times = ratio(m, _ours(results, m.model))
        if times is not None and m.engine != "sardonyx":
            ratios.setdefault(m.engine, []).append(times)
    return {engine: geometric_mean(values) for engine, values in ratios.items()}


def _report(suite: str, results: Sequence[Measured]) -> None:
    table(suite, results).show()
    for engine, mean in summary(results).items():
        say(f"{engine} takes {mean:.2f} times as long as sardonyx (geometric mean over the models where both ran)")
    say_failures(results)


def say_failures(results: Sequence[Measured]) -> None:
    """Say which engines failed, and how."""
    for m in results:
        if m.failed:
            say(f"failed: {m.engine} on {m.model}: {' '.join(m.failed.split())[:300]}")


def _write(path: Path, machine: dict[str, Any], results: Sequence[Measured]) -> None:
    content = {**machine, "ratios": summary(results), "results": [m.as_dict() for m in results]}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.replace(path)


def parser(suite: Suite, usual: Sequence[str]) -> argparse.ArgumentParser:
    """The command line that every suite has."""
    made = argparse.ArgumentParser(prog=f"python -m benchmarks.{suite.name}", description=suite.doc)
    names = f"names, with commas between them; of {', '.join(suite.engines)}"
    made.add_argument("--models", default=",".join(suite.models), help="names, with commas between them")
    made.add_argument("--engines", default=",".join(usual), help=names)
    made.add_argument("--rounds", type=int, default=7, help="turns that each engine gets")
    made.add_argument("--timeout", type=float, default=900, help="seconds that a worker may take to answer")
    made.add_argument("--json", type=Path, help="where to write everything measured")
    return made


def parsed(suite: Suite, made: argparse.ArgumentParser) -> argparse.Namespace:
    """What was given on the command line, checked."""
    given = made.parse_args()
    given.models, given.engines = given.models.split(","), given.engines.split(",")
    unknown = [n for n in given.models if n not in suite.models] + [n for n in given.engines if n not in suite.engines]
    if unknown:
        known = f"models: {', '.join(suite.models)}; engines: {', '.join(suite.engines)}"
        made.error(f"unknown name {unknown[0]!r}; {known}")
    return given


Show: TypeAlias = Callable[[str, Sequence[Measured]], None]
"""Prints what was measured under a title."""


def take_turns(suite: Suite, given: argparse.Namespace, show: Show | None = None) -> list[Measured]:
    """Measure what the command line asks for, and show it."""
    machine, results = describe(), []
    with progress(len(given.models) * (len(suite.processes(given.engines)) + given.rounds)) as shown:
        for model in given.models:
            results += measure(suite, model, given.engines, given.rounds, given.timeout, shown)
            if given.json:
                _write(given.json, machine, results)
    (show or _report)(suite.name, results)
    return results
