"""Build and load the native core, and its Python interface."""

from __future__ import annotations

import ctypes
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
import torch

from sardonyx import dtypes, fork
from sardonyx.eager.layout import Layout
from sardonyx.engines.engine import Job, Runner
from sardonyx.engines.onnxruntime import OnnxRuntime, OnnxRuntimeRunner
from sardonyx.errors import EngineError, MissingDependency
from sardonyx.options import Options
from sardonyx.run.region import BareSession
from sardonyx.telemetry.progress import show_progress
from sardonyx.toolchain import compiler
from sardonyx.toolchain.headers import read_header
from sardonyx.toolchain.operator_libraries import libraries_of

_PARTS = ("session.h", "device.h", "call_key.h", "kernel.h", "core.cpp")
MAX_DEVICES = 8
OPERATOR_KINDS = {"functional": 0, "in place": 1, "out": 2, "view": 3}

_AS_RETURNED, _STATIC_SHAPE, _RESHAPED = 0, 1, 2
_NOT_REQUESTED = -1

_ELEMENTWISE = frozenset(
    {
        *("Abs", "Add", "And", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "Cast", "Ceil"),
        *("Clip", "Cos", "Div", "Elu", "Equal", "Erf", "Exp", "Floor", "Greater"),
        *("GreaterOrEqual", "HardSigmoid", "HardSwish", "Identity", "LeakyRelu", "Less", "LessOrEqual", "Log", "Mul"),
        *("Neg", "Not", "Or", "Reciprocal", "Relu", "Round", "Sigmoid", "Sign", "Sin"),
        *("Softplus", "Sqrt", "Sub", "Tanh", "Xor"),
    }
)
"""Operators whose kernels may write their output over an input: each element is read before it is written."""


def load(threads: int) -> Core:
    """Build the core if it is not cached, load it and start it."""
    runtime = _runtime_library()  # first, since torch cannot unload the core
    core = Core(_build())
    core.start(runtime, threads)
    return core


def _runtime_library() -> Path:
    """Return the path of ONNX Runtime's C library, which is part of its wheel."""
    import onnxruntime

    paths = sorted(Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so*"))
    if not paths:
        raise MissingDependency("the installed onnxruntime has no C library", hint='use executor="python"')
    return paths[0]


def source() -> str:
    """Return the whole source."""
    parts = (read_header("sardonyx.toolchain", "ort.h"), *(read_header("sardonyx.eager.core", name) for name in _PARTS))
    return "\n".join(parts)


def _build() -> Path:
    root = Path(torch.__file__).parent
    include = (root / "include", root / "include/torch/csrc/api/include")
    flags = ("-std=c++20", "-O2", f'-DTORCH="{torch.__version__}"', *(f"-isystem{folder}" for folder in include))
    links = (f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10")
    extra = tuple(shlex.split(os.environ.get("SARDONYX_CORE_FLAGS", "")))  # sanitizers, for instance
    with show_progress("building the core of the device ort, once for this torch"):
        return compiler.build_library(source(), Options(), flags=(*flags, *extra), links=(*links, *extra))


class Core:
    """The Python interface of the core."""

    def __init__(self, library: Path) -> None:
        self._library: Any = ctypes.CDLL(str(library))
        for name in ("sx_start", "sx_register", "sx_calls", "sx_current", "sx_session", "sx_offer"):
            getattr(self._library, name).restype = ctypes.c_int64
        self._library.sx_error.restype = ctypes.c_char_p
        self._kernels: dict[str, int] = {}

    def start(self, runtime: Path, threads: int) -> None:
        """Load ONNX Runtime and register as torch's device."""
        self._check(self._library.sx_start(str(runtime).encode(), threads))

    def set_device_count(self, count: int) -> None:
        """Set the number of devices, and clear the core's cache of calls."""
        self._library.sx_set_device_count(count)
        self._library.sx_clear()

    @property
    def current(self) -> int:
        """The current device of this thread."""
        return int(self._library.sx_current())

    @current.setter
    def current(self, index: int) -> None:
        self._library.sx_set_current(index)

    def register(self, operator: Any, kind: str) -> None:
        """Let the core handle the calls of an operator."""
        name = operator._schema.name.encode(), operator._schema.overload_name.encode()
        self._kernels[operator.name()] = self._check(self._library.sx_register(*name, OPERATOR_KINDS[kind]))

    def calls(self) -> dict[str, int]:
        """Return the number of calls per operator."""
        counts = {name: self._library.sx_calls(ctypes.c_int64(kernel)) for name, kernel in self._kernels.items()}
        return {name: count for name, count in counts.items() if count}

    def session(self, job: Job) -> int:
        """Create a session for a model, and return its number."""
        libraries = [str(library) for library in (*job.libraries, *libraries_of(job.model))]
        types = [int(dtypes.to_onnx(dtype)) for dtype in job.output_types]
        return self._check(
            self._library.sx_session(
                job.model,
                ctypes.c_int64(len(job.model)),
                _strings([*job.inputs, *job.outputs]),
                len(job.inputs),
                len(job.outputs),
                _integers(types),
                _strings(libraries),
                len(libraries),
            )
        )

    def release(self, session: int) -> None:
        """Free a session once no cached call uses it."""
        self._library.sx_release(ctypes.c_int64(session))

    def offer(
        self, operator: Any, plain: BareSession, leaves: Sequence[Layout], tensors: int, scalars: int, *, static: bool
    ) -> bool:
        """Tell the core how to run calls with the key of the last one passed to Python; return whether it accepted.

        The session takes the first `tensors` tensors of the call, then `scalars` of its numbers.
        """
        runner = plain.runner
        if not isinstance(runner, CoreRunner):
            return False
        inputs = [i if i < tensors else tensors - 1 - i for i in plain.inputs]
        results = [_NOT_REQUESTED if i is None else i for i in plain.results]
        modes = [_RESHAPED if i in plain.reshaped else _STATIC_SHAPE if static else _AS_RETURNED for i in plain.results]
        permutations, expanded = zip(*(layout.encode() for layout in leaves), strict=True) if leaves else ((), ())
        accepted = self._library.sx_offer(
            operator._schema.name.encode(),
            operator._schema.overload_name.encode(),
            ctypes.c_int64(runner.session),
            _integers(inputs),
            len(inputs),
            _integers(results),
            _integers(modes),
            len(results),
            _integers(permutations),
            _integers(expanded),
            len(leaves),
            scalars,
            int(runner.elementwise),
        )
        return bool(self._check(accepted))

    def _check(self, returned: int) -> int:
        if returned < 0:
            raise EngineError(f"the core of the device ort: {self._library.sx_error().decode()}")
        return returned


def _strings(values: Sequence[str]) -> Any:
    return (ctypes.c_char_p * len(values))(*(value.encode() for value in values))


def _integers(values: Sequence[int]) -> Any:
    return (ctypes.c_uint32 * len(values))(*(value & 0xFFFFFFFF for value in values))


class CoreRunner(Runner):
    """A session of the core."""

    def __init__(self, core: Core, job: Job) -> None:
        self._core, self._job = core, job
        self._session: int | None = core.session(job)
        fork.register(self)
        self.output_types = job.output_types
        nodes = onnx.load_from_string(job.model).graph.node
        self.elementwise = len(job.outputs) == 1 and all(
            node.op_type in _ELEMENTWISE and (len(node.input) <= 2 or node.op_type == "Clip") for node in nodes
        )

    @property
    def session(self) -> int:
        """Its number; a forked child creates a new session, since the core's threads are not there."""
        if self._session is None:
            self._session = self._core.session(self._job)
        return self._session

    def forked(self) -> None:
        """In a forked child: create a new session on the next call."""
        self._session = None

    def __call__(self, inputs: Sequence[torch.Tensor | int]) -> list[torch.Tensor]:
        """Run once."""
        tensors = [x if isinstance(x, torch.Tensor) else torch.tensor(x) for x in inputs]
        try:
            results: list[torch.Tensor] = torch.ops.sardonyx_eager.run(self.session, tensors)
        except RuntimeError as error:
            raise EngineError(str(error)) from error
        return results

    def close(self) -> None:
        """Let the core free the session."""
        if self._session is not None:
            self._core.release(self._session)


class CoreEngine(OnnxRuntime):
    """ONNX Runtime through the core."""

    name = "onnxruntime, by the device's core"

    def __init__(self, core: Core) -> None:
        self._core = core

    def load(self, job: Job, artifact: Path | None) -> CoreRunner | OnnxRuntimeRunner:
        """Create a session in the core, or an onnxruntime session for weights or other providers."""
        plain = not job.weights and job.options.providers is None
        return CoreRunner(self._core, job) if plain else OnnxRuntimeRunner(job)
