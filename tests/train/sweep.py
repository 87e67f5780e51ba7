"""A training step of every module and architecture through sardonyx, in processes that may die.

python -m tests.train.sweep --only conv2d 'lstm*' attention
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tests.ops.sweep import INTERRUPTED, versions
from tests.ops.workers import READY, sweep

from .check import Mismatch, check
from .modules import CASES as MODULES
from .modules import Case
from .page import page

STATIC, DYNAMIC = "static", "dynamic"


@cache
def cases() -> dict[str, Case]:
    """Everything that the sweep takes a step of, by name."""
    from .architectures import CASES as ARCHITECTURES  # which imports transformers

    return {**MODULES, **ARCHITECTURES}


def ways(case: Case) -> list[str]:
    """How it is compiled: for one batch size, and for any."""
    return [STATIC] if case.static else [STATIC, DYNAMIC]


@dataclass
class Outcome:
    """What became of one module: the largest relative error each way, and what went wrong."""

    name: str
    family: str
    errors: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    crashed: list[str] = field(default_factory=list)
    static: str = ""
    """Why it is compiled for one batch size alone."""
    in_torch: str = ""
    """Why dynamo hands nothing of it to a backend, where it does not."""
    seconds: float = 0.0

    @property
    def passes(self) -> bool:
        """Whether it is right in every way there is."""
        return not self.wrong and not self.crashed

    def add(self, other: Outcome) -> None:
        """Take in what became of it compiled in another way."""
        self.errors |= other.errors
        self.wrong += other.wrong
        self.crashed += other.crashed
        self.seconds = round(self.seconds + other.seconds, 1)


@dataclass(frozen=True)
class Task:
    """A module for a process to look at."""

    case: Case

    @property
    def words(self) -> tuple[str]:
        return (self.case.name,)

    def outcome(self) -> Outcome:
        return Outcome(self.case.name, self.case.family, static=self.case.static, in_torch=self.case.in_torch)


def attempt(case: Case, way: str) -> Outcome:
    """Take a step; never raises."""
    outcome, began = Task(case).outcome(), time.perf_counter()
    try:
        outcome.errors[way] = check(case, dynamic=way == DYNAMIC)
    except Mismatch as mismatch:
        outcome.wrong.append(f"{way}: {mismatch}")
    except Exception as error:
        outcome.wrong.append(f"{way}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
    outcome.seconds = round(time.perf_counter() - began, 1)
    return outcome


def _serve(pipe: Connection) -> None:
    """The life of a process; see `tests.ops.workers`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it, and ends us
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    known = cases()
    pipe.send(READY)
    while True:
        name, first, _ = pipe.recv()
        pipe.send(len(ways(known[name])))
        for way in ways(known[name])[first:]:
            pipe.send(attempt(known[name], way))


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.train.sweep", description=__doc__)
    parser.add_argument("--only", nargs="*", default=(), help="names, prefixes with a trailing *, or families")
    parser.add_argument("--seconds", type=float, default=300, help="processor time of a step (default: 300)")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1), help="how many (default: 2)")
    parser.add_argument("--results", type=Path, help="write the results as JSON")
    parser.add_argument("--page", type=Path, help="write the results as Markdown")
    return parser.parse_args(given)


def chosen(only: Sequence[str]) -> list[Case]:
    """The cases that are asked for, the slow ones first, so that the last ones end together."""

    def wanted(case: Case) -> bool:
        return not only or any(
            o in (case.name, case.family) or (o.endswith("*") and case.name.startswith(o[:-1])) for o in only
        )

    return sorted(filter(wanted, cases().values()), key=lambda case: case.family != "architectures")


def main(arguments: Sequence[str] | None = None) -> int:
    given = _arguments(arguments)
    tasks, outcomes = [Task(case) for case in chosen(given.only)], []
    if not tasks:
        print("nothing has such a name")
        return 2
    try:
        for settled in sweep(tasks, given.seconds, given.processes, _serve):
            if isinstance(settled, Outcome):
                outcomes.append(settled)
                print(f"{len(outcomes)}/{len(tasks)} {line(settled)}", flush=True)
    except KeyboardInterrupt:
        print("interrupted")
        return INTERRUPTED
    results = as_json(outcomes)
    text = page(results)
    print(text)
    if given.results:
        given.results.write_text(json.dumps(results, indent=1) + "\n")
    if given.page:
        given.page.write_text(text)
    return int(not all(outcome.passes for outcome in outcomes))


def line(outcome: Outcome) -> str:
    """One module for the terminal."""
    errors = ", ".join(f"{way} {error:.0e}" for way, error in outcome.errors.items())
    return "; ".join(
        filter(None, [f"{outcome.name} ({outcome.seconds:.1f} s) {errors}", *outcome.wrong, *outcome.crashed])
    )


def as_json(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What the page is made from: in the order of the cases, without what is empty."""
    place = {name: index for index, name in enumerate(cases())}
    ordered = sorted(outcomes, key=lambda outcome: place[outcome.name])
    rows = [{key: value for key, value in asdict(outcome).items() if value} for outcome in ordered]
    return {"date": datetime.now(UTC).date().isoformat(), "versions": versions(), "outcomes": rows}


if __name__ == "__main__":
    sys.exit(main())
