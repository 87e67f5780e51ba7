"""The engine IREE: compiles a model to native code for this CPU."""

from __future__ import annotations

import atexit
import dataclasses
import shlex
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence, Set
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx_ir.passes.common import ShapeInferencePass
from onnxscript.optimizer import optimize_ir
from torch._C import _from_dlpack as from_dlpack
from torch._C import _to_dlpack as to_dlpack

from sardonyx import fork, opsets
from sardonyx.cache.lru import LRU
from sardonyx.engines import artifacts
from sardonyx.engines.contiguous import contiguous
from sardonyx.engines.engine import Availability, Engine, Job, Runner
from sardonyx.errors import EngineError, MissingDependency, OptionError
from sardonyx.optimize.legalize import Kernels
from sardonyx.options import Options
from sardonyx.threads import ThreadPauser

_COMPILER_SCRIPT = Path(__file__).with_name("iree_compile.py")
_CODE_FILE, _SYMBOLIC_MARKER = "model.vmfb", "compiled-for-each-size"
_INSTALL = 'pip install "sardonyx[iree]"'
_PACKAGES = ("iree-base-compiler", "iree-base-runtime")
_DEFAULT_FLAGS = (
    "--iree-input-type=onnx",
    "--iree-hal-target-device=local",
    "--iree-hal-local-target-device-backends=llvm-cpu",
    "--iree-llvmcpu-target-cpu=host",
    "--iree-input-demote-f64-to-f32=false",
)
_CHANNELS_LAST = (
    "--iree-preprocessing-pass-pipeline=builtin.module(util.func(iree-preprocessing-convert-conv-to-channels-last))"
)
"""Without this pass a convolution took three times as long."""
_SYSTEM_LIBRARY = "--iree-llvmcpu-link-embedded=false"
_ALIGNMENT = 64
"""The alignment in bytes that its kernels assume."""
_KDLCPU = 1
_CACHED_SHAPES = 8
"""The number of input shapes for which a symbolic model's code is cached in memory."""


class Iree(Engine):
    """Compiles models with IREE in a subprocess, and runs the code in this process."""

    name = "iree"

    def probe(self) -> Availability:
        """Whether compiler and runtime are installed; the version is read without importing them."""
        try:
            return Availability(self.name, " / ".join(dict.fromkeys(map(version, _PACKAGES))))
        except PackageNotFoundError:
            return Availability(self.name, None, _INSTALL)

    def kernels(self, device: torch.device) -> Kernels:
        """Return kernels that only move half precision: IREE sums in it, where torch sums in float."""
        return _IreeKernels({})

    def opset(self, device: torch.device, operators: Set[str]) -> int:
        """Return 22: the importer does not support all of opset 23's attention and norms."""
        return opsets.ATTENTION - 1

    def identity(self, options: Options) -> str:
        """Return versions and flags."""
        _require()
        return " ".join((*map(version, _PACKAGES), *_flags(options)))

    def compile(self, job: Job, folder: Path) -> None:
        """Compile the model with its weights; a model of symbolic sizes is compiled when they are known."""
        if job.device.type != "cpu":
            raise EngineError(f"iree runs on the CPU, but the tensors are on {job.device}", hint=_HINT)
        _require()
        if _is_symbolic(job):
            (folder / _SYMBOLIC_MARKER).touch()
            return
        model = _with_static_shapes(job.whole())
        flags = _flags(job.options)
        convolves = any(node.op_type == "Conv" for node in model.graph.all_nodes())
        if convolves and not any(flag.startswith("--iree-preprocessing-pass-pipeline") for flag in flags):
            flags = (*flags, _CHANNELS_LAST)
        with tempfile.TemporaryDirectory(prefix="sardonyx-iree-") as scratch:
            source = Path(scratch) / "model.onnx"
            ir.save(model, source, external_data="weights")
            command = [sys.executable, "-P", str(_COMPILER_SCRIPT), str(source), str(folder / _CODE_FILE), *flags]
            done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        if done.returncode or not (folder / _CODE_FILE).exists():
            failure = f"crashed (signal {-done.returncode})" if done.returncode < 0 else "refused the model"
            raise EngineError(f"iree's compiler {failure}: {_extract_errors(done.stderr)}", hint=_HINT)

    def load(self, job: Job, artifact: Path | None) -> Runner:
        """Map the compiled code into memory."""
        if _is_symbolic(job):
            return SymbolicRunner(self, job)
        if artifact is not None:
            return IreeRunner(job, artifact / _CODE_FILE)
        with tempfile.TemporaryDirectory(prefix="sardonyx-iree-") as folder:
            self.compile(job, Path(folder))
            return IreeRunner(job, Path(folder) / _CODE_FILE)


def _is_symbolic(job: Job) -> bool:
    inputs = onnx.load_from_string(job.model).graph.input
    return any(not dim.HasField("dim_value") for x in inputs for dim in x.type.tensor_type.shape.dim)


def _with_static_shapes(model: ir.Model) -> ir.Model:
    """Return the model with static shapes for all values.

    Code with shapes computed at run time was seen to write out of bounds and to return uninitialized memory, so a model
    that needs them is refused.
    """
    if any(node.op_type == "Shape" for node in model.graph.all_nodes()):
        optimize_ir(model)
    model = ShapeInferencePass()(model).model
    for node in model.graph.all_nodes():
        for value in node.outputs:
            if value.name and (value.shape is None or not value.shape.is_static()) and value.uses():
                raise EngineError(
                    f"iree does not support shapes that depend on values, as that of {node.op_type} ({node.name})",
                    hint=_HINT,
                )
    for node in list(model.graph.all_nodes()):
        if node.op_type == "Pad":
            _split_negative_pad(node)
    return model


def _split_negative_pad(node: ir.Node) -> None:
    """Replace a Pad by negative amounts, which IREE ignores, by a Slice and a Pad."""
    x, amounts = node.inputs[0], node.inputs[1]
    amounts_tensor = None if amounts is None else ir.convenience.get_const_tensor(amounts)
    if amounts_tensor is None or x is None or x.shape is None or not isinstance(node.graph, ir.Graph):
        raise EngineError(f"iree does not support a Pad by computed amounts ({node.name})", hint=_HINT)
    pads = amounts_tensor.numpy()
    if (pads >= 0).all():
        return
    axes_input = node.inputs[3] if len(node.inputs) > 3 else None
    axes_tensor = None if axes_input is None else ir.convenience.get_const_tensor(axes_input)
    axes = np.arange(len(x.shape)) if axes_tensor is None else axes_tensor.numpy()
    begins, ends = np.split(np.maximum(-pads, 0), 2)
    sizes = np.array([x.shape[int(axis)] for axis in axes], dtype=np.int64)
    constants = [_constant(node, array) for array in (begins, sizes - ends, axes, np.maximum(pads, 0))]
    cropped = ir.node("Slice", [x, *(constant.outputs[0] for constant in constants[:3])])
    cropped.outputs[0].type = x.type
    node.graph.insert_before(node, cropped)
    node.replace_input_with(0, cropped.outputs[0])
    node.replace_input_with(1, constants[3].outputs[0])


def _constant(before: ir.Node, array: np.ndarray) -> ir.Node:
    node = ir.node("Constant", [], {"value": ir.tensor(array.astype(np.int64))})
    node.outputs[0].type = ir.TensorType(ir.DataType.INT64)
    assert isinstance(before.graph, ir.Graph)
    before.graph.insert_before(before, node)
    return node


class _IreeKernels(Kernels):
    def accepts(self, op_type: str, opset: int, types: Mapping[str, str]) -> bool:
        halves = {"tensor(float16)", "tensor(bfloat16)"} & set(types.values())
        if op_type in _UNSUPPORTED or (op_type == "MaxPool" and "I" in types):  # its indices differ from ONNX's
            return False
        return op_type in _DATA_MOVEMENT or not halves


_UNSUPPORTED = frozenset({"MaxUnpool", "NonZero"})
_DATA_MOVEMENT = frozenset(
    {"Cast", "Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Expand", "Concat", "Slice", "Split"}
    | {"Gather", "GatherElements", "GatherND", "Where", "Tile", "Flatten", "ScatterElements", "ScatterND"}
)
"""Operators that only move data."""


def _require() -> None:
    missing = [name for name in _PACKAGES if not _is_installed(name)]
    if missing:
        raise MissingDependency(f"the engine 'iree' needs the package {missing[0]}", hint=_INSTALL)


def _is_installed(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


@cache
def _runtime() -> Any:
    _require()
    import iree.runtime

    atexit.register(_close_all)
    return iree.runtime


_live_runners: WeakSet[IreeRunner] = WeakSet()


def _close_all() -> None:
    """Close all runners at exit: IREE would report what is still alive as leaked."""
    for runner in list(_live_runners):
        runner.close()


def _flags(options: Options) -> tuple[str, ...]:
    """Return the compiler's flags; the user's come last and take precedence."""
    own = dict(options.engine_options or {})
    more, system = own.pop("flags", ()), own.pop("system_library", False)
    if own:
        raise OptionError(f"iree has no engine option {next(iter(own))!r}", hint="use 'flags' or 'system_library'")
    more = shlex.split(more) if isinstance(more, str) else list(more)
    return (*_DEFAULT_FLAGS, *([_SYSTEM_LIBRARY] if system else ()), *more, *shlex.split(options.compile_options))


def _extract_errors(log: str) -> str:
    """Return the errors in a compiler's log, without the program that it repeats after each."""
    lines = log.splitlines()
    errors = [line for line in lines if "error:" in line] or lines[-4:]
    return "\n  ".join(line if len(line) < 400 else f"{line[:400]} …" for line in errors[:6]) or "no output"


_HINT = 'use engine="onnxruntime", or dump="folder" to save the model'


def _device() -> Any:
    """Return a device. One thread computes in the caller's thread; a pool has as many threads as torch at first use.

    The driver is not stored here: it would outlive IREE's own reference and be reported as leaked at exit.
    """
    runtime, threads = _runtime(), torch.get_num_threads()
    if threads == 1:
        return runtime.get_driver("local-sync").create_default_device()
    runtime.flags.parse_flags(f"--task_topology_max_group_count={threads}")
    return runtime.get_driver("local-task").create_default_device()


class IreeRunner(Runner):
    """One compiled model; torch tensors are passed without copies."""

    def __init__(self, job: Job, code: Path) -> None:
        runtime = _runtime()
        try:
            instance = runtime.VmInstance()
            self._device = _device()
            module = runtime.VmModule.mmap(instance, str(code))
            modules = [runtime.create_hal_module(instance, self._device), module]
            self._context = runtime.VmContext(instance, modules)
            self._function = module.lookup_function(_entry_point(module))
        except Exception as error:
            raise EngineError(f"iree cannot load the compiled model: {error}", hint=_HINT) from error
        self._list, self._view = runtime.VmVariantList, runtime.HalBufferView
        self._types = job.output_types
        self._lock = threading.Lock()  # a context is not thread-safe
        self._quietly: Callable[..., Any] = ThreadPauser()
        _live_runners.add(self)
        fork.register(self)

    def forked(self) -> None:
        """Refuse to run in a forked child process."""
        fork.never_free(self._context)
        self._lock, self._quietly = threading.Lock(), fork.raise_in_child("iree")

    def __call__(self, inputs: Sequence[torch.Tensor | int]) -> list[torch.Tensor]:
        """Run once."""
        arguments, results = self._list(len(inputs)), self._list(len(self._types))
        for x in inputs:
            arguments.push_ref(self._device.from_dlpack_capsule(to_dlpack(_contiguous_aligned(x))))
        try:
            with self._lock:
                self._quietly(self._context.invoke, self._function, arguments, results)
        except Exception as error:
            raise EngineError(f"iree failed at run time: {error}", hint=_HINT) from error
        return [self._to_torch(results, index, dtype) for index, dtype in enumerate(self._types)]

    def close(self) -> None:
        """Free the code."""
        self._context = self._function = self._device = None

    def _to_torch(self, results: Any, index: int, dtype: torch.dtype) -> torch.Tensor:
        view = results.get_as_ref(index).deref(self._view)
        tensor = from_dlpack(self._device.create_dlpack_capsule(view, _KDLCPU, 0))
        return tensor if tensor.dtype == dtype else tensor.view(dtype)


class SymbolicRunner(Runner):
    """A model of symbolic sizes, compiled for the input shapes of each call, with an LRU cache."""

    def __init__(self, engine: Iree, job: Job) -> None:
        self._engine, self._job = engine, job
        self._runners = LRU[Runner](_CACHED_SHAPES)
        self._lock = threading.Lock()

    def __call__(self, inputs: Sequence[torch.Tensor | int]) -> list[torch.Tensor]:
        """Run once."""
        key = tuple(x if isinstance(x, int) else tuple(x.shape) for x in inputs)
        with self._lock:
            runner = self._runners.get(key)
            if runner is None:
                runner = artifacts.load(self._engine, _specialize(self._job, inputs))
                self._runners.put(key, runner)
        return runner([x for x in inputs if not isinstance(x, int)])

    def close(self) -> None:
        """Free the code for all sizes."""
        self._runners.clear()


def _specialize(job: Job, inputs: Sequence[torch.Tensor | int]) -> Job:
    """Return the job specialized for the shapes of `inputs`; integer inputs are sizes too and become constants."""
    model = ir.from_proto(onnx.load_from_string(job.model))
    graph = model.graph
    for value in (value for node in graph.all_nodes() for value in node.outputs):
        value.shape = None
    for value, x in zip(list(graph.inputs), inputs, strict=True):
        if isinstance(x, int):
            graph.inputs.remove(value)
            value.const_value = ir.tensor([x], ir.DataType.INT64, name=value.name)
            graph.register_initializer(value)
        else:
            value.shape = ir.Shape(x.shape)
    return dataclasses.replace(
        job,
        model=ir.to_proto(model).SerializeToString(),
        inputs=tuple(str(x.name) for x in graph.inputs),
        output_shapes=(None,) * len(job.outputs),
        fixed=frozenset(),
    )


def _entry_point(module: Any) -> str:
    """Return the name of the synchronous function."""
    names = [name for name in module.function_names if not name.startswith("__") and not name.endswith("$async")]
    return str(names[0])


def _contiguous_aligned(x: torch.Tensor | int) -> torch.Tensor:
    """Return the tensor, or a copy that is contiguous and aligned."""
    if isinstance(x, int):
        return torch.tensor([x])
    x = x.detach()
    x = contiguous(x)
    return x if x.data_ptr() % _ALIGNMENT == 0 else x.clone()
