"""The eager device against the CPU, in turns in one process: `python -m benchmarks.eager`.

Single operators, where what a call costs is everything, then a training step and a model, where it is little.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from benchmarks.machine import describe
from benchmarks.models import build
from benchmarks.tables import Table
from sardonyx import eager

_ROUNDS = 9
_ROUND_SECONDS = 0.2


def operators(device: str) -> Mapping[str, Callable[[], Any]]:
    """Calls of single operators."""
    x = torch.randn(64, 64).to(device)
    wide = torch.randn(512, 512).to(device)
    return {
        "add 64×64": lambda: x + x,
        "relu 64×64": lambda: x.relu(),
        "transpose, a view": lambda: x.t(),
        "add in place 64×64": lambda: x.add_(0.0),
        "matmul 64×64": lambda: x @ x,
        "matmul 512×512": lambda: wide @ wide,
    }


def models(device: str) -> Mapping[str, Callable[[], Any]]:
    """A training step of a perceptron, and BERT-base."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, wanted = torch.randn(64, 256).to(device), torch.randint(0, 10, (64,)).to(device)

    def step() -> None:
        with torch.enable_grad():
            optimizer.zero_grad()
            torch.autograd.backward(nn.functional.cross_entropy(model(x), wanted))
            optimizer.step()

    bert, args = build("bert-base")
    moved, given = copy.deepcopy(bert).to(device), [a.to(device) for a in args]
    return {"a training step of an MLP": step, "BERT-base, 128 tokens": lambda: moved(*given)}


def measured() -> dict[str, dict[str, list[float]]]:
    """Seconds of a call, by name and device, round by round."""
    ways = {device: {**operators(device), **models(device)} for device in ("cpu", "ort")}
    found: dict[str, dict[str, list[float]]] = {name: {"cpu": [], "ort": []} for name in ways["cpu"]}
    for name in found:
        for calls in ways.values():
            for _ in range(3):
                calls[name]()
        for _ in range(_ROUNDS):
            for device, calls in ways.items():
                found[name][device].append(_seconds(calls[name]))
    return found


def _seconds(call: Callable[[], Any]) -> float:
    times: list[float] = []
    ends = time.perf_counter() + _ROUND_SECONDS
    while not times or time.perf_counter() < ends:
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return median(times)


def main() -> None:
    """Measure, show, and write what was measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.eager", description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write everything measured")
    given = parser.parse_args()
    eager.enable(fallback="error")
    torch.set_grad_enabled(False)
    found = measured()
    table = Table("the device ort, µs", ["what", "cpu", "ort", "ort ÷ cpu", "ort − cpu"], text_columns=1)
    for name, rounds in found.items():
        cpu, ort = (median(rounds[device]) * 1e6 for device in ("cpu", "ort"))
        table.add(name, f"{cpu:.2f}", f"{ort:.2f}", f"{ort / cpu:.2f}", f"{ort - cpu:.1f}")
    table.show()
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps({**describe(), "results": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
