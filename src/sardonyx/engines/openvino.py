"""OpenVINO on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch

from sardonyx import dtypes, fork, opsets
from sardonyx.engines import openvino_exact
from sardonyx.engines.contiguous import is_contiguous
from sardonyx.engines.engine import Availability, Engine, Job, Runner
from sardonyx.errors import EngineError, MissingDependency
from sardonyx.options import Options
from sardonyx.threads import ThreadPauser
from sardonyx.translate.translator import WEIGHTS_LOCATION

_BLOB = "model.blob"
_BY_ADDRESS = "*/_ORT_MEM_ADDR_/*"
"""What its reader takes as the file name of tensors that are in memory, their address as the offset."""
_INSTALL = 'pip install "sardonyx[openvino]"'


class OpenVino(Engine):
    """Runs models in OpenVINO, in the precision that torch computes in."""

    name = "openvino"

    def probe(self) -> Availability:
        """Whether it is installed; to ask for the version imports nothing."""
        try:
            return Availability(self.name, version("openvino"))
        except PackageNotFoundError:
            return Availability(self.name, None, _INSTALL)

    def kernels(self, device: torch.device) -> openvino_exact.Exact:
        """What it computes as torch does: it takes every dtype, and computes some in a narrower one."""
        return openvino_exact.Exact({})

    def opset(self, device: torch.device, operators: Set[str]) -> int:
        """22: of 23, attention and the newer norms are not read by every version."""
        return opsets.ATTENTION - 1

    def identity(self, options: Options) -> str:
        """Its version and the properties that the model is compiled with."""
        return f"{version('openvino')} {sorted(_properties(options).items())}"

    def compile(self, job: Job, folder: Path) -> None:
        """Write the compiled model, weights included."""
        (folder / _BLOB).write_bytes(_compiled(job)[0].export_model().getbuffer())

    def load(self, job: Job, artifact: Path | None) -> OpenVinoRunner:
        """Import what was compiled, or compile it now."""
        if artifact is None:
            return OpenVinoRunner(*_compiled(job), job)
        blob = np.memmap(artifact / _BLOB, np.uint8, "c")
        ov = _openvino()
        try:
            model = _core().import_model(ov.Tensor(blob, shared_memory=True), "CPU", _settings(job.options))
        except RuntimeError as error:
            raise _refused("cannot load what it compiled", error) from error
        return OpenVinoRunner(model, blob, job)


@cache
def _openvino() -> Any:
    try:
        import openvino
    except ImportError as error:
        raise MissingDependency(f"the engine 'openvino' needs the package openvino ({error})", hint=_INSTALL) from error
    return openvino


@cache
def _core() -> Any:
    return _openvino().Core()


def _properties(options: Options) -> dict[str, Any]:
    """What decides how the model computes. Unless told otherwise it would round to bfloat16 where the CPU has it."""
    return {"INFERENCE_PRECISION_HINT": "f32", **(options.engine_options or {})}


def _settings(options: Options) -> dict[str, Any]:
    """All properties: calls wait for their result, so one stream with all of torch's threads is the fastest."""
    threads = {"NUM_STREAMS": 1, "INFERENCE_NUM_THREADS": torch.get_num_threads(), "ENABLE_CPU_PINNING": False}
    return {**threads, **_properties(options)}


def _compiled(job: Job) -> tuple[Any, list[torch.Tensor]]:
    """The model, and the tensors whose memory it may use."""
    if job.device.type != "cpu":
        raise EngineError(
            f"openvino runs on the CPU, and the tensors are on {job.device}",
            hint="use the engine 'onnxruntime', or move the model to the CPU",
        )
    proto = onnx.load_from_string(job.model)
    openvino_exact.check(ir.from_proto(proto), job.weights)
    held = _point_at(proto, job.weights)
    try:
        model = _core().read_model(proto.SerializeToString())
        return _core().compile_model(model, "CPU", _settings(job.options)), held
    except RuntimeError as error:
        raise _refused("refused the model", error) from error


def _point_at(proto: onnx.ModelProto, weights: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Tell the reader where torch has the weights; those tensors, or copies that lie in order."""
    held = []
    for tensor in proto.graph.initializer:
        if any(entry.key == "location" and entry.value == WEIGHTS_LOCATION for entry in tensor.external_data):
            weight = weights[tensor.name].detach().resolve_neg().contiguous()
            held.append(weight)
            del tensor.external_data[:]
            entries = {"location": _BY_ADDRESS, "offset": weight.data_ptr(), "length": weight.nbytes}
            for key, value in entries.items():
                tensor.external_data.add(key=key, value=str(value))
    return held


class OpenVinoRunner(Runner):
    """One compiled model. Each call has an infer request of its own: threads need no lock, and nothing stays held."""

    def __init__(self, model: Any, memory: Any, job: Job) -> None:
        self._model, self._memory = model, memory
        self._tensor, self._shape = _openvino().Tensor, _openvino().Shape
        self._places = _places(model, job.inputs)
        self._outputs = list(zip(job.output_types, job.output_shapes, strict=True))
        self._bounded = openvino_exact.bounded_inputs(onnx.load_from_string(job.model))
        self._fixed: dict[int, tuple[Any, int, Any]] = dict.fromkeys(job.fixed, (None, 0, None))
        self._quietly: Callable[..., Any] = ThreadPauser()
        fork.register(self)

    def forked(self) -> None:
        """In a child process: refuse to run."""
        fork.never_free(self._model)
        self._quietly = fork.raise_in_child("openvino")

    def __call__(self, inputs: Sequence[torch.Tensor | int]) -> list[torch.Tensor]:
        """Run once, into memory of torch's where the sizes are known."""
        given = [None if sizes is None else torch.empty(sizes, dtype=dtype) for dtype, sizes in self._outputs]
        request = self._run(inputs, given)
        return [
            _taken(request.get_output_tensor(index), self._outputs[index][0]) if result is None else result
            for index, result in enumerate(given)
        ]

    def into(self, inputs: Sequence[torch.Tensor | int], outputs: Sequence[torch.Tensor]) -> None:
        """Run once, straight into the memory of these tensors where it lies in order."""
        if not all(map(is_contiguous, outputs)):
            super().into(inputs, outputs)
        else:
            self._run(inputs, outputs)

    def close(self) -> None:
        """Drop the model."""
        self._model = self._memory = None
        self._fixed.clear()

    def _run(self, inputs: Sequence[torch.Tensor | int], outputs: Sequence[torch.Tensor | None]) -> Any:
        """A request that has run, into these outputs where they are given."""
        request = self._model.create_infer_request()
        tensors = [(place, self._input(index, inputs[index])) for index, place in self._places]
        try:
            for place, tensor in tensors:
                request.set_input_tensor(place, tensor)
            for index, output in enumerate(outputs):
                if output is not None and output.numel():
                    request.set_output_tensor(index, self._over(output))
            self._quietly(request.infer, None, False, True)  # results are shared, not copied
        except RuntimeError as error:
            raise _refused("failed while running", error) from error
        return request

    def _input(self, index: int, x: torch.Tensor | int) -> Any:
        if index in self._fixed:
            return self._weight(index, x)
        if isinstance(x, int):
            x = torch.tensor([x])
        if index in self._bounded:
            openvino_exact.check_range(x)
        return self._over(x)

    def _over(self, x: torch.Tensor) -> Any:
        """A tensor over torch's memory, or over a copy where its elements do not lie there in order."""
        array = dtypes.to_array(x)
        if x.dtype == torch.bfloat16:
            return self._tensor(array.view(np.uint16), self._shape(array.shape), _openvino().Type.bf16)
        return self._tensor(array, shared_memory=True)

    def _weight(self, index: int, x: Any) -> Any:
        """The tensor of an input that seldom changes, made once for each tensor and address."""
        held, address, made = self._fixed[index]
        if held is not x or address != x.data_ptr() or not is_contiguous(x):
            made = self._over(x)
            self._fixed[index] = (x, x.data_ptr(), made)
        return made


def _places(model: Any, names: Sequence[str]) -> list[tuple[int, int]]:
    """Which input of ours is which of the compiled model's: it drops those that nothing depends on."""
    ports = {name: place for place, port in enumerate(model.inputs) for name in port.get_names()}
    return [(index, ports[name]) for index, name in enumerate(names) if name in ports]


def _taken(made: Any, dtype: torch.dtype) -> torch.Tensor:
    """A result over the memory of OpenVINO's tensor, which lives as long as it; the request is not used again."""
    array = made.data
    if dtype == torch.bfloat16:
        return torch.from_numpy(array.view(np.uint16)).view(dtype)
    return torch.from_numpy(array)


def _refused(how: str, error: Exception) -> EngineError:
    """Its message without the source lines it names first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines if not line.startswith(("Exception from ", "Check '"))] or lines
    return EngineError(f"openvino {how}: {' '.join(said)[:2000]}", hint=_HINT)


_HINT = 'the option dump="folder" keeps the model; engine="onnxruntime" runs it elsewhere'
