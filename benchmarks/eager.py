"""The eager device against the CPU, in turns in one process: `python -m benchmarks.eager`.

Single operators, where what a call costs is everything, then a training step and a model, where it is little.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
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


def shares() -> dict[str, dict[str, dict[str, float]]]:
    """Where the time of models goes: of the time in operators, the share of those that take most."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for device in ("cpu", "ort"):
        for name, call in models(device).items():
            for _ in range(3):
                call()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                for _ in range(_PROFILED):
                    call()
            times = {event.key: float(event.self_cpu_time_total) for event in profile.key_averages()}
            most = sorted(times, key=lambda key: -times[key])[:_SHOWN]
            whole = sum(times.values())
            found.setdefault(name, {})[device] = {key: times[key] / whole for key in most}
    return found


_PROFILED, _SHOWN = 10, 6


def one(executor: str) -> dict[str, Any]:
    """Everything measured with one executor, in this process."""
    eager.enable(fallback="error", executor=executor)  # type: ignore[arg-type]  # argparse looked at it
    torch.set_grad_enabled(False)
    return {"results": measured(), "shares": shares()}


def show(executor: str, found: Mapping[str, Any]) -> None:
    """The tables of one executor."""
    columns = ["what", "cpu", "ort", "ort ÷ cpu", "ort − cpu"]
    table = Table(f"the device ort, executor {executor}, µs", columns, text_columns=1)
    for name, rounds in found["results"].items():
        cpu, ort = (median(rounds[device]) * 1e6 for device in ("cpu", "ort"))
        table.add(name, f"{cpu:.2f}", f"{ort:.2f}", f"{ort / cpu:.2f}", f"{ort - cpu:.1f}")
    table.show()
    for name, devices in found["shares"].items():
        print(f"where the time of {name} goes, executor {executor}:")
        for device, parts in devices.items():
            print(
                f"  {device}: " + ", ".join(f"{key.removeprefix('aten::')} {part:.0%}" for key, part in parts.items())
            )
        print()


def main() -> None:
    """Measure both executors, each in a process of its own, show, and write what was measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.eager", description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write everything measured")
    parser.add_argument("--executor", choices=("native", "python"), help="only this one (default: both)")
    parser.add_argument("--raw", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.raw:
        print(json.dumps(one(given.executor)))
        return
    executors = [given.executor] if given.executor else ["native", "python"]
    found: dict[str, Any] = {}
    for executor in executors:
        command = [sys.executable, "-m", "benchmarks.eager", "--raw", "--executor", executor]
        said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        found[executor] = json.loads(said.splitlines()[-1])
        show(executor, found[executor])
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps({**describe(), "executors": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
