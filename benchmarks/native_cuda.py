"""Native kernels on a GPU, a region of a model at a time, in half precision: `python -m benchmarks.native_cuda`.

Each region is a model of its own. Three take turns in one process: a session with native kernels, one as ONNX
Runtime's CUDA provider optimises the region, and the same in torch, compiled by inductor. Everything stays in the GPU's
memory and runs on one stream; a round is many calls, and waiting for the last of them: for regions as small as these,
that is what it takes to call the GPU. What the GPU itself takes for a call is what its profiler says. What they compute
is compared with double precision, of the same inputs rounded to half.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import torch
from onnx import TensorProto, numpy_helper

from benchmarks.machine import describe, note_if_busy
from benchmarks.native_regions import REGIONS, Array, Feeds, Region
from benchmarks.tables import Table, progress, say
from sardonyx import Options
from sardonyx.native.partition import Library, plan_kernels
from sardonyx.native.targets import TARGETS

_ROUND_SECONDS = 0.005
_PROFILED_ROUNDS, _PROFILED_CALLS = 5, 20
_MOST_ERROR = 2e-3
"""Of the largest number: half precision has 11 bits, and ONNX Runtime rounds after each operator."""


def in_half(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same model with half precision in the place of single."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    del made.graph.value_info[:]
    for value in (*made.graph.input, *made.graph.output):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = TensorProto.FLOAT16
    attributes = (attribute.t for node in made.graph.node for attribute in node.attribute if attribute.HasField("t"))
    for tensor in (*made.graph.initializer, *attributes):
        if tensor.data_type == TensorProto.FLOAT:
            tensor.CopyFrom(numpy_helper.from_array(_half(numpy_helper.to_array(tensor)), tensor.name))
    return onnx.shape_inference.infer_shapes(made, data_prop=True, strict_mode=True)


def _half(array: Array) -> Array:
    return array.astype(np.float16) if array.dtype == np.float32 else array


class Case:
    """A region in half precision, what it is given, and what it gives in double."""

    def __init__(self, region: Region) -> None:
        self.region, self.model = region, in_half(region.model())
        self.feeds: Feeds = {name: _half(array) for name, array in region.feeds().items()}
        weights = {x.name: numpy_helper.to_array(x) for x in self.model.graph.initializer}
        self.tensors = {name: torch.from_numpy(x.copy()) for name, x in {**self.feeds, **weights}.items()}

    def exact(self) -> torch.Tensor:
        """The output in double precision."""
        wide = {name: x if x.dtype == torch.bool else x.double() for name, x in self.tensors.items()}
        return self.region.exact(wide)


@dataclass(frozen=True)
class Measured:
    """What a region took."""

    region: str
    seconds: dict[str, list[float]]
    """Of a call, round by round."""
    device_seconds: dict[str, list[float]]
    """That the GPU works for a call, round by round."""
    errors: dict[str, float]
    """The largest, as parts of the largest number."""

    def times(self, other: str) -> tuple[float, float]:
        """How many times as fast as another the native kernel is, by the medians: on the GPU, and as it is called."""
        on_gpu, called = (median(x[other]) / median(x["native"]) for x in (self.device_seconds, self.seconds))
        return on_gpu, called

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "times": {name: self.times(name) for name in _OTHERS}}


_OTHERS = ("ort", "inductor")


class SessionRunner:
    """A session of ONNX Runtime on a stream, everything bound to memory of the GPU."""

    def __init__(self, model: bytes, case: Case, stream: torch.cuda.Stream, library: Path | None) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        if library is not None:
            options.register_custom_ops_library(str(library))
        settings = {"user_compute_stream": str(stream.cuda_stream)}
        providers = [("CUDAExecutionProvider", settings), "CPUExecutionProvider"]
        self._session = onnxruntime.InferenceSession(model, options, providers=providers)
        if "CUDAExecutionProvider" not in self._session.get_providers():
            raise SystemExit("onnxruntime could not load its CUDA provider")
        self._run = onnxruntime.RunOptions()
        self._run.add_run_config_entry("disable_synchronize_execution_providers", "1")
        self._binding = self._session.io_binding()
        self._kept = {name: case.tensors[name].cuda() for name in case.feeds}
        for name, x in self._kept.items():
            kind = case.feeds[name].dtype
            self._binding.bind_input(name, "cuda", 0, kind, list(x.shape), x.data_ptr())
        shape = next(iter(case.region.outputs.values()))
        self._result = torch.empty(shape, dtype=torch.float16, device="cuda")
        output = self._session.get_outputs()[0].name
        self._binding.bind_output(output, "cuda", 0, np.float16, list(shape), self._result.data_ptr())

    def __call__(self) -> torch.Tensor:
        """One call, perhaps not done yet."""
        self._session.run_with_iobinding(self._binding, self._run)
        return self._result


class TorchRunner:
    """The region in torch, compiled by inductor."""

    def __init__(self, case: Case, stream: torch.cuda.Stream) -> None:
        self._compiled = torch.compile(case.region.exact, fullgraph=True, dynamic=False)
        self._given = {name: x.cuda() for name, x in case.tensors.items()}
        with torch.cuda.stream(stream), torch.no_grad():
            self()

    def __call__(self) -> torch.Tensor:
        """One call, perhaps not done yet."""
        return self._compiled(self._given)


def round_of(run: Callable[[], torch.Tensor], calls: int) -> float:
    """Seconds of a call, the mean over one round."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(calls):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / calls


def on_gpu(run: Callable[[], torch.Tensor]) -> float:
    """Seconds that the GPU works for a call, the mean over some calls."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(_PROFILED_CALLS):
            run()
        torch.cuda.synchronize()
    microseconds: float = sum(event.self_device_time_total for event in profile.key_averages())
    return microseconds * 1e-6 / _PROFILED_CALLS


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest difference, as a part of the largest number."""
    return ((found.cpu().double() - exact).abs().max() / exact.abs().max()).item()


def measure(case: Case, native: bytes, library: Path, rounds: int) -> Measured:
    """Let all of them take turns."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    runners: dict[str, Callable[[], torch.Tensor]] = {
        "native": SessionRunner(native, case, stream, library),
        "ort": SessionRunner(case.model.SerializeToString(), case, stream, None),
        "inductor": TorchRunner(case, stream),
    }
    exact, errors = case.exact(), {}
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    device_seconds: dict[str, list[float]] = {name: [] for name in runners}
    with torch.cuda.stream(stream), torch.no_grad():
        calls = {}
        torch.cuda.synchronize()
        for name, run in runners.items():
            for _ in range(3):
                found = run()
            torch.cuda.synchronize()
            errors[name] = error(found, exact)
            calls[name] = max(10, round(_ROUND_SECONDS / round_of(run, 20)))
        assert errors["native"] < _MOST_ERROR, f"{case.region.name} is off by {errors['native']:.1e}"
        for _ in range(rounds):
            for name, run in runners.items():
                seconds[name].append(round_of(run, calls[name]))
        for _ in range(_PROFILED_ROUNDS):
            for name, run in runners.items():
                device_seconds[name].append(on_gpu(run))
    return Measured(case.region.name, seconds, device_seconds, errors)


def kernels(cases: Sequence[Case]) -> tuple[dict[str, bytes], Path]:
    """The regions with native kernels, and the library that these are in."""
    target = TARGETS["cuda"]
    library, plans = Library(target), {}
    for case in cases:
        name = case.region.name
        plans[name] = plan_kernels(ir.from_proto(case.model), choice="all", library=library)
        assert len(plans[name].parts) == 1, f"{name}: {plans[name].rejected}"
    built = target.build(library.source, Options.of(), target.processor(None))
    for found in plans.values():
        found.splice()
    return {name: ir.to_proto(found.model).SerializeToString() for name, found in plans.items()}, built


def table(results: Sequence[Measured]) -> Table:
    """A row for each region; what native loses is marked."""
    columns = ["region", "on the GPU µs: native, ORT, inductor", "times ORT, inductor", "called µs", "times", "errors"]
    made = Table("native kernels on a GPU, float16", columns, text_columns=1)
    for m in results:
        cells = []
        for which, seconds in enumerate((m.device_seconds, m.seconds)):
            cells.append(" ".join(f"{median(seconds[name]) * 1e6:.1f}" for name in ("native", *_OTHERS)))
            times = (m.times(name)[which] for name in _OTHERS)
            cells.append(" ".join(f"{x:.2f}" + "!" * (x < 1) for x in times))
        made.add(m.region, *cells, " ".join(f"{m.errors[name]:.0e}" for name in ("native", *_OTHERS)))
    return made


def main() -> None:
    """Measure, show, and write what was measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.native_cuda", description=__doc__)
    parser.add_argument("--only", default="", help="regions whose names contain this")
    parser.add_argument("--rounds", type=int, default=51, help="turns of each")
    parser.add_argument("--json", type=Path, help="where to write everything measured")
    given = parser.parse_args()
    cases = [Case(region) for region in REGIONS if given.only.lower() in region.name.lower()]
    if not cases:
        parser.error(f"no region has {given.only!r} in its name; there are {', '.join(r.name for r in REGIONS)}")
    if not torch.cuda.is_available():
        parser.error("this needs a GPU that torch sees")
    busy = note_if_busy()
    models, library = kernels(cases)
    results: list[Measured] = []
    with progress(len(cases)) as shown:
        for case in cases:
            name = case.region.name
            shown.step(name)
            results.append(measure(case, models[name], library, given.rounds))
    table(results).show()
    for other in _OTHERS:
        slower = [f"{m.region} (×{m.times(other)[0]:.2f})" for m in results if m.times(other)[0] < 1]
        say(f"slower than {other} on the GPU: {', '.join(slower) or 'none'}")
    if given.json:
        content = {**describe(), "gpu": torch.cuda.get_device_name(), "busy_cores": busy}
        content["results"] = [m.as_dict() for m in results]
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
