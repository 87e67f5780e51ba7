"""How soon a process has its first result, with caches of an earlier one and without: `python -m benchmarks.startup`.

Each makes BERT-base, and is timed from there: importing what it needs, compiling, the first call and the second.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.machine import describe, note_if_busy
from benchmarks.models import build
from benchmarks.tables import Table, progress


def _wrapped(model: torch.nn.Module) -> Callable[..., Any]:
    import sardonyx

    return sardonyx.compile(model)


WAYS: dict[str, Callable[[torch.nn.Module], Callable[..., Any]]] = {
    "sardonyx.compile": _wrapped,
    'torch.compile, "sardonyx"': lambda model: torch.compile(model, backend="sardonyx"),
    'torch.compile, "inductor"': torch.compile,
}
"""Every way of compiling, by name."""


@dataclass
class Measured:
    """What the processes of one way took, in seconds."""

    way: str
    cold: list[float] = field(default_factory=list)
    warm: list[float] = field(default_factory=list)
    second_calls: list[float] = field(default_factory=list)
    """The second call of processes that found a cache."""


def measure(rounds: int) -> list[Measured]:
    """Each way, cold and then warm, in turns."""
    results = [Measured(way) for way in WAYS]
    with progress(rounds * len(WAYS)) as shown:
        for _ in range(rounds):
            for result in results:
                with tempfile.TemporaryDirectory() as folder:
                    shown.step(result.way)
                    result.cold.append(_child(result.way, folder)[0])
                    first, second = _child(result.way, folder)
                result.warm.append(first)
                result.second_calls.append(second)
    return results


def _child(way: str, folder: str) -> tuple[float, float]:
    """The first and the second call of a process whose caches are in a folder."""
    caches = {"SARDONYX_CACHE_DIR": f"{folder}/ours", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
    command = [sys.executable, "-m", "benchmarks.startup", "--child", way]
    done = subprocess.run(command, env={**os.environ, **caches}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{way}: {done.stderr[-2000:]}")
    first, second = json.loads(done.stdout.splitlines()[-1])
    return first, second


def _timed(way: str) -> tuple[float, float]:
    model, args = build("bert-base")
    with torch.no_grad():
        started = time.perf_counter()
        run = WAYS[way](model)
        run(*args)
        first = time.perf_counter()
        run(*args)
        return first - started, time.perf_counter() - first


def table(results: list[Measured]) -> Table:
    """Medians, and what they are to each other."""
    made = Table("first result of BERT-base, s", ["way", "cold", "warm", "warm ÷ cold", "second call, warm"])
    for result in results:
        cold, warm, second = median(result.cold), median(result.warm), median(result.second_calls)
        made.add(result.way, f"{cold:.2f}", f"{warm:.2f}", f"{warm / cold:.2f}", f"{second:.2f}")
    return made


def main() -> None:
    """Measure and print; or, as a child, be measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="processes of each kind (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(_timed(given.child)))
        return
    note_if_busy()
    results = measure(given.rounds)
    table(results).show()
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps({**describe(), "results": [asdict(r) for r in results]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
