"""Native kernels against ONNX Runtime's own, a region of a model at a time: `python -m benchmarks.native`.

Each region is a model of its own. Two sessions run it in turns in one process: one with native kernels, the other as
ONNX Runtime optimises it, all fusions allowed. Inputs and outputs are bound, so that only the region is timed. What
both compute is compared with the same in double precision.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import onnx
import onnx_ir as ir
import onnxruntime
import torch

from benchmarks.machine import describe, note_if_busy, run_on_cores
from benchmarks.native_regions import REGIONS, Array, Feeds, Region
from benchmarks.tables import Table, progress, say
from sardonyx import Options
from sardonyx.native.partition import KernelPlan, Library, plan_kernels
from sardonyx.toolchain import compiler

_ROUND_SECONDS, _WAKING_SECONDS = 0.01, 0.003
_PAUSE_SECONDS = 0.06
"""The threads of a session spin for 40 ms after a run; the other must not share the cores with them."""
_MOST_ERROR = 1e-6


@dataclass(frozen=True)
class Measured:
    """What a region took, by one number of threads."""

    region: str
    threads: int
    native: list[float]
    """Seconds of a call, round by round."""
    ort: list[float]
    native_error: float
    """The largest difference from double precision, as a part of the largest number."""
    ort_error: float
    operators: dict[str, int]
    """What ONNX Runtime made of the region."""
    gate: float

    @property
    def ratio(self) -> float:
        """How many times as fast the native kernel is, by the medians."""
        return median(self.ort) / median(self.native)

    @property
    def ratio_of_fastest(self) -> float:
        """The same by the fastest rounds, which others on the machine disturb least."""
        return min(self.ort) / min(self.native)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        medians = {"native_seconds": median(self.native), "ort_seconds": median(self.ort)}
        return {**asdict(self), **medians, "ratio": self.ratio, "ratio_of_fastest": self.ratio_of_fastest}


class Runner:
    """A session with everything bound."""

    def __init__(self, model: bytes, feeds: Feeds, threads: int, library: Path | None) -> None:
        options = onnxruntime.SessionOptions()
        run_on_cores(options, threads)
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
        options.log_severity_level = 3
        if library is not None:
            options.register_custom_ops_library(str(library))
        self._session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self._binding = self._session.io_binding()
        for name, array in feeds.items():
            self._binding.bind_cpu_input(name, array)
        for output in self._session.get_outputs():
            self._binding.bind_output(output.name)
        self._session.run_with_iobinding(self._binding)
        self._values = self._binding.get_outputs()
        for output, value in zip(self._session.get_outputs(), self._values, strict=True):
            self._binding.bind_ortvalue_output(output.name, value)
        self._calls = 1

    def results(self) -> list[Array]:
        """The outputs of a call."""
        self._session.run_with_iobinding(self._binding)
        return [value.numpy() for value in self._values]

    def settle(self) -> None:
        """Find out how many calls a round has, warm."""
        for _ in range(3):
            self._calls = max(3, round(_ROUND_SECONDS / self.round()))

    def wake(self) -> None:
        """Wait until other threads are asleep, and wake our own."""
        time.sleep(_PAUSE_SECONDS)
        awake = time.perf_counter() + _WAKING_SECONDS
        while time.perf_counter() < awake:
            self._session.run_with_iobinding(self._binding)

    def round(self) -> float:
        """Seconds of a call, the mean over one round."""
        run, binding = self._session.run_with_iobinding, self._binding
        started = time.perf_counter()
        for _ in range(self._calls):
            run(binding)
        return (time.perf_counter() - started) / self._calls


def optimised(model: bytes, folder: Path) -> dict[str, int]:
    """The operators that are left of a model when ONNX Runtime has optimised it."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(folder / "optimised.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    nodes = onnx.load(options.optimized_model_filepath).graph.node
    return dict(Counter(node.op_type for node in nodes))


def kernels(regions: Sequence[Region]) -> tuple[dict[str, KernelPlan], Path]:
    """The regions with native kernels, and the library that these are in."""
    library, plans = Library(), {}
    for region in regions:
        plans[region.name] = plan_kernels(ir.from_proto(region.model()), choice="all", library=library)
        assert len(plans[region.name].parts) == 1, f"{region.name}: {plans[region.name].rejected}"
    built = compiler.build_library(library.source, Options.of())
    for found in plans.values():
        found.splice()
    return plans, built


def error(results: Sequence[Array], wanted: Sequence[torch.Tensor]) -> float:
    """The largest difference, as a part of the largest number."""
    parts = []
    for found, exact in zip(results, wanted, strict=True):
        difference = (torch.from_numpy(found).double() - exact).abs().max()
        parts.append((difference / exact.abs().max()).item())
    return max(parts)


def measure(
    region: Region, found: KernelPlan, library: Path, threads: int, rounds: int, operators: dict[str, int]
) -> Measured:
    """Let both sessions take turns."""
    feeds = region.feeds()
    native = Runner(ir.to_proto(found.model).SerializeToString(), feeds, threads, library)
    ort = Runner(region.model().SerializeToString(), feeds, threads, None)
    wanted = region.wanted()
    native_error, ort_error = (error(runner.results(), wanted) for runner in (native, ort))
    assert native_error < _MOST_ERROR, f"{region.name} is off by {native_error:.1e} of its largest number"
    native.settle()
    ort.settle()
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(rounds):
        for runner, times in ((native, ours), (ort, theirs)):
            if threads > 1:
                runner.wake()
            times.append(runner.round())
    return Measured(region.name, threads, ours, theirs, native_error, ort_error, operators, region.gate)


def table(results: Sequence[Measured]) -> Table:
    """A row for each region and number of threads."""
    columns = ["region", "as ORT has it", "threads", "ORT µs", "native µs", "times", "fastest", "gate", "errors"]
    made = Table("native kernels", columns, text_columns=2)
    for m in results:
        names = " ".join(name if n == 1 else f"{n}×{name}" for name, n in m.operators.items())
        gate = f"{m.gate:g}" if m.ratio >= m.gate else f"{m.gate:g} !"
        times = (f"{median(m.ort) * 1e6:.1f}", f"{median(m.native) * 1e6:.1f}", f"{m.ratio:.2f}")
        errors = f"{m.ort_error:.0e} {m.native_error:.0e}"
        made.add(m.region, names, f"{m.threads}", *times, f"{m.ratio_of_fastest:.2f}", gate, errors)
    return made


def main() -> None:
    """Measure, show, and write what was measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.native", description=__doc__)
    parser.add_argument("--only", default="", help="regions whose names contain this")
    parser.add_argument("--threads", default="1,2", help="numbers of threads, with commas between them")
    parser.add_argument("--rounds", type=int, default=31, help="turns of each session")
    parser.add_argument("--json", type=Path, help="where to write everything measured")
    given = parser.parse_args()
    regions = [region for region in REGIONS if given.only.lower() in region.name.lower()]
    if not regions:
        parser.error(f"no region has {given.only!r} in its name; there are {', '.join(r.name for r in REGIONS)}")
    busy = note_if_busy()
    plans, library = kernels(regions)
    counts = [int(n) for n in given.threads.split(",")]
    results: list[Measured] = []
    with progress(len(regions) * len(counts)) as shown, tempfile.TemporaryDirectory() as folder:
        for region in regions:
            operators = optimised(region.model().SerializeToString(), Path(folder))
            for threads in counts:
                shown.step(f"{region.name}, threads: {threads}")
                results.append(measure(region, plans[region.name], library, threads, given.rounds, operators))
    table(results).show()
    slower = [f"{m.region} (threads: {m.threads}, ×{m.ratio:.2f} of {m.gate:g})" for m in results if m.ratio < m.gate]
    say(f"below their gates: {', '.join(slower) or 'none'}")
    if given.json:
        content = {**describe(), "busy_cores": busy, "results": [m.as_dict() for m in results]}
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
