"""Running what onnx-mlir compiled: its library's documented C functions, called without a copy on either side."""

from __future__ import annotations

import _ctypes
import ctypes
import json
import math
import os
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import onnx
import onnx_ir as ir
import torch

from sardonyx import dtypes
from sardonyx.engines.contiguous import contiguous
from sardonyx.engines.engine import Job, Runner
from sardonyx.errors import EngineError

CONSTANTS = ".constants.bin"
"""How the file ends that holds constants too large for the library."""

_pointer: TypeAlias = ctypes.c_void_p
_integer: TypeAlias = ctypes.c_int64
_integers = ctypes.POINTER(_integer)
_FUNCTIONS: Mapping[str, tuple[Any, tuple[Any, ...]]] = {
    "omTensorCreate": (_pointer, (_pointer, _integers, _integer, ctypes.c_int)),
    "omTensorDestroy": (None, (_pointer,)),
    "omTensorGetDataPtr": (_pointer, (_pointer,)),
    "omTensorGetShape": (_integers, (_pointer,)),
    "omTensorGetStrides": (_integers, (_pointer,)),
    "omTensorGetRank": (_integer, (_pointer,)),
    "omTensorGetDataType": (ctypes.c_int, (_pointer,)),
    "omTensorGetOwning": (_integer, (_pointer,)),
    "omTensorSetOwning": (None, (_pointer, _integer)),
    "omTensorListCreate": (_pointer, (ctypes.POINTER(_pointer), _integer)),
    "omTensorListDestroy": (None, (_pointer,)),
    "omTensorListDestroyShallow": (None, (_pointer,)),
    "omTensorListGetSize": (_integer, (_pointer,)),
    "omTensorListGetOmtByIndex": (_pointer, (_pointer, _integer)),
}
"""The part of onnx-mlir's runtime that is used here, which each library exports: result and arguments."""

_TYPES = {
    "i1": torch.bool,
    "i8": torch.int8,
    "i16": torch.int16,
    "i32": torch.int32,
    "i64": torch.int64,
    "ui8": torch.uint8,
    "ui16": torch.uint16,
    "ui32": torch.uint32,
    "ui64": torch.uint64,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "f64": torch.float64,
}
"""What a library's signature calls the types of elements."""

_AGAIN = "sardonyx cache clear drops what was compiled; if it stays, this compiler does not fit"


@dataclass(frozen=True)
class Port:
    """An input or output of the model; a size is a number, the name of one that calls decide, or None."""

    name: str
    dtype: torch.dtype
    dims: tuple[int | str | None, ...] | None

    @classmethod
    def of(cls, value: onnx.ValueInfoProto) -> Port:
        """What the model says of it."""
        kind = value.type.tensor_type
        dims = tuple(d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in kind.shape.dim)
        return cls(value.name, dtypes.to_torch(ir.DataType(kind.elem_type)), dims if kind.HasField("shape") else None)

    def misfit(self, dtype: torch.dtype, shape: Sequence[int], named: dict[str, int]) -> str | None:
        """What is wrong with a tensor for this place; sizes of one name must agree over a call."""
        if dtype != self.dtype:
            return f"is of dtype {dtype}, not {self.dtype}"
        if self.dims is None:
            return None
        if len(shape) != len(self.dims):
            return f"has {len(shape)} dimensions, not {len(self.dims)}"
        for size, dim in zip(shape, self.dims, strict=True):
            wanted = named.setdefault(dim, size) if isinstance(dim, str) else size if dim is None else dim
            if size != wanted:
                return f"has the sizes {list(shape)}, not {[named.get(str(d), d) for d in self.dims]}"
        return None

    def __str__(self) -> str:
        return f"{self.name!r}: {self.dtype} {'of any shape' if self.dims is None else list(self.dims)}"


class Library:
    """An open library: its functions, until it and all that it allocated is out of use."""

    def __init__(self, path: Path) -> None:
        self._tag = path.stem
        constants = path.with_name(path.stem + CONSTANTS)
        with _constants_in(path.parent if constants.exists() else None):
            self._open(path)
            if constants.exists():
                self._load_constants()
        functions = {
            name: _function(self._opened, name, result, *given) for name, (result, given) in _FUNCTIONS.items()
        }
        self.c = SimpleNamespace(**functions)
        self._main = _function(self._opened, f"run_main_graph_{self._tag}", _pointer, _pointer)

    def _open(self, path: Path) -> None:
        try:
            self._opened = ctypes.CDLL(str(path), use_errno=True)  # local symbols; calls release the GIL
        except OSError as error:
            raise EngineError(
                f"what onnx-mlir compiled cannot be loaded: {error}",
                hint="a library made in a container may need a newer C library than this machine's",
            ) from error
        # At exit tensors may outlive this object, and need the library to be freed.
        weakref.finalize(self, _ctypes.dlclose, self._opened._handle).atexit = False

    def _load_constants(self) -> None:
        """Load them now: the library would look for their file at its first run only."""
        try:
            load = self._opened[f"omLoadConstantsFromFile_{self._tag}"]
        except AttributeError:
            raise EngineError(
                "the library's constants are in a file, and it does not export how to load them",
                hint='compile_options="--store-constants-to-file=false" puts them into the library',
            ) from None
        load.restype = None  # some versions return whether it worked, older ones nothing
        load()

    def signature(self, kind: str) -> list[dict[str, Any]]:
        """What the library says of its inputs or outputs (`kind` is "Input" or "Output")."""
        ask = _function(self._opened, f"om{kind}Signature_{self._tag}", ctypes.c_char_p, ctypes.c_char_p)
        said = ask(f"run_main_graph_{self._tag}".encode())
        try:
            listed: list[dict[str, Any]] = json.loads(said or b"null")
            return [{"type": str(entry["type"]), "dims": list(entry["dims"])} for entry in listed]
        except (ValueError, TypeError, KeyError) as error:
            raise EngineError(
                f"the library's {kind.lower()} signature makes no sense: {said!r}", hint=_AGAIN
            ) from error

    def run(self, inputs: Sequence[torch.Tensor]) -> list[_Owned]:
        """Run the model over the memory of these tensors; its results, which are freed with what is returned."""
        given = (_pointer * len(inputs))(*map(self._borrowed, inputs))
        feeds = self.c.omTensorListCreate(given, len(inputs))
        if not feeds or not all(given):
            raise EngineError("onnx-mlir's runtime is out of memory")
        try:
            ctypes.set_errno(0)
            results = self._main(feeds)
            errno = ctypes.get_errno()
        finally:
            self.c.omTensorListDestroy(feeds)  # and the tensors in it, but not their data, which are torch's
        if not results:
            reason = f": {os.strerror(errno)}" if errno else ""
            raise EngineError(
                f"what onnx-mlir compiled failed while running (errno {errno}{reason})",
                hint="it may have written more to the standard error stream",
            )
        size = self.c.omTensorListGetSize(results)
        owned = [_Owned(self, self.c.omTensorListGetOmtByIndex(results, index)) for index in range(size)]
        self.c.omTensorListDestroyShallow(results)  # the list alone
        return owned

    def _borrowed(self, x: torch.Tensor) -> Any:
        shape = (_integer * x.dim())(*x.shape)
        return self.c.omTensorCreate(x.data_ptr(), shape, x.dim(), _number(x.dtype))


@cache
def _number(dtype: torch.dtype) -> int:
    """ONNX's number of a dtype, which is onnx-mlir's too."""
    return int(dtypes.to_onnx(dtype))


def _function(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Any:
    try:
        function = library[name]
    except AttributeError:
        raise EngineError(f"the library that onnx-mlir compiled has no function {name}", hint=_AGAIN) from None
    function.restype, function.argtypes = result, arguments
    return function


class _Owned:
    """A tensor of the runtime's, destroyed with this object."""

    def __init__(self, library: Library, tensor: int) -> None:
        self._library, self._tensor = library, tensor
        if not tensor:
            raise EngineError("what onnx-mlir compiled gave no tensor where a result belongs")
        rank = library.c.omTensorGetRank(tensor)
        self.onnx_dtype: int = library.c.omTensorGetDataType(tensor)
        self.shape: tuple[int, ...] = tuple(library.c.omTensorGetShape(tensor)[:rank])
        self.strides: tuple[int, ...] = tuple(library.c.omTensorGetStrides(tensor)[:rank])

    def __del__(self) -> None:
        self._library.c.omTensorDestroy(self._tensor)

    def in_order(self) -> bool:
        """Whether memory holds the elements in order, without gaps."""
        steps = zip(self.shape, self.strides, _steps(self.shape), strict=True)
        return all(size < 2 or stride == step for size, stride, step in steps)

    def as_torch(self, dtype: torch.dtype, taken: set[int]) -> torch.Tensor:
        """A tensor over this memory, which it keeps alive; a copy where the memory is not the result's own.

        A result may be a constant of the library, an input handed through, or another result: those are `taken`.
        """
        count = math.prod(self.shape)
        if not count:
            return torch.empty(self.shape, dtype=dtype)
        address = self._library.c.omTensorGetDataPtr(self._tensor)
        memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
        memory.owner = self  # type: ignore[attr-defined]  # kept by the buffer, as torch keeps the buffer
        stored = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
        made = torch.empty(0, dtype=dtype).set_(stored, 0, self.shape, _steps(self.shape))
        if address in taken:
            self._library.c.omTensorSetOwning(self._tensor, 0)  # whatever it claims
        taken.add(address)
        return made if self._library.c.omTensorGetOwning(self._tensor) else made.clone()


def _steps(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of elements in order."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


class OnnxMlirRunner(Runner):
    """One compiled model. Calls share nothing but the library, so threads need no lock."""

    def __init__(self, job: Job, path: Path) -> None:
        graph = onnx.load_from_string(job.model).graph
        known = {value.name: Port.of(value) for value in (*graph.input, *graph.output)}
        self._inputs = tuple(known[name] for name in job.inputs)
        self._outputs = tuple(known[name] for name in job.outputs)
        self._library: Library | None = Library(path)
        _check("Input", self._inputs, self._library)
        _check("Output", self._outputs, self._library)

    def __call__(self, inputs: Sequence[torch.Tensor | int]) -> list[torch.Tensor]:
        """Run once. What does not fit the compiled model is refused: native code would read past its memory."""
        library = self._library
        if library is None:
            raise EngineError("the model was closed")
        named: dict[str, int] = {}
        given = [_fitting(port, x, named) for port, x in zip(self._inputs, inputs, strict=True)]
        results = library.run(given)
        if len(results) != len(self._outputs):
            raise EngineError(f"the compiled model gave {len(results)} results, not {len(self._outputs)}")
        taken = {x.data_ptr() for x in given}
        return [_taken(port, result, named, taken) for port, result in zip(self._outputs, results, strict=True)]

    def close(self) -> None:
        """Let the library go; it stays open as long as a result of it lives."""
        self._library = None


def _check(kind: str, expected: Sequence[Port], library: Library) -> None:
    """Whether the library is of this model, as far as types, ranks and sizes tell."""
    listed = library.signature(kind)
    what = f"{kind.lower()}s"
    if len(listed) != len(expected):
        raise _foreign(f"it has {len(listed)} {what}, and the model has {len(expected)}")
    for port, said in zip(expected, listed, strict=True):
        if _TYPES.get(said["type"]) != port.dtype or not _may_be_of(port.dims, said["dims"]):
            raise _foreign(f"among its {what} is {said['type']} {said['dims']}, where the model has {port}")


def _may_be_of(dims: Sequence[int | str | None] | None, said: Sequence[Any]) -> bool:
    """Whether the ranks are the same, and the sizes that both sides know; the library writes unknown ones as -1."""
    if dims is None:
        return True
    known = [(a, b) for a, b in zip(dims, said, strict=False) if isinstance(a, int) and isinstance(b, int) and b >= 0]
    return len(dims) == len(said) and all(a == b for a, b in known)


def _foreign(reason: str) -> EngineError:
    return EngineError(f"what onnx-mlir compiled is not this model: {reason}", hint=_AGAIN)


def _fitting(port: Port, x: torch.Tensor | int, named: dict[str, int]) -> torch.Tensor:
    """An input with its elements in order, refused if the model was not compiled for it."""
    if isinstance(x, int):
        x = torch.tensor([x])
    if not x.is_cpu:
        raise EngineError(f"the input {port.name!r} is on {x.device}, and onnx-mlir computes on the CPU only")
    misfit = port.misfit(x.dtype, x.shape, named)
    if misfit:
        raise EngineError(f"the input {port.name!r} {misfit}", hint="compile for it, or declare the size dynamic")
    return contiguous(x)


def _taken(port: Port, result: _Owned, named: dict[str, int], taken: set[int]) -> torch.Tensor:
    """A result in torch, refused if it is not what the model says."""
    if result.onnx_dtype != _number(port.dtype):
        raise EngineError(
            f"the result {port.name!r} is of ONNX's type {result.onnx_dtype}, not {port.dtype}", hint=_AGAIN
        )
    misfit = port.misfit(port.dtype, result.shape, named)
    if misfit or not result.in_order():
        raise EngineError(f"the result {port.name!r} {misfit or f'has strides {result.strides}'}", hint=_AGAIN)
    return result.as_torch(port.dtype, taken)


_environment = threading.Lock()


@contextmanager
def _constants_in(folder: Path | None) -> Iterator[None]:
    """While active, libraries look for files of constants in this folder. The variable is the whole process's."""
    if folder is None:
        yield
        return
    with _environment:
        before = os.environ.get("OM_CONSTANT_PATH")
        os.environ["OM_CONSTANT_PATH"] = str(folder)
        try:
            yield
        finally:
            if before is None:
                del os.environ["OM_CONSTANT_PATH"]
            else:
                os.environ["OM_CONSTANT_PATH"] = before
