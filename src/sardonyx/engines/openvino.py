"""The engine OpenVINO, on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
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
from sardonyx.errors import EngineError, MissingDependency, OptionError
from sardonyx.options import Options
from sardonyx.threads import ThreadPauser
from sardonyx.translate.translator import WEIGHTS_LOCATION

_BLOB = "model.blob"
_BY_ADDRESS = "*/_ORT_MEM_ADDR_/*"
"""The file name by which its reader recognizes tensors in memory, with their address as the offset."""
_PRECISION = "INFERENCE_PRECISION_HINT"
_INSTALL = 'pip install "sardonyx[openvino]"'


class OpenVino(Engine):
    """Runs models in OpenVINO, with the precision of torch."""

    name = "openvino"
    takes_quantized_layers = True

    def probe(self) -> Availability:
        """Whether it is installed; the version is read without importing it."""
        try:
            return Availability(self.name, version("openvino"))
        except PackageNotFoundError:
            return Availability(self.name, None, _INSTALL)

    def kernels(self, device: torch.device) -> openvino_exact.Exact:
        """Return what it computes as torch does: it accepts every dtype, but computes some in a narrower one."""
        return openvino_exact.Exact({})

    def opset(self, device: torch.device, operators: Set[str]) -> int:
        """Return 22: not every version reads opset 23's attention and norms."""
        return opsets.ATTENTION - 1

    def in_precision(self, precision: str, options: Options) -> Options | None:
        """Return options with the property for bfloat16, in which it also computes what is between layers in int8."""
        properties = options.engine_options or {}
        if precision not in ("bf16", "int8"):
            return None
        if _PRECISION in properties:
            raise OptionError(f"precision={options.precision!r} and {_PRECISION!r}", hint="leave out one of them")
        return replace(options, engine_options={**properties, _PRECISION: "bf16"})

    def identity(self, options: Options) -> str:
        """Return its version and the properties that affect compilation."""
        return f"{_installed_version()} {sorted(_properties(options).items())}"

    def compile(self, job: Job, folder: Path) -> None:
        """Write the compiled model with its weights."""
        (folder / _BLOB).write_bytes(_compile(job)[0].export_model().getbuffer())

    def load(self, job: Job, artifact: Path | None) -> OpenVinoRunner:
        """Import the compiled model, or compile it now."""
        if artifact is None:
            return OpenVinoRunner(*_compile(job), job)
        blob = np.memmap(artifact / _BLOB, np.uint8, "c")
        ov = _openvino()
        try:
            model = _core().import_model(ov.Tensor(blob, shared_memory=True), "CPU", _settings(job.options))
        except RuntimeError as error:
            raise _engine_error("cannot load the compiled model", error) from error
        return OpenVinoRunner(model, blob, job)


@cache
def _openvino() -> Any:
    try:
        import openvino
    except ImportError as error:
        raise _missing(error) from error
    return openvino


def _installed_version() -> str:
    try:
        return version("openvino")
    except PackageNotFoundError as error:
        raise _missing(error) from error


def _missing(error: ImportError) -> MissingDependency:
    return MissingDependency(f"the engine 'openvino' needs the package openvino ({error})", hint=_INSTALL)


@cache
def _core() -> Any:
    return _openvino().Core()


def _properties(options: Options) -> dict[str, Any]:
    """Return the properties that affect results. By default OpenVINO rounds to bfloat16 on CPUs that support it."""
    return {_PRECISION: "f32", **(options.engine_options or {})}


def _settings(options: Options) -> dict[str, Any]:
    """Return all properties: calls wait for their result, so one stream with all of torch's threads is fastest."""
    threads = {"NUM_STREAMS": 1, "INFERENCE_NUM_THREADS": torch.get_num_threads(), "ENABLE_CPU_PINNING": False}
    return {**threads, **_properties(options)}


def _compile(job: Job) -> tuple[Any, list[torch.Tensor]]:
    """Compile the model; also return the tensors whose memory it may use."""
    if job.device.type != "cpu":
        raise EngineError(
            f"openvino runs on the CPU, but the tensors are on {job.device}",
            hint="use the engine 'onnxruntime', or move the model to the CPU",
        )
    proto = onnx.load_from_string(job.model)
    openvino_exact.check(ir.from_proto(proto), job.weights)
    tensors = _reference_weights(proto, job.weights)
    try:
        model = _core().read_model(proto.SerializeToString())
        return _core().compile_model(model, "CPU", _settings(job.options)), tensors
    except RuntimeError as error:
        raise _engine_error("refused the model", error) from error


def _reference_weights(proto: onnx.ModelProto, weights: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Set the address of each weight in the model; return the tensors, or contiguous copies of them."""
    tensors = []
    for tensor in proto.graph.initializer:
        if any(entry.key == "location" and entry.value == WEIGHTS_LOCATION for entry in tensor.external_data):
            weight = weights[tensor.name].detach().resolve_neg().contiguous()
            tensors.append(weight)
            del tensor.external_data[:]
            entries = {"location": _BY_ADDRESS, "offset": weight.data_ptr(), "length": weight.nbytes}
            for key, value in entries.items():
                tensor.external_data.add(key=key, value=str(value))
    return tensors


class OpenVinoRunner(Runner):
    """One compiled model. Each call has an infer request to itself, so threads need no lock."""

    def __init__(self, model: Any, memory: Any, job: Job) -> None:
        self._model, self._memory = model, memory
        self._tensor, self._shape = _openvino().Tensor, _openvino().Shape
        self._ports = _input_ports(model, job.inputs)
        self._outputs = list(zip(job.output_types, job.output_shapes, strict=True))
        self._bounded = openvino_exact.bounded_inputs(onnx.load_from_string(job.model))
        self._fixed: dict[int, tuple[Any, int, Any]] = dict.fromkeys(job.fixed, (None, 0, None))
        self._idle: list[Any] = []
        """Requests that no result shares memory with: making one allocates all values of the model."""
        self._quietly: Callable[..., Any] = ThreadPauser()
        fork.register(self)

    def forked(self) -> None:
        """Refuse to run in a forked child process."""
        fork.never_free(self._model)
        fork.never_free(self._idle)
        self._quietly = fork.raise_in_child("openvino")

    def __call__(self, inputs: Sequence[torch.Tensor | int]) -> list[torch.Tensor]:
        """Run once, into torch's memory if the shapes are known."""
        outputs = [None if sizes is None else torch.empty(sizes, dtype=dtype) for dtype, sizes in self._outputs]
        request = self._run(inputs, outputs)
        return [
            _to_torch(request.get_output_tensor(index), self._outputs[index][0]) if result is None else result
            for index, result in enumerate(outputs)
        ]

    def into(self, inputs: Sequence[torch.Tensor | int], outputs: Sequence[torch.Tensor]) -> None:
        """Run once, writing directly into the memory of these tensors if they are contiguous."""
        if not all(map(is_contiguous, outputs)):
            super().into(inputs, outputs)
        else:
            self._run(inputs, outputs)

    def close(self) -> None:
        """Free the model."""
        self._idle.clear()
        self._model = self._memory = None
        self._fixed.clear()

    def _run(self, inputs: Sequence[torch.Tensor | int], outputs: Sequence[torch.Tensor | None]) -> Any:
        """Run an infer request, into the given outputs that are not None; return it."""
        request = self._request()
        tensors = [(port, self._input(index, inputs[index])) for index, port in self._ports]
        try:
            for port, tensor in tensors:
                request.set_input_tensor(port, tensor)
            for index, output in enumerate(outputs):
                if output is not None and output.numel():
                    request.set_output_tensor(index, self._wrap(output))
            self._quietly(request.infer, None, False, True)  # results are shared, not copied
        except RuntimeError as error:
            raise _engine_error("failed at run time", error) from error
        if all(output is not None and output.numel() for output in outputs):
            self._idle.append(request)
        return request

    def _request(self) -> Any:
        try:
            return self._idle.pop()
        except IndexError:
            return self._model.create_infer_request()

    def _input(self, index: int, x: torch.Tensor | int) -> Any:
        if index in self._fixed:
            return self._fixed_tensor(index, x)
        if isinstance(x, int):
            x = torch.tensor([x])
        if index in self._bounded:
            openvino_exact.check_range(x)
        return self._wrap(x)

    def _wrap(self, x: torch.Tensor) -> Any:
        """Return an OpenVINO tensor that shares torch's memory, or that of a contiguous copy."""
        array = dtypes.to_array(x)
        if x.dtype == torch.bfloat16:
            return self._tensor(array.view(np.uint16), self._shape(array.shape), _openvino().Type.bf16)
        return self._tensor(array, shared_memory=True)

    def _fixed_tensor(self, index: int, x: Any) -> Any:
        """Return the tensor of an input that seldom changes, cached by tensor and address."""
        cached, address, tensor = self._fixed[index]
        if cached is not x or address != x.data_ptr() or not is_contiguous(x):
            tensor = self._wrap(x)
            self._fixed[index] = (x, x.data_ptr(), tensor)
        return tensor


def _input_ports(model: Any, names: Sequence[str]) -> list[tuple[int, int]]:
    """Map our inputs to those of the compiled model, which drops inputs that no result depends on."""
    ports = {name: number for number, port in enumerate(model.inputs) for name in port.get_names()}
    return [(index, ports[name]) for index, name in enumerate(names) if name in ports]


def _to_torch(tensor: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor that shares the memory of OpenVINO's; the request is not reused, so nothing overwrites it."""
    array = tensor.data
    if dtype == torch.bfloat16:
        return torch.from_numpy(array.view(np.uint16)).view(dtype)
    return torch.from_numpy(array)


def _engine_error(failure: str, error: Exception) -> EngineError:
    """Return an error with OpenVINO's message, without the C++ source locations at its start."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    message = [line for line in lines if not line.startswith(("Exception from ", "Check '"))] or lines
    return EngineError(f"openvino {failure}: {' '.join(message)[:2000]}", hint=_HINT)


_HINT = 'use engine="onnxruntime", or dump="folder" to save the model'
