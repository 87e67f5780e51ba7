"""The engine ONNX Runtime, which is the default."""

from __future__ import annotations

import difflib
import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from sardonyx import fork, opsets
from sardonyx.engines import blocked, cuda_driver, cuda_kernels, ortvalue
from sardonyx.engines.contiguous import is_contiguous
from sardonyx.engines.cuda_graphs import CudaRecorder, GraphRunner
from sardonyx.engines.cuda_tf32 import allows_tf32
from sardonyx.engines.engine import Availability, Engine, Job, Runner
from sardonyx.engines.ortvalue import from_torch
from sardonyx.errors import EngineError, MissingDependency, MissingKernel, OptionError
from sardonyx.native.processor import processor
from sardonyx.native.session import onnxruntime
from sardonyx.optimize.legalize import Kernels
from sardonyx.optimize.rules.channels_last import CHANNELS_LAST
from sardonyx.threads import ThreadPauser
from sardonyx.toolchain.operator_libraries import libraries_of
from sardonyx.translate.builder import MICROSOFT

log = logging.getLogger(__name__)

_CUDA = "CUDAExecutionProvider"
_CUDA_BEFORE_OPSET_22 = ("aten::max_pool", "aten::native_group_norm", "aten::elu")
"""Operators that become MaxPool, InstanceNormalization or Elu: from opset 22 on the CPU (onnxruntime-gpu 1.31)."""

_COMPARE_32_BITS = frozenset({"Max", "Min", "Clip", "Sign"})
"""CPU kernels of int64 that compare only the low 32 bits in vector registers, as ReduceMax and ReduceMin also do."""
_REDUCE_IN_DOUBLE = frozenset({"ReduceMax", "ReduceMin"})
"""CUDA kernels of int64 that compute in double precision."""


class OnnxRuntime(Engine):
    """Runs models in ONNX Runtime, on the CPU or an accelerator."""

    name = "onnxruntime"
    domains = frozenset({MICROSOFT})
    custom_operators = True
    takes_session_options = True

    def probe(self) -> Availability:
        """Whether a working onnxruntime is installed."""
        try:
            return Availability(self.name, onnxruntime().__version__)
        except MissingDependency as error:
            return Availability(self.name, None, error.what)

    def local_domains(self, device: torch.device, operators: Set[str], *, training: bool = False) -> frozenset[str]:
        """Return the domain of NCHWc convolutions, if this processor has them; on CUDA that of its fused kernels.

        Gradients of convolutions have no kernels with channels last, so training does without those.
        """
        if device.type == "cuda":
            fused = f"{MICROSOFT}/cuda"
            return frozenset({fused} if training else {fused, f"{fused}/channels_last", CHANNELS_LAST})
        if device.type != "cpu" or operators.isdisjoint(blocked.OPERATORS):
            return frozenset()
        domain = blocked.domain(onnxruntime())
        return frozenset({domain} if domain else ())

    def kernels(self, device: torch.device) -> Kernels:
        """Return which operators and dtypes its kernels on this device support."""
        return _kernels(_CUDA if device.type == "cuda" else "CPUExecutionProvider")

    def opset(self, device: torch.device, operators: Set[str]) -> int:
        """Return 23, which has attention and RMS norm; 21 if the CUDA provider lacks the newer form of an operator."""
        lacking = device.type == "cuda" and any(name.startswith(_CUDA_BEFORE_OPSET_22) for name in operators)
        return opsets.POOLING_TYPES - 1 if lacking else opsets.NEWEST

    def freezes(self, device: torch.device) -> bool:
        """True on the CPU, where constants are pre-packed; elsewhere they would be copied through the host."""
        return device.type == "cpu"

    def takes_kernels(self, device: torch.device) -> bool:
        """True on the CPU and on CUDA."""
        return device.type in ("cpu", "cuda")

    def appends_in_place(self, device: torch.device) -> bool:
        """True on the CPU."""
        return device.type == "cpu"

    def load(self, job: Job, artifact: Path | None) -> Runner:
        """Create a session; on CUDA one that records graphs, unless it has users' operators, which may do anything.

        Native kernels, the job's libraries, launch kernels and use the session's memory as ONNX Runtime's own do.
        """
        runner = OnnxRuntimeRunner(job)
        records = job.records and job.options.cuda_graphs and not libraries_of(job.model)
        if runner.stream is None or not records:
            return runner
        return GraphRunner(runner, CudaRecorder(runner.stream), runner.stream.device, len(job.inputs), job.fixed)


@cache
def _kernels(provider: str) -> Kernels:
    """Return the kernels of one provider. Listing those of all would load every provider's library, and can crash."""
    onnxruntime()
    if provider == _CUDA:
        table = cuda_kernels.table()
        return Kernels(
            table,
            loses_infinity=frozenset({"MaxPool", "ReduceMax", "ReduceMin"}),
            joins_casts=True,
            uint8_casts_saturate=True,
            inexact_int64=_REDUCE_IN_DOUBLE,
            is_complete=True,
        )
    registered: dict[tuple[str, str], list[tuple[range, Mapping[str, Sequence[str]]]]] = {}
    for kernel in ortvalue.binding().get_registered_ep_kernel_defs(provider):
        versions = range(kernel.version_range[0], kernel.version_range[1] + 1)
        registered.setdefault((kernel.domain, kernel.op_name), []).append((versions, kernel.type_constraints))
    return Kernels(
        registered,
        where_loses_zero_sign=True,
        loses_infinity=frozenset({"MaxPool"}),
        pool_skips_nan=True,
        sigmoid_loses_small=True,
        sine_loses_small=True,
        attention_drops_lowest=True,
        joins_casts=True,
        converts_weights=True,
        inexact_int64=_COMPARE_32_BITS | _REDUCE_IN_DOUBLE,
    )


class OnnxRuntimeRunner(Runner):
    """One session; torch tensors are passed without copies."""

    def __init__(self, job: Job) -> None:
        onnxruntime()  # raises if it is not installed
        if job.options.engine_options:
            raise OptionError(
                f"onnxruntime has no engine_options, got {dict(job.options.engine_options)}",
                hint="use session_options and providers",
            )
        c = ortvalue.binding()
        self._job: Job | None = job
        self.stream = None if job.device.type == "cpu" else cuda_driver.private_stream(self, job.device)
        self._weights = {name: from_torch(t) for name, t in job.weights.items()}
        self._open(job)
        self._vector = c.OrtValueVector
        self._inputs, self._outputs = list(job.inputs), list(job.outputs)
        self._devices = [ortvalue.device_of(job.device)] * len(self._outputs)
        self.output_types = job.output_types
        self._readers = [ortvalue.reader(dtype, job.device) for dtype in job.output_types]
        self._run_options, self._launch_options = c.RunOptions(), c.RunOptions()
        self._launch_options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        self.is_device_only = False
        self._quietly = ThreadPauser()
        self._allocate = _allocator(job)
        self.allocates_in_torch = self._allocate is not None
        self._fixed: dict[int, tuple[Any, int, Any]] = dict.fromkeys(job.fixed, (None, 0, None))
        self._lock = fork.Lock()
        fork.register(self)

    def _open(self, job: Job) -> None:
        ort = onnxruntime()
        options = session_options(ort, job.options.session_options)
        for library in (*job.libraries, *libraries_of(job.model)):
            options.register_custom_ops_library(str(library))
        if self.stream is not None:
            ort.set_default_logger_severity(options.log_severity_level)  # cuDNN's searches report failures there
            options.add_session_config_entry(*_RECORD_PLACEMENT)
        _share_weights(ort, options, self._weights)
        providers = _providers(ort, job, self.stream)
        try:
            self._session = ort.InferenceSession(
                job.model, options, providers=providers, disabled_optimizers=_inexact_rewrites(job)
            )
        except Exception as error:
            raise _session_error(error, job.options.opset) from error
        if self.stream is not None:
            self.placement = _placement(self._session)
        self._run = self._session._sess.run_with_ortvaluevector

    def forked(self) -> None:
        """In a forked child process, which has none of the session's threads: create a new session at the next call."""
        if self._job is not None:
            fork.never_free(self._session)
            self._session, self._run = None, self._open_and_run

    def _open_and_run(self, *args: Any) -> None:
        self._reopen()
        self._run(*args)

    def _reopen(self) -> None:
        """Create a new session if this process was forked since."""
        with self._lock:
            if self._session is None and self._job is not None:
                self._open(self._job)

    def __call__(self, inputs: Sequence[torch.Tensor | int]) -> list[torch.Tensor]:
        """Run once. Calls share no state, so threads need no lock."""
        fetches = self._vector()
        allocated = self._allocate(fetches) if self._allocate else None
        self._run_in_order(self._values(inputs), fetches)
        return allocated or [read(fetches, index) for index, read in enumerate(self._readers)]

    def into(self, inputs: Sequence[torch.Tensor | int], outputs: Sequence[torch.Tensor]) -> None:
        """Run once, writing directly into the memory of these tensors if they are contiguous."""
        if not all(map(is_contiguous, outputs)):
            return super().into(inputs, outputs)
        return self._run_in_order(self._values(inputs), self._vector_of(outputs))

    def append(self, inputs: Sequence[torch.Tensor | int], memory: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
        """Run once, with some outputs bound to inputs, which they overwrite; ONNX Runtime allocates the others."""
        if self.stream is not None:
            return super().append(inputs, memory)
        self._reopen()
        call = ortvalue.binding().SessionIOBinding(self._session._sess)
        values = dict(zip(map(id, inputs), self._values(inputs), strict=True))
        for name, x in zip(self._inputs, inputs, strict=True):
            call.bind_ortvalue_input(name, values[id(x)])
        for index, name in enumerate(self._outputs):
            if index in memory:
                call.bind_ortvalue_output(name, values[id(memory[index])])
            else:
                call.bind_output(name, self._devices[index])
        self._run_quietly(self._session._sess.run_with_iobinding, call, self._run_options)
        outputs = call.get_outputs()
        return [memory[index] if index in memory else read(outputs, index) for index, read in enumerate(self._readers)]

    def launch(self, inputs: Sequence[torch.Tensor | int], outputs: Sequence[torch.Tensor]) -> None:
        """Give the work of a call to the session's stream; inputs and outputs are contiguous."""
        self._run_into(self._values(inputs), self._vector_of(outputs), self._launch_options)

    def feeds(self, values: Sequence[Any]) -> Any:
        """Return a vector of ONNX Runtime values, for `fetch`."""
        vector = self._vector()
        for value in values:
            vector.push_back(value)
        return vector

    def fetch(self, feeds: Any) -> Any:
        """Run once with a vector of ONNX Runtime values; return a vector of the outputs."""
        fetches = self._vector()
        self._run_into(feeds, fetches, self._run_options)
        return fetches

    def _vector_of(self, tensors: Sequence[torch.Tensor]) -> Any:
        vector = self._vector()
        for tensor in tensors:
            vector.push_back(from_torch(tensor))
        return vector

    def _values(self, inputs: Sequence[torch.Tensor | int]) -> Any:
        vector = self._vector()
        for index, x in enumerate(inputs):
            vector.push_back(self._fixed_value(index, x) if index in self._fixed else from_torch(x))
        return vector

    def _run_in_order(self, feeds: Any, fetches: Any) -> None:
        """Run after the work of torch's current stream, and before what it is given next.

        A call waits for the device, unless its kernels are known to use no memory of the host: ONNX Runtime keeps the
        memory that such a kernel copies from until a call that waits. If the session is freed before, it aborts.
        """
        stream = self.stream
        if stream is None:
            return self._run_into(feeds, fetches, self._run_options)
        current = torch.cuda.current_stream(stream.device)
        stream.wait_stream(current)
        try:
            return self._run_into(feeds, fetches, self._launch_options if self.is_device_only else self._run_options)
        finally:
            current.wait_stream(stream)

    def _run_into(self, feeds: Any, fetches: Any, options: Any) -> None:
        self._run_quietly(self._run, options, self._inputs, feeds, self._outputs, fetches, self._devices)

    def _run_quietly(self, run: Callable[..., None], *args: Any) -> None:
        try:
            self._quietly(run, *args)
        except Exception as error:
            raise _run_error(error) from error

    def _fixed_value(self, index: int, x: Any) -> Any:
        """Return the OrtValue of an input that seldom changes, cached by tensor and address."""
        if not is_contiguous(x):
            return from_torch(x)  # a copy must not be cached: it would miss later edits
        tensor, address, value = self._fixed[index]
        if tensor is not x or address != x.data_ptr():
            value = from_torch(x)
            self._fixed[index] = (x, x.data_ptr(), value)
        return value

    def __del__(self) -> None:
        """Wait for the session's work, which uses its memory."""
        stream: torch.cuda.Stream | None = getattr(self, "stream", None)
        if stream is not None:
            with suppress(Exception):  # at exit, CUDA may be gone
                stream.synchronize()

    def close(self) -> None:
        """Free the session and the references to weights."""
        self.__del__()
        self._session = self._run = self._job = None
        self._weights = {}


def _share_weights(ort: Any, options: Any, weights: Mapping[str, Any]) -> None:
    """Let the session use torch's memory for its weights.

    Optimizers read the external initializers; without more, the session would copy each. Kernels use the plain
    initializers of the same names instead of those copies.
    """
    values = {name: ort.OrtValue(value) for name, value in weights.items()}
    if values:
        options.add_external_initializers(list(values), list(values.values()))
    for name, value in values.items():
        options.add_initializer(name, value)


def _allocator(job: Job) -> Any:
    """Return a function that allocates the outputs in torch and binds them; None if unwanted or sizes are unknown."""
    preallocate = job.options.preallocate_outputs
    if preallocate is None:
        preallocate = job.device.type != "cpu"
    if not preallocate or any(shape is None or 0 in shape for shape in job.output_shapes):
        return None

    def allocate(fetches: Any) -> list[torch.Tensor]:
        outputs = [
            torch.empty(shape or (), dtype=dtype, device=job.device)
            for shape, dtype in zip(job.output_shapes, job.output_types, strict=True)
        ]
        for tensor in outputs:
            fetches.push_back(from_torch(tensor))
        return outputs

    return allocate


_STOP_SPINNING = ("session.force_spinning_stop", "1")
"""Let threads spin only while a call runs. By default they continue for a while, and compete with torch's threads and
other sessions: six sessions in a row took 27 ms on two cores instead of 4, with torch between them 78 instead of 11.
A global pool is as fast between sessions (4 ms), but cannot stop spinning, took 28 ms with torch between them, and
makes ONNX Runtime refuse every session of the process that does not use it."""


_EXACT_SUMS_OF_BYTES = ("session.x64quantprecision", "1")
"""Converts weights in int8 to uint8, whose products are slower."""


@cache
def _sums_of_bytes_saturate() -> bool:
    """Whether products of uint8 and int8 are added in 16 bits: on x86 processors without VNNI."""
    local = processor()
    return local.machine in ("x86_64", "AMD64") and {"avx512_vnni", "avx_vnni"}.isdisjoint(local.instructions)


_RECORD_PLACEMENT = ("session.record_ep_graph_assignment_info", "1")


def _placement(session: Any) -> dict[str, Counter[str]]:
    """Return the operators by execution provider; nothing with an onnxruntime that does not say (before 1.24)."""
    read = getattr(session._sess, "get_provider_graph_assignment_info", None)
    placement: dict[str, Counter[str]] = {}
    for part in read() if read is not None else ():
        placement.setdefault(part.ep_name, Counter()).update(node.op_type for node in part.get_nodes())
    return placement


def _inexact_rewrites(job: Job) -> list[str]:
    """Return ONNX Runtime rewrites to disable: one rounds the scale of a double product to float."""
    return ["MatMulScaleFusion"] if torch.float64 in job.output_types else []


def session_options(ort: Any, user_options: Any) -> Any:
    """Return session options with this engine's defaults, overridden by the user's."""
    options = ort.SessionOptions()
    options.log_severity_level = 4  # errors are raised, so need no log
    if isinstance(user_options, ort.SessionOptions):
        user_options = _changed_attributes(user_options, ort.SessionOptions())
    if user_options is not None and not isinstance(user_options, Mapping):
        raise OptionError(
            f"session_options is a {type(user_options).__name__}", hint="use a dict or an onnxruntime.SessionOptions"
        )
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry(*_STOP_SPINNING)
    if _sums_of_bytes_saturate():
        options.add_session_config_entry(*_EXACT_SUMS_OF_BYTES)
    _apply(options, user_options or {})
    return options


def _changed_attributes(options: Any, default: Any) -> dict[str, Any]:
    names = _properties(type(options))
    return {name: getattr(options, name) for name in names if getattr(options, name) != getattr(default, name)}


def _properties(cls: type) -> list[str]:
    return [name for name in dir(cls) if isinstance(getattr(cls, name), property)]


def _apply(options: Any, values: Mapping[str, Any]) -> None:
    known = [*_properties(type(options)), *_ENTRIES]
    for name, value in values.items():
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "known attributes: " + ", ".join(known)
            raise OptionError(f"onnxruntime.SessionOptions has no attribute {name!r}", hint=hint)
        if name in _ENTRIES:
            _apply_entries(options, name, value)
        else:
            _set_attribute(options, name, value)


def _apply_entries(options: Any, name: str, value: Any) -> None:
    accepts, hint = _ENTRIES[name]
    if not accepts(value):
        raise OptionError(f"session_options has {name!r}: {value!r}", hint=hint)
    for entry in value:
        if name == "config":
            options.add_session_config_entry(entry, str(value[entry]))
        else:
            options.register_custom_ops_library(str(entry))


_ENTRIES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "config": (
        lambda value: isinstance(value, Mapping) and all(isinstance(key, str) for key in value),
        "use a dict with text as its keys",
    ),
    "custom_ops": (
        lambda value: isinstance(value, Sequence) and not isinstance(value, (str, bytes)),
        "use a list of paths, also for a single one",
    ),
}
"""Entries of the option that are not attributes: a check of the value, and the hint if it fails."""


def _set_attribute(options: Any, name: str, value: Any) -> None:
    try:
        setattr(options, name, value)
    except TypeError as error:
        expected = type(getattr(options, name)).__name__
        raise OptionError(f"session_options has {name!r}: {value!r}", hint=f"use a value of type {expected}") from error


def _providers(ort: Any, job: Job, stream: torch.cuda.Stream | None) -> list[Any]:
    if stream is None:
        return [checked_provider(provider) for provider in job.options.providers or ["CPUExecutionProvider"]]
    settings = {
        "device_id": str(job.device.index or 0),
        "user_compute_stream": str(stream.cuda_stream),
        "use_tf32": str(int(allows_tf32(job.model))),
    }
    if job.options.providers is not None:
        return [_with_settings(checked_provider(provider), settings) for provider in job.options.providers]
    if _CUDA not in ort.get_available_providers():
        raise MissingDependency(
            f"tensors are on {job.device}, but this onnxruntime has no CUDA provider",
            hint='pip uninstall onnxruntime; pip install "sardonyx[gpu]"',
        )
    return [(_CUDA, settings), "CPUExecutionProvider"]


def _with_settings(provider: Any, settings: Mapping[str, str]) -> Any:
    """Return a provider with these settings, which the user's override, if it is that of CUDA."""
    name, given = (provider, {}) if isinstance(provider, str) else provider
    return (name, {**settings, **given}) if name == _CUDA else provider


def checked_provider(provider: Any) -> Any:
    """Return the provider, or raise if this onnxruntime lacks it: it would only warn and use the CPU."""
    ort = onnxruntime()
    name, settings = (provider, {}) if isinstance(provider, str) else provider
    if name not in ort.get_available_providers():
        raise OptionError(
            f"this onnxruntime has no provider {name!r}",
            hint="available: " + ", ".join(ort.get_available_providers()),
        )
    return (name, dict(settings)) if settings else name


def _session_error(error: Exception, opset: int | None = None) -> EngineError | OptionError:
    newest = re.search(_NEWEST_OPSET, str(error))
    if newest is not None and opset is not None:
        return OptionError(
            f"opset is {opset}, but this onnxruntime supports at most {newest[1]}",
            hint=f"use an integer from {opsets.OLDEST} to {newest[1]}, or leave it out",
        )
    return _error_class(error)(f"onnxruntime refused the model: {_name_node(error)}", hint=_DUMP_HINT)


def _run_error(error: Exception) -> EngineError:
    return _error_class(error)(f"onnxruntime failed while running: {_name_node(error)}", hint=_DUMP_HINT)


def _error_class(error: Exception) -> type[EngineError]:
    return MissingKernel if any(text in str(error) for text in _NO_KERNEL) else EngineError


_NEWEST_OPSET = r"domain ai\.onnx is till opset (\d+)"
_NO_KERNEL = ("NOT_IMPLEMENTED", "node_provider_type.empty()")
"""In the errors of a node without a kernel; with CUDA, the pass that inserts copies between providers raises it."""


_DUMP_HINT = 'use dump="folder" to save the model and load it in onnxruntime alone'


def _name_node(error: Exception) -> str:
    text = str(error)
    node = re.search(r"[Nn]ode[^']*'([^']+)'", text)
    return f"{text} (node {node.group(1)})" if node else text
