"""The core as a library: building it, loading it, and what Python says to it."""

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
from sardonyx.run.region import Plain
from sardonyx.telemetry.progress import show_progress
from sardonyx.toolchain import compiler
from sardonyx.toolchain.headers import header
from sardonyx.toolchain.operator_libraries import libraries_of

_PARTS = ("session.h", "device.h", "look.h", "kernel.h", "core.cpp")
MOST_DEVICES = 8
KINDS = {"functional": 0, "in place": 1, "out": 2, "view": 3}

_AS_GIVEN, _SIZED, _RESHAPED = 0, 1, 2
_NOT_ASKED_FOR = -1

_ELEMENTWISE = frozenset(
    {
        *("Abs", "Add", "And", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "Cast", "Ceil"),
        *("Clip", "Cos", "Div", "Elu", "Equal", "Erf", "Exp", "Floor", "Greater"),
        *("GreaterOrEqual", "HardSigmoid", "HardSwish", "Identity", "LeakyRelu", "Less", "LessOrEqual", "Log", "Mul"),
        *("Neg", "Not", "Or", "Reciprocal", "Relu", "Round", "Sigmoid", "Sign", "Sin"),
        *("Softplus", "Sqrt", "Sub", "Tanh", "Xor"),
    }
)
"""Operators whose kernels read an element before they write the one in its place, and no other after."""


def load(threads: int) -> Core:
    """The core, built before or now, and started."""
    runtime = _runtime()  # before the core is there: torch cannot be rid of it
    core = Core(_built())
    core.start(runtime, threads)
    return core


def _runtime() -> Path:
    """ONNX Runtime's library for C, which its wheel brings beside the binding for Python."""
    import onnxruntime

    found = sorted(Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so*"))
    if not found:
        raise MissingDependency("this onnxruntime brings no library for C", hint='executor="python" needs none')
    return found[0]


def source() -> str:
    """All of it, in one."""
    parts = (header("sardonyx.toolchain", "ort.h"), *(header("sardonyx.eager.core", name) for name in _PARTS))
    return "\n".join(parts)


def _built() -> Path:
    root = Path(torch.__file__).parent
    include = (root / "include", root / "include/torch/csrc/api/include")
    flags = ("-std=c++20", "-O2", f'-DTORCH="{torch.__version__}"', *(f"-isystem{folder}" for folder in include))
    links = (f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10")
    more = tuple(shlex.split(os.environ.get("SARDONYX_CORE_FLAGS", "")))  # as sanitizers take
    with show_progress("building the core of the device ort, once for this torch"):
        return compiler.built(source(), Options(), flags=(*flags, *more), links=(*links, *more))


class Core:
    """The core, as Python speaks to it."""

    def __init__(self, library: Path) -> None:
        self._library: Any = ctypes.CDLL(str(library))
        for name in ("sx_start", "sx_register", "sx_calls", "sx_current", "sx_session", "sx_offer"):
            getattr(self._library, name).restype = ctypes.c_int64
        self._library.sx_failure.restype = ctypes.c_char_p
        self._kernels: dict[str, int] = {}

    def start(self, runtime: Path, threads: int) -> None:
        """Open ONNX Runtime, and be torch's device."""
        self._checked(self._library.sx_start(str(runtime).encode(), threads))

    def have(self, devices: int) -> None:
        """Say how many devices there are, and that they may be set otherwise than before."""
        self._library.sx_devices(devices)
        self._library.sx_clear()

    @property
    def current(self) -> int:
        """The device that is meant where none is said, on this thread."""
        return int(self._library.sx_current())

    @current.setter
    def current(self, index: int) -> None:
        self._library.sx_choose(index)

    def register(self, operator: Any, kind: str) -> None:
        """Let the core have the calls of an operator."""
        name = operator._schema.name.encode(), operator._schema.overload_name.encode()
        self._kernels[operator.name()] = self._checked(self._library.sx_register(*name, KINDS[kind]))

    def calls(self) -> dict[str, int]:
        """How often each operator was called."""
        counts = {name: self._library.sx_calls(ctypes.c_int64(kernel)) for name, kernel in self._kernels.items()}
        return {name: count for name, count in counts.items() if count}

    def session(self, job: Job) -> int:
        """A session for a model, by its number."""
        libraries = [str(library) for library in (*job.libraries, *libraries_of(job.model))]
        types = [int(dtypes.to_onnx(dtype)) for dtype in job.output_types]
        return self._checked(
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

    def forget(self, session: int) -> None:
        """Free a session, once no kept call uses it."""
        self._library.sx_forget(ctypes.c_int64(session))

    def offer(
        self, operator: Any, plain: Plain, leaves: Sequence[Layout], tensors: int, numbers: int, *, sized: bool
    ) -> bool:
        """Say how calls like the one that was handed to Python are to run from now on.

        The session takes `tensors` of the call's, then so many of its `numbers`.
        """
        runner = plain.runner
        if not isinstance(runner, CoreRunner):
            return False
        inputs = [i if i < tensors else tensors - 1 - i for i in plain.inputs]
        results = [_NOT_ASKED_FOR if i is None else i for i in plain.results]
        how = [_RESHAPED if i in plain.reshaped else _SIZED if sized else _AS_GIVEN for i in plain.results]
        orders, repeated = zip(*(layout.numbers() for layout in leaves), strict=True) if leaves else ((), ())
        taken = self._library.sx_offer(
            operator._schema.name.encode(),
            operator._schema.overload_name.encode(),
            ctypes.c_int64(runner.session),
            _integers(inputs),
            len(inputs),
            _integers(results),
            _integers(how),
            len(results),
            _integers(orders),
            _integers(repeated),
            len(leaves),
            numbers,
            int(runner.elementwise),
        )
        return bool(self._checked(taken))

    def _checked(self, returned: int) -> int:
        if returned < 0:
            raise EngineError(f"the core of the device ort: {self._library.sx_failure().decode()}")
        return returned


def _strings(values: Sequence[str]) -> Any:
    return (ctypes.c_char_p * len(values))(*(value.encode() for value in values))


def _integers(values: Sequence[int]) -> Any:
    return (ctypes.c_uint32 * len(values))(*(value & 0xFFFFFFFF for value in values))


class CoreRunner(Runner):
    """A session of the core's."""

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
        """Its number; in a child process that of another session, for the core's threads are not there."""
        if self._session is None:
            self._session = self._core.session(self._job)
        return self._session

    def forked(self) -> None:
        """In a child process: have another session from the next call on."""
        self._session = None

    def __call__(self, inputs: Sequence[torch.Tensor | int]) -> list[torch.Tensor]:
        """Run once."""
        given = [x if isinstance(x, torch.Tensor) else torch.tensor(x) for x in inputs]
        try:
            results: list[torch.Tensor] = torch.ops.sardonyx_eager.run(self.session, given)
        except RuntimeError as error:
            raise EngineError(str(error)) from error
        return results

    def close(self) -> None:
        """Let the core free it."""
        if self._session is not None:
            self._core.forget(self._session)


class CoreEngine(OnnxRuntime):
    """ONNX Runtime, through the core."""

    name = "onnxruntime, by the device's core"

    def __init__(self, core: Core) -> None:
        self._core = core

    def load(self, job: Job, artifact: Path | None) -> CoreRunner | OnnxRuntimeRunner:  # type: ignore[override]
        """Create a session; where the core has no way to, the binding's."""
        plain = not job.weights and job.options.providers is None
        return CoreRunner(self._core, job) if plain else OnnxRuntimeRunner(job)
