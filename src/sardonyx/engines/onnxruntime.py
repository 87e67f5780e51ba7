"""ONNX Runtime, the default engine."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence, Set
from functools import cache
from pathlib import Path
from typing import Any

import torch

from sardonyx import fork, opsets
from sardonyx.engines import blocked, ortvalue
from sardonyx.engines.contiguous import is_contiguous
from sardonyx.engines.engine import Availability, Engine, Job, Runner
from sardonyx.engines.ortvalue import from_torch
from sardonyx.errors import EngineError, MissingDependency, MissingKernel, OptionError
from sardonyx.optimize.legalize import Kernels
from sardonyx.threads import ThreadPauser
from sardonyx.toolchain.operator_libraries import libraries_of

log = logging.getLogger(__name__)

_CUDA_STREAM_LEGACY = 1
"""CUDA's explicit handle of the default stream. Torch calls it 0, which ONNX Runtime takes for none given, and then it
uses a stream of its own that waits for nobody."""
_CUDA_BEFORE_OPSET_22 = ("aten::max_pool", "aten::native_group_norm", "aten::elu")
"""What becomes MaxPool, InstanceNormalization or Elu, which ran on the CPU from opset 22 on (onnxruntime-gpu 1.31)."""

_COMPARE_32_BITS = frozenset({"Max", "Min", "Clip", "Sign"})
"""CPU kernels of int64 that compare the low 32 bits in vector registers, as its ReduceMax and ReduceMin also do."""
_REDUCE_IN_DOUBLE = frozenset({"ReduceMax", "ReduceMin"})
"""CUDA kernels of int64 that compute in double precision."""


class OnnxRuntime(Engine):
    """Runs models in ONNX Runtime, on the CPU or an accelerator."""

    name = "onnxruntime"
    domains = frozenset({"com.microsoft"})
    custom_operators = True
    takes_session_options = True

    def probe(self) -> Availability:
        """Whether a working onnxruntime is installed."""
        try:
            return Availability(self.name, _onnxruntime().__version__)
        except MissingDependency as error:
            return Availability(self.name, None, error.what)

    def local_domains(self, device: torch.device, operators: Set[str]) -> frozenset[str]:
        """On the CPU, convolutions over blocks of channels, where there are any."""
        if device.type != "cpu" or operators.isdisjoint(blocked.OPERATORS):
            return frozenset()
        found = blocked.domain(_onnxruntime())
        return frozenset({found} if found else ())

    def kernels(self, device: torch.device) -> Kernels:
        """What its kernels on this device accept."""
        return _kernels("CUDAExecutionProvider" if device.type == "cuda" else "CPUExecutionProvider")

    def opset(self, device: torch.device, operators: Set[str]) -> int:
        """23, which has attention and RMS norm; less where the CUDA provider lacks the newer form of an operator."""
        lacking = device.type == "cuda" and any(name.startswith(_CUDA_BEFORE_OPSET_22) for name in operators)
        return opsets.POOLING_TYPES - 1 if lacking else opsets.NEWEST

    def freezes(self, device: torch.device) -> bool:
        """On the CPU constants are pre-packed; elsewhere they would be copied through the host, so they are bound."""
        return device.type == "cpu"

    def takes_kernels(self, device: torch.device) -> bool:
        """On the CPU."""
        return device.type == "cpu"

    def load(self, job: Job, artifact: Path | None) -> OnnxRuntimeRunner:
        """Create a session."""
        return OnnxRuntimeRunner(job)


@cache
def _onnxruntime() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingDependency(
            f"the engine 'onnxruntime' needs the package onnxruntime ({error})",
            hint='pip install "sardonyx[cpu]", or "sardonyx[gpu]" for CUDA; never both',
        ) from error
    if not hasattr(onnxruntime, "InferenceSession"):
        raise MissingDependency(
            "onnxruntime is installed but broken, as happens when its CPU and GPU wheels overwrite each other",
            hint="pip uninstall onnxruntime onnxruntime-gpu, then install one of them",
        )
    return onnxruntime


@cache
def _kernels(provider: str) -> Kernels:
    """The kernels of one provider. Asking for those of all would load every provider's library, and can crash.

    Where it does not list them, as the CUDA provider does not, it is taken to accept any dtype: nodes that it lacks a
    kernel for run on the CPU. What is inexact is known all the same.
    """
    _onnxruntime()
    try:
        kernels = ortvalue.binding().get_registered_ep_kernel_defs(provider)
    except Exception as error:
        log.info("%s does not list its kernels: %s", provider, error)
        kernels = []
    found: dict[tuple[str, str], list[tuple[range, Mapping[str, Sequence[str]]]]] = {}
    for kernel in kernels:
        versions = range(kernel.version_range[0], kernel.version_range[1] + 1)
        found.setdefault((kernel.domain, kernel.op_name), []).append((versions, kernel.type_constraints))
    on_cpu = provider == "CPUExecutionProvider"
    inexact = _COMPARE_32_BITS | _REDUCE_IN_DOUBLE if on_cpu else _REDUCE_IN_DOUBLE
    return Kernels(
        found,
        where_loses_zero_sign=on_cpu,
        max_pool_loses_infinity=on_cpu,
        joins_casts=True,
        inexact_int64=inexact,
    )


class OnnxRuntimeRunner(Runner):
    """One session, called with torch tensors and nothing copied."""

    def __init__(self, job: Job) -> None:
        _onnxruntime()  # or an error that says what is missing
        if job.options.engine_options:
            raise OptionError(
                f"onnxruntime has no engine_options, and was given {dict(job.options.engine_options)}",
                hint="its settings are session_options and providers",
            )
        c = ortvalue.binding()
        self._job: Job | None = job
        self._weights = {name: from_torch(t) for name, t in job.weights.items()}
        self._open(job)
        self._vector = c.OrtValueVector
        self._inputs, self._outputs = list(job.inputs), list(job.outputs)
        self._devices = [ortvalue.device_of(job.device)] * len(self._outputs)
        self.output_types = job.output_types
        self._readers = [ortvalue.reader(dtype, job.device) for dtype in job.output_types]
        self._run_options = c.RunOptions()
        self._quietly = ThreadPauser()
        if job.device.type == "cuda":
            self._run_options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        self._allocate = _allocator(job)
        self._fixed: dict[int, tuple[Any, int, Any]] = dict.fromkeys(job.fixed, (None, 0, None))
        self._lock = fork.Lock()
        fork.register(self)

    def _open(self, job: Job) -> None:
        """Create the session."""
        ort = _onnxruntime()
        options = session_options(ort, job.options.session_options)
        for library in (*job.libraries, *libraries_of(job.model)):
            options.register_custom_ops_library(str(library))
        _share(ort, options, self._weights)
        providers = _providers(ort, job)
        try:
            self._session = ort.InferenceSession(
                job.model, options, providers=providers, disabled_optimizers=_inexact_rewrites(job)
            )
        except Exception as error:
            raise _session_error(error) from error
        self._run = self._session._sess.run_with_ortvaluevector

    def forked(self) -> None:
        """In a child process, which has none of the session's threads: have another session from the next call on."""
        if self._job is not None:
            fork.never_free(self._session)
            self._session, self._run = None, self._open_and_run

    def _open_and_run(self, *args: Any) -> None:
        with self._lock:
            if self._session is None and self._job is not None:
                self._open(self._job)
        self._run(*args)

    def __call__(self, inputs: Sequence[torch.Tensor | int]) -> list[torch.Tensor]:
        """Run once. Nothing here is shared between calls, so threads need no lock."""
        fetches = self._vector()
        given = self._allocate(fetches) if self._allocate else None
        self._run_to(inputs, fetches)
        return given or [read(fetches, index) for index, read in enumerate(self._readers)]

    def into(self, inputs: Sequence[torch.Tensor | int], outputs: Sequence[torch.Tensor]) -> None:
        """Run once, straight into the memory of these tensors where it lies in order."""
        if not all(map(is_contiguous, outputs)):
            return super().into(inputs, outputs)
        fetches = self._vector()
        for output in outputs:
            fetches.push_back(from_torch(output))
        return self._run_to(inputs, fetches)

    def feeds(self, values: Sequence[Any]) -> Any:
        """ONNX Runtime's own values as `fetch` takes them."""
        given = self._vector()
        for value in values:
            given.push_back(value)
        return given

    def fetch(self, feeds: Any) -> Any:
        """Run once with ONNX Runtime's own values; a vector of them."""
        fetches = self._vector()
        try:
            self._quietly(self._run, self._run_options, self._inputs, feeds, self._outputs, fetches, self._devices)
        except Exception as error:
            raise _run_error(error) from error
        return fetches

    def _run_to(self, inputs: Sequence[torch.Tensor | int], fetches: Any) -> None:
        feeds = self._vector()
        for index, x in enumerate(inputs):
            feeds.push_back(self._weight(index, x) if index in self._fixed else from_torch(x))
        try:
            self._quietly(self._run, self._run_options, self._inputs, feeds, self._outputs, fetches, self._devices)
        except Exception as error:
            raise _run_error(error) from error

    def _weight(self, index: int, x: Any) -> Any:
        """The value of an input that seldom changes, made once for each tensor and address."""
        if not is_contiguous(x):
            return from_torch(x)  # a copy, which would not see the next edit
        tensor, address, value = self._fixed[index]
        if tensor is not x or address != x.data_ptr():
            value = from_torch(x)
            self._fixed[index] = (x, x.data_ptr(), value)
        return value

    def close(self) -> None:
        """Drop the session and its hold on the weights."""
        self._session = self._run = self._job = None
        self._weights = {}


def _share(ort: Any, options: Any, weights: Mapping[str, Any]) -> None:
    """Let the session use torch's memory for its weights.

    The external initializers are what its optimizers read; alone, each would be copied. The plain initializers of the
    same names are what its kernels use in place of those copies.
    """
    values = {name: ort.OrtValue(value) for name, value in weights.items()}
    if values:
        options.add_external_initializers(list(values), list(values.values()))
    for name, value in values.items():
        options.add_initializer(name, value)


def _allocator(job: Job) -> Any:
    """A function that makes the outputs in torch and binds them, where wanted and their sizes are known."""
    wanted = job.options.preallocate_outputs
    if wanted is None:
        wanted = job.device.type != "cpu"
    if not wanted or any(shape is None or 0 in shape for shape in job.output_shapes):
        return None

    def allocate(fetches: Any) -> list[torch.Tensor]:
        made = [
            torch.empty(shape or (), dtype=dtype, device=job.device)
            for shape, dtype in zip(job.output_shapes, job.output_types, strict=True)
        ]
        for tensor in made:
            fetches.push_back(from_torch(tensor))
        return made

    return allocate


_STOP_SPINNING = ("session.force_spinning_stop", "1")
"""Threads that spin for work only while a call runs. By default they go on for a while after it, against torch's and
other sessions': six sessions in a row took 27 ms on two cores instead of 4, with torch between them 78 instead of 11.
A global pool does as well as this between sessions (4 ms), but cannot be told to stop, took 28 ms with torch between,
and makes ONNX Runtime refuse every other session of the process that does not know of it."""


def _inexact_rewrites(job: Job) -> list[str]:
    """ONNX Runtime's rewrites that the model must not go through: one rounds the scale of a product to a float."""
    return ["MatMulScaleFusion"] if torch.float64 in job.output_types else []


def session_options(ort: Any, given: Any) -> Any:
    """A session's options as this engine sets them, and then as they are given."""
    options = ort.SessionOptions()
    options.log_severity_level = 4  # what it says of a call that fails is in the error
    if isinstance(given, ort.SessionOptions):
        given = _changed_attributes(given, ort.SessionOptions())
    if given is not None and not isinstance(given, Mapping):
        raise OptionError(
            f"session_options is {type(given).__name__}", hint="use a dict or an onnxruntime.SessionOptions"
        )
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry(*_STOP_SPINNING)
    _apply(options, given or {})
    return options


def _changed_attributes(given: Any, default: Any) -> dict[str, Any]:
    names = [name for name in dir(type(given)) if isinstance(getattr(type(given), name), property)]
    return {name: getattr(given, name) for name in names if getattr(given, name) != getattr(default, name)}


def _apply(options: Any, given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if name == "config":
            for key, entry in value.items():
                options.add_session_config_entry(key, str(entry))
        elif name == "custom_ops":
            for library in value:
                options.register_custom_ops_library(str(library))
        elif isinstance(getattr(type(options), name, None), property):
            setattr(options, name, value)
        else:
            raise OptionError(f"onnxruntime.SessionOptions has no attribute {name!r}")


def _providers(ort: Any, job: Job) -> list[Any]:
    if job.options.providers is not None:
        return [checked_provider(provider) for provider in job.options.providers]
    if job.device.type == "cpu":
        return ["CPUExecutionProvider"]
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        raise MissingDependency(
            f"tensors are on {job.device}, and this onnxruntime has no CUDA provider",
            hint='pip uninstall onnxruntime; pip install "sardonyx[gpu]"',
        )
    stream = job.stream or _CUDA_STREAM_LEGACY
    settings = {
        "device_id": str(job.device.index or 0),
        "user_compute_stream": str(stream),
        "use_tf32": str(int(torch.backends.cuda.matmul.allow_tf32)),
    }
    return [("CUDAExecutionProvider", settings), "CPUExecutionProvider"]


def checked_provider(provider: Any) -> Any:
    """A provider that this onnxruntime has: it would use the CPU in place of an unknown one, and only print so."""
    ort = _onnxruntime()
    name, settings = (provider, {}) if isinstance(provider, str) else provider
    if name not in ort.get_available_providers():
        raise OptionError(
            f"this onnxruntime has no provider {name!r}",
            hint="it has " + ", ".join(ort.get_available_providers()),
        )
    return (name, dict(settings)) if settings else name


def _session_error(error: Exception) -> EngineError:
    return _kind_of(error)(f"onnxruntime refused the model: {_node_of(error)}", hint=_DUMP_HINT)


def _run_error(error: Exception) -> EngineError:
    return _kind_of(error)(f"onnxruntime failed while running: {_node_of(error)}", hint=_DUMP_HINT)


def _kind_of(error: Exception) -> type[EngineError]:
    return MissingKernel if any(sign in str(error) for sign in _NO_KERNEL) else EngineError


_NO_KERNEL = ("NOT_IMPLEMENTED", "node_provider_type.empty()")
"""Of a node without a kernel in any provider; with CUDA the pass that inserts copies between providers stops at it."""


_DUMP_HINT = 'the option dump="folder" keeps the model, to load it in onnxruntime alone'


def _node_of(error: Exception) -> str:
    text = str(error)
    node = re.search(r"[Nn]ode[^']*'([^']+)'", text)
    return f"{text} (node {node.group(1)})" if node else text
