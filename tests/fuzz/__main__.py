"""Run random programs for some minutes, in processes that may die.

python -m tests.fuzz --minutes 60 --results docs/fuzz.json
python -m tests.fuzz --batches 17 --show
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.ops.sweep import versions
from tests.ops.workers import sweep

from .batches import Batch, drawn, serve
from .check import Outcome

SECONDS_OF_A_PROGRAM = 480.0
"""Of processor time, for what a program takes in several threads and for making it small if it is wrong."""


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60, help="how long (default: 60)")
    parser.add_argument("--first", type=int, default=0, help="number of the first batch (default: 0)")
    parser.add_argument("--batches", type=int, nargs="*", help="these batches alone, whatever time they take")
    parser.add_argument("--doors", nargs="*", default=(), help="compile, wrapper, export, native (default: all)")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1), help="how many (default: 2)")
    parser.add_argument("--results", type=Path, default=Path("build/fuzz.json"), help="where the counts are written")
    parser.add_argument("--show", action="store_true", help="print the programs of --batches; run nothing")
    return parser.parse_args(given)


@dataclass
class _Summary:
    """What was found, for people on the terminal and for the file."""

    began: float = field(default_factory=time.monotonic)
    total: Outcome = field(default_factory=Outcome)

    def take(self, outcome: Outcome) -> None:
        outcome.crashed = [f"batch {outcome.seeds[0]}: {text}" for text in outcome.crashed]
        for problem in outcome.wrong + outcome.crashed:
            print(f"{problem}\n", flush=True)
        self.total.add(outcome)

    def line(self) -> str:
        total, minutes = self.total, (time.monotonic() - self.began) / 60
        return (
            f"{minutes:.1f} minutes, {total.programs} programs, {total.steps} steps, {total.calls} calls: "
            f"{len(total.wrong)} wrong, {len(total.crashed)} crashes, {sum(total.refused.values())} refused, "
            f"{total.torchs_own} that torch.compile itself gets wrong"
        )

    def as_json(self) -> dict[str, Any]:
        made = {"date": datetime.now(UTC).date().isoformat(), "versions": versions()}
        minutes = round((time.monotonic() - self.began) / 60, 1)
        counts = {name: value for name, value in vars(self.total).items() if name != "seconds"}
        return {**made, "minutes": minutes, **counts}


def _batches(given: argparse.Namespace, began: float) -> Iterator[Batch]:
    doors = tuple(given.doors)
    if given.batches is not None:
        yield from (Batch(seed, doors) for seed in given.batches)
        return
    seed = given.first
    while time.monotonic() - began < given.minutes * 60:
        yield Batch(seed, doors)
        seed += 1


def main(arguments: Sequence[str] | None = None) -> int:
    given = _arguments(arguments)
    if given.show:
        for seed in given.batches or []:
            for program, door in drawn(seed, given.doors):
                print(f"{door}\n{program}")
        return 0
    summary = _Summary()
    shown = time.monotonic()
    try:
        for settled in sweep(_batches(given, summary.began), SECONDS_OF_A_PROGRAM, given.processes, serve):
            if isinstance(settled, Outcome):
                summary.take(settled)
            if time.monotonic() - shown > 30:
                shown = time.monotonic()
                print(summary.line(), flush=True)
    except KeyboardInterrupt:
        print("interrupted")
    given.results.parent.mkdir(parents=True, exist_ok=True)
    given.results.write_text(json.dumps(summary.as_json(), indent=1) + "\n")
    print(summary.line())
    return int(bool(summary.total.wrong or summary.total.crashed))


if __name__ == "__main__":
    sys.exit(main())
