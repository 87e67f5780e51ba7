"""The eager device against the CPU, in turns in one process: `python -m benchmarks.eager`.

Single operators, where what a call costs is everything, then a training step and a model, where it is little.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import torch
from torch import nn

from benchmarks.internals import difference
from benchmarks.machine import describe
from benchmarks.models import SEED, build
from benchmarks.tables import Table
from benchmarks.turns import Prepared, Suite
from sardonyx import eager

_ROUNDS = 9
_ROUND_SECONDS = 0.2


Call: TypeAlias = Callable[[], torch.Tensor]
Case: TypeAlias = Callable[[str], Call]
"""Gives the call to measure on a device, with the same numbers on each."""


def _square(size: int, operator: Callable[[torch.Tensor], Call]) -> Case:
    def on(device: str) -> Call:
        torch.manual_seed(SEED)
        return operator(torch.randn(size, size).to(device))

    return on


def training_step(device: str) -> Call:
    """A training step of a perceptron."""
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, wanted = torch.randn(64, 256).to(device), torch.randint(0, 10, (64,)).to(device)

    def step() -> torch.Tensor:
        with torch.enable_grad():
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), wanted)
            torch.autograd.backward(loss)
            optimizer.step()
        return loss

    return step


def bert(device: str) -> Call:
    """BERT-base."""
    model, args = build("bert-base")
    moved, given = model.to(device), [a.to(device) for a in args]
    return lambda: moved(*given)


OPERATORS: Mapping[str, Case] = {
    "add 64×64": _square(64, lambda x: lambda: x + x),
    "relu 64×64": _square(64, lambda x: lambda: x.relu()),
    "transpose, a view": _square(64, lambda x: lambda: x.t()),
    "add in place 64×64": _square(64, lambda x: lambda: x.add_(0.0)),
    "matmul 64×64": _square(64, lambda x: lambda: x @ x),
    "matmul 512×512": _square(512, lambda x: lambda: x @ x),
}
MODELS: Mapping[str, Case] = {"a training step of an MLP": training_step, "BERT-base, 128 tokens": bert}
CASES = {**OPERATORS, **MODELS}
EXECUTORS = ("native", "python")

SUITE = Suite("eager", __doc__, tuple(CASES), EXECUTORS, ours=EXECUTORS, cold=False)  # the C++ core is built once


def prepare(model: str, engine: str) -> Prepared:
    """The call on the device, done once and compared with the CPU's; for `benchmarks.against`."""
    _enable(engine)
    expected = CASES[model]("cpu")()
    call = CASES[model]("ort")
    started = time.perf_counter()
    result = call().cpu()
    return Prepared(call, time.perf_counter() - started, difference(result, expected), None)


def measured() -> dict[str, dict[str, list[float]]]:
    """Seconds of a call, by name and device, round by round."""
    found: dict[str, dict[str, list[float]]] = {}
    for name, case in CASES.items():
        calls = {device: case(device) for device in ("cpu", "ort")}
        for call in calls.values():
            for _ in range(3):
                call()
        rounds = [{device: _seconds(call) for device, call in calls.items()} for _ in range(_ROUNDS)]
        found[name] = {device: [seconds[device] for seconds in rounds] for device in calls}
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
        for name, case in MODELS.items():
            call = case(device)
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
    _enable(executor)
    return {"results": measured(), "shares": shares()}


def _enable(executor: str) -> None:
    eager.enable(fallback="error", executor=executor)  # type: ignore[arg-type]  # argparse looked at it
    torch.set_grad_enabled(False)


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
    parser.add_argument("--executor", choices=EXECUTORS, help="only this one (default: both)")
    parser.add_argument("--raw", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.raw:
        print(json.dumps(one(given.executor)))
        return
    executors = [given.executor] if given.executor else EXECUTORS
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
