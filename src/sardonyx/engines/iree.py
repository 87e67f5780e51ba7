"""IREE: a model compiled to native code for this CPU."""

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

_COMPILER = Path(__file__).with_name("iree_compile.py")
_CODE, _LATER = "model.vmfb", "compiled-for-each-size"
_INSTALL = 'pip install "sardonyx[iree]"'
_PACKAGES = ("iree-base-compiler", "iree-base-runtime")
_FLAGS = (
    "--iree-input-type=onnx",
    "--iree-hal-target-device=local",
    "--iree-hal-local-target-device-backends=llvm-cpu",
    "--iree-llvmcpu-target-cpu=host",
    "--iree-input-demote-f64-to-f32=false",
)
_CHANNELS_LAST = (
    "--iree-preprocessing-pass-pipeline=builtin.module(util.func(iree-preprocessing-convert-conv-to-channels-last))"
)
"""Without it a convolution took three times as long."""
_SYSTEM = "--iree-llvmcpu-link-embedded=false"
_ALIGNMENT = 64
"""Bytes that its kernels take a tensor to be aligned to."""
_KDLCPU = 1
_SIZES_KEPT = 8
"""For how many sizes of a model of symbolic ones the code stays in memory."""


class Iree(Engine):
    """Compiles models with IREE, in a process of its own, and runs the code here."""

    name = "iree"

    def probe(self) -> Availability:
        """Whether compiler and runtime are installed; to ask for versions imports nothing."""
        try:
            return Availability(self.name, " / ".join(dict.fromkeys(map(version, _PACKAGES))))
        except PackageNotFoundError:
            return Availability(self.name, None, _INSTALL)

    def kernels(self, device: torch.device) -> Kernels:
        """Half precision is only moved: it would sum in it, where torch sums in float. Some operators it lacks."""
        return _Known({})

    def opset(self, device: torch.device, operators: Set[str]) -> int:
        """22: attention and the norms of 23 are not all known to its importer."""
        return opsets.ATTENTION - 1

    def identity(self, options: Options) -> str:
        """Versions and flags."""
        return " ".join((*map(version, _PACKAGES), *_flags(options)))

    def compile(self, job: Job, folder: Path) -> None:
        """Compile the model, weights included; one of symbolic sizes is compiled when they are known."""
        if job.device.type != "cpu":
            raise EngineError(f"iree runs on the CPU here, and the tensors are on {job.device}", hint=_ELSEWHERE)
        _require()
        if _is_symbolic(job):
            (folder / _LATER).touch()
            return
        model = _with_sizes(job.whole())
        flags = _flags(job.options)
        convolves = any(node.op_type == "Conv" for node in model.graph.all_nodes())
        if convolves and not any(flag.startswith("--iree-preprocessing-pass-pipeline") for flag in flags):
            flags = (*flags, _CHANNELS_LAST)
        with tempfile.TemporaryDirectory(prefix="sardonyx-iree-") as scratch:
            source = Path(scratch) / "model.onnx"
            ir.save(model, source, external_data="weights")
            command = [sys.executable, "-P", str(_COMPILER), str(source), str(folder / _CODE), *flags]
            done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        if done.returncode or not (folder / _CODE).exists():
            how = f"crashed (signal {-done.returncode})" if done.returncode < 0 else "refused the model"
            raise EngineError(f"iree's compiler {how}: {_shortened(done.stderr)}", hint=_ELSEWHERE)

    def load(self, job: Job, artifact: Path | None) -> Runner:
        """Map the compiled code into memory."""
        if _is_symbolic(job):
            return SymbolicRunner(self, job)
        if artifact is not None:
            return IreeRunner(job, artifact / _CODE)
        with tempfile.TemporaryDirectory(prefix="sardonyx-iree-") as folder:
            self.compile(job, Path(folder))
            return IreeRunner(job, Path(folder) / _CODE)


def _is_symbolic(job: Job) -> bool:
    inputs = onnx.load_from_string(job.model).graph.input
    return any(not dim.HasField("dim_value") for x in inputs for dim in x.type.tensor_type.shape.dim)


def _with_sizes(model: ir.Model) -> ir.Model:
    """The model with numbers for all sizes.

    Where sizes are computed while the model runs, the code was seen to write beyond its memory, and to return what
    nobody had written: so there must be none.
    """
    if any(node.op_type == "Shape" for node in model.graph.all_nodes()):
        optimize_ir(model)
    model = ShapeInferencePass()(model).model
    for node in model.graph.all_nodes():
        for value in node.outputs:
            if value.name and (value.shape is None or not value.shape.is_static()) and value.uses():
                raise EngineError(
                    f"iree is given no model whose sizes depend on values, as that of {node.op_type} ({node.name})",
                    hint=_ELSEWHERE,
                )
    for node in list(model.graph.all_nodes()):
        if node.op_type == "Pad":
            _crop_first(node)
    return model


def _crop_first(node: ir.Node) -> None:
    """Write a Pad of negative amounts, which IREE ignores, as a Slice and a Pad of what is left."""
    x, amounts = node.inputs[0], node.inputs[1]
    held = None if amounts is None else ir.convenience.get_const_tensor(amounts)
    if held is None or x is None or x.shape is None or not isinstance(node.graph, ir.Graph):
        raise EngineError(f"iree is given no Pad of amounts that are computed ({node.name})", hint=_ELSEWHERE)
    pads = held.numpy()
    if (pads >= 0).all():
        return
    named = node.inputs[3] if len(node.inputs) > 3 else None
    axes = None if named is None else ir.convenience.get_const_tensor(named)
    places = np.arange(len(x.shape)) if axes is None else axes.numpy()
    begins, ends = np.split(np.maximum(-pads, 0), 2)
    sizes = np.array([x.shape[int(axis)] for axis in places], dtype=np.int64)
    constants = [_constant(node, array) for array in (begins, sizes - ends, places, np.maximum(pads, 0))]
    cropped = ir.node("Slice", [x, *(made.outputs[0] for made in constants[:3])])
    cropped.outputs[0].type = x.type
    node.graph.insert_before(node, cropped)
    node.replace_input_with(0, cropped.outputs[0])
    node.replace_input_with(1, constants[3].outputs[0])


def _constant(before: ir.Node, array: np.ndarray) -> ir.Node:
    made = ir.node("Constant", [], {"value": ir.tensor(array.astype(np.int64))})
    made.outputs[0].type = ir.TensorType(ir.DataType.INT64)
    assert isinstance(before.graph, ir.Graph)
    before.graph.insert_before(before, made)
    return made


class _Known(Kernels):
    def accepts(self, op_type: str, opset: int, types: Mapping[str, str]) -> bool:
        halves = {"tensor(float16)", "tensor(bfloat16)"} & set(types.values())
        if op_type in _LACKING or (op_type == "MaxPool" and "I" in types):  # its indices are not ONNX's
            return False
        return op_type in _MOVING or not halves


_LACKING = frozenset({"MaxUnpool", "NonZero"})
_MOVING = frozenset(
    {"Cast", "Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Expand", "Concat", "Slice", "Split"}
    | {"Gather", "GatherElements", "GatherND", "Where", "Tile", "Flatten", "ScatterElements", "ScatterND"}
)
"""Operators that compute nothing."""


def _require() -> None:
    lacking = [name for name in _PACKAGES if not _has(name)]
    if lacking:
        raise MissingDependency(f"the engine 'iree' needs the package {lacking[0]}", hint=_INSTALL)


def _has(package: str) -> bool:
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


_live: WeakSet[IreeRunner] = WeakSet()


def _close_all() -> None:
    """What lives when Python ends would be reported as leaked."""
    for runner in list(_live):
        runner.close()


def _flags(options: Options) -> tuple[str, ...]:
    """The compiler's flags; the user's come last, and win."""
    given = dict(options.engine_options or {})
    more, system = given.pop("flags", ()), given.pop("system_library", False)
    if given:
        raise OptionError(f"engine_options has {next(iter(given))!r}", hint="iree takes 'flags' and 'system_library'")
    more = shlex.split(more) if isinstance(more, str) else list(more)
    return (*_FLAGS, *([_SYSTEM] if system else ()), *more, *shlex.split(options.compile_options))


def _shortened(log: str) -> str:
    """The errors of a compiler's log, without the program it repeats after each."""
    lines = log.splitlines()
    errors = [line for line in lines if "error:" in line] or lines[-4:]
    return "\n  ".join(line if len(line) < 400 else f"{line[:400]} …" for line in errors[:6]) or "it said nothing"


_ELSEWHERE = 'the option engine="onnxruntime" runs it elsewhere; dump="folder" keeps the model'


def _device() -> Any:
    """With one thread the caller's own computes; a pool is the process's, as large as torch's was at first use.

    IREE keeps its drivers; one held here too would outlive it, and be reported at exit.
    """
    runtime, threads = _runtime(), torch.get_num_threads()
    if threads == 1:
        return runtime.get_driver("local-sync").create_default_device()
    runtime.flags.parse_flags(f"--task_topology_max_group_count={threads}")
    return runtime.get_driver("local-task").create_default_device()


class IreeRunner(Runner):
    """One compiled model, called with torch tensors and nothing copied."""

    def __init__(self, job: Job, code: Path) -> None:
        runtime = _runtime()
        try:
            instance = runtime.VmInstance()
            self._device = _device()
            module = runtime.VmModule.mmap(instance, str(code))
            modules = [runtime.create_hal_module(instance, self._device), module]
            self._context = runtime.VmContext(instance, modules)
            self._function = module.lookup_function(_entry(module))
        except Exception as error:
            raise EngineError(f"iree cannot load what it compiled: {error}", hint=_ELSEWHERE) from error
        self._list, self._view = runtime.VmVariantList, runtime.HalBufferView
        self._types = job.output_types
        self._lock = threading.Lock()  # a context has state
        self._quietly: Callable[..., Any] = ThreadPauser()
        _live.add(self)
        fork.register(self)

    def forked(self) -> None:
        """In a child process: refuse to run."""
        fork.never_free(self._context)
        self._lock, self._quietly = threading.Lock(), fork.raise_in_child("iree")

    def __call__(self, inputs: Sequence[torch.Tensor | int]) -> list[torch.Tensor]:
        """Run once."""
        given, results = self._list(len(inputs)), self._list(len(self._types))
        for x in inputs:
            given.push_ref(self._device.from_dlpack_capsule(to_dlpack(_in_order(x))))
        try:
            with self._lock:
                self._quietly(self._context.invoke, self._function, given, results)
        except Exception as error:
            raise EngineError(f"iree failed while running: {error}", hint=_ELSEWHERE) from error
        return [self._taken(results, index, dtype) for index, dtype in enumerate(self._types)]

    def close(self) -> None:
        """Drop the code."""
        self._context = self._function = self._device = None

    def _taken(self, results: Any, index: int, dtype: torch.dtype) -> torch.Tensor:
        view = results.get_as_ref(index).deref(self._view)
        made = from_dlpack(self._device.create_dlpack_capsule(view, _KDLCPU, 0))
        return made if made.dtype == dtype else made.view(dtype)


class SymbolicRunner(Runner):
    """A model of symbolic sizes: compiled anew for the sizes of each call, of which some are kept."""

    def __init__(self, engine: Iree, job: Job) -> None:
        self._engine, self._job = engine, job
        self._runners = LRU[Runner](_SIZES_KEPT)
        self._lock = threading.Lock()

    def __call__(self, inputs: Sequence[torch.Tensor | int]) -> list[torch.Tensor]:
        """Run once."""
        key = tuple(x if isinstance(x, int) else tuple(x.shape) for x in inputs)
        with self._lock:
            runner = self._runners.get(key)
            if runner is None:
                runner = artifacts.load(self._engine, _for_sizes(self._job, inputs))
                self._runners.put(key, runner)
        return runner([x for x in inputs if not isinstance(x, int)])

    def close(self) -> None:
        """Drop the code for all sizes."""
        self._runners.clear()


def _for_sizes(job: Job, inputs: Sequence[torch.Tensor | int]) -> Job:
    """The job for these sizes: integers among the inputs are sizes too, and become constants."""
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


def _entry(module: Any) -> str:
    """The function that returns when its results are there."""
    names = [name for name in module.function_names if not name.startswith("__") and not name.endswith("$async")]
    return str(names[0])


def _in_order(x: torch.Tensor | int) -> torch.Tensor:
    """The tensor, or a copy that lies in memory as the code expects it."""
    if isinstance(x, int):
        return torch.tensor([x])
    x = x.detach()
    x = contiguous(x)
    return x if x.data_ptr() % _ALIGNMENT == 0 else x.clone()
