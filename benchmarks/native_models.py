"""Whole models with native kernels and without: `python -m benchmarks.native_models`.

Each model is what `torch.onnx.export` gives, and what `sardonyx.export` gives, with its rules applied; either is
compiled by `native.compile(model, measure=inputs)`. The sessions with kernels and without take turns in one process, as
ONNX Runtime optimises them, all fusions allowed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import onnx_ir as ir
import onnxruntime
import torch

import sardonyx
from benchmarks.machine import describe, note_if_busy, run_on_cores
from benchmarks.models import MODELS, Case, build
from benchmarks.tables import Table, milliseconds, progress, say
from sardonyx import native
from sardonyx.native.session import open_session

_ROUND_SECONDS = 0.2
_PAUSE_SECONDS = 0.06
"""The threads of a session spin for 40 ms after a run; the other must not share the cores with them."""
GATES = {"llama-decode": 1.15, "bert-base": 1.04}
"""How many times as fast a model has to be; others at least as fast, but for what measuring itself varies by."""
_AS_FAST = 0.98


@dataclass
class Measured:
    """What a model took without kernels and with them, by who exported it."""

    model: str
    exporter: str
    threads: int
    kernels: int
    put_back: int
    nodes: tuple[int, int]
    error: float
    """The largest difference from PyTorch, as a part of the largest number."""
    without: list[float] = field(default_factory=list)
    """Seconds of a call, round by round."""
    native: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """How many times as fast it is with kernels: the median over rounds, in which both took their turn."""
        return median(before / after for before, after in zip(self.without, self.native, strict=True))

    @property
    def gate(self) -> float:
        """What the ratio has to be."""
        return GATES.get(self.model, _AS_FAST)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        seconds = {"without_seconds": median(self.without), "native_seconds": median(self.native)}
        return {**asdict(self), **seconds, "ratio": self.ratio, "gate": self.gate}


class Runner:
    """A session, and what it is run with."""

    def __init__(self, model: ir.Model, library: Path | None, feeds: Mapping[str, Any], threads: int) -> None:
        options = onnxruntime.SessionOptions()
        run_on_cores(options, threads)
        options.log_severity_level = 3
        self._session, self._feeds = open_session(model, library, options), feeds
        self._calls = 1
        for _ in range(3):
            self._calls = max(2, round(_ROUND_SECONDS / self.round()))

    def result(self) -> torch.Tensor:
        """The output of a call."""
        return torch.from_numpy(self._session.run(None, self._feeds)[0])

    def round(self) -> float:
        """Seconds of a call, the mean over one round."""
        time.sleep(_PAUSE_SECONDS)
        run, feeds = self._session.run, self._feeds
        run(None, feeds)
        started = time.perf_counter()
        for _ in range(self._calls):
            run(None, feeds)
        return (time.perf_counter() - started) / self._calls


def exported(case: Case) -> Iterator[tuple[str, ir.Model]]:
    """The model as each exporter writes it."""
    module, args = case
    with torch.no_grad(), warnings.catch_warnings(), contextlib.redirect_stdout(None):
        warnings.simplefilter("ignore")
        program = torch.onnx.export(module, args, dynamo=True, verbose=False)
        assert program is not None
    yield "torch.onnx", program.model
    yield "sardonyx", sardonyx.export(module, args).model


def measure(name: str, threads: Sequence[int], rounds: int) -> list[Measured]:
    """Compile a model of either exporter, and let the sessions take turns."""
    case = build(name)
    measured = []
    for exporter, model in exported(case):
        feeds = {str(x.name): arg.numpy() for x, arg in zip(model.graph.inputs, case[1], strict=True)}
        compiled = native.compile(model, measure=feeds)
        measured += [_turns(name, exporter, n, case, model, compiled, feeds, rounds) for n in threads]
    return measured


def _turns(
    name: str,
    exporter: str,
    threads: int,
    case: Case,
    model: ir.Model,
    compiled: native.NativeModel,
    feeds: Mapping[str, Any],
    rounds: int,
) -> Measured:
    with torch.no_grad():
        expected = case[0](*case[1])
    runners = [Runner(model, None, feeds, threads), Runner(compiled.model, compiled.library, feeds, threads)]
    error = ((runners[1].result() - expected).abs().max() / expected.abs().max()).item()
    report = compiled.report
    found = Measured(
        *(name, exporter, threads, len(report.kernels), len(report.put_back)),
        (report.nodes_before, report.nodes_after),
        error,
    )
    for _ in range(rounds):
        found.without.append(runners[0].round())
        found.native.append(runners[1].round())
    return found


def table(results: Sequence[Measured]) -> Table:
    """A row for each model, exporter and number of threads."""
    columns = [
        "model",
        "exported by",
        "threads",
        "nodes",
        "kernels",
        "without ms",
        "native ms",
        "times",
        "gate",
        "error",
    ]
    made = Table("models with native kernels", columns, text_columns=2)
    for m in results:
        nodes, gate = f"{m.nodes[0]} → {m.nodes[1]}", f"{m.gate:g}" + " !" * (m.ratio < m.gate)
        times = (milliseconds(median(m.without)), milliseconds(median(m.native)), f"{m.ratio:.2f}")
        made.add(m.model, m.exporter, f"{m.threads}", nodes, f"{m.kernels}", *times, gate, f"{m.error:.0e}")
        if m is results[-1] or results[results.index(m) + 1].model != m.model:
            made.end_section()
    return made


def main() -> None:
    """Measure, show, and write what was measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.native_models", description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS), help="names, with commas between them")
    parser.add_argument("--threads", default="1,2", help="numbers of threads, with commas between them")
    parser.add_argument("--rounds", type=int, default=11, help="turns of each session")
    parser.add_argument("--json", type=Path, help="where to write everything measured")
    asked = parser.parse_args()
    names = asked.models.split(",")
    unknown = [name for name in names if name not in MODELS]
    if unknown:
        parser.error(f"unknown model {unknown[0]!r}; there are {', '.join(MODELS)}")
    logging.disable(logging.WARNING)  # what torch.onnx tells of its steps
    busy, results = note_if_busy(), []
    with progress(len(names)) as shown:
        for name in names:
            shown.step(name)
            results += measure(name, [int(n) for n in asked.threads.split(",")], asked.rounds)
    table(results).show()
    below = [f"{m.model} of {m.exporter} (threads: {m.threads}, ×{m.ratio:.2f})" for m in results if m.ratio < m.gate]
    say(f"below their gates: {', '.join(below) or 'none'}")
    if asked.json:
        content = {**describe(), "busy_cores": busy, "results": [m.as_dict() for m in results]}
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        asked.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
