"""Run a library compiled by onnx-mlir through its documented C API, without copying inputs or outputs."""

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
"""The suffix of the file with constants too large for the library."""

_Pointer: TypeAlias = ctypes.c_void_p
_Integer: TypeAlias = ctypes.c_int64
_Integers = ctypes.POINTER(_Integer)
_FUNCTIONS: Mapping[str, tuple[Any, tuple[Any, ...]]] = {
    "omTensorCreate": (_Pointer, (_Pointer, _Integers, _Integer, ctypes.c_int)),
    "omTensorDestroy": (None, (_Pointer,)),
    "omTensorGetDataPtr": (_Pointer, (_Pointer,)),
    "omTensorGetShape": (_Integers, (_Pointer,)),
    "omTensorGetStrides": (_Integers, (_Pointer,)),
    "omTensorGetRank": (_Integer, (_Pointer,)),
    "omTensorGetDataType": (ctypes.c_int, (_Pointer,)),
    "omTensorGetOwning": (_Integer, (_Pointer,)),
    "omTensorSetOwning": (None, (_Pointer, _Integer)),
    "omTensorListCreate": (_Pointer, (ctypes.POINTER(_Pointer), _Integer)),
    "omTensorListDestroy": (None, (_Pointer,)),
    "omTensorListDestroyShallow": (None, (_Pointer,)),
    "omTensorListGetSize": (_Integer, (_Pointer,)),
    "omTensorListGetOmtByIndex": (_Pointer, (_Pointer, _Integer)),
}
"""The used part of onnx-mlir's runtime, which each library exports: result type and argument types."""

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
"""The names of element types in a library's signature."""

_HINT = "run `sardonyx cache clear` and compile again; if that fails too, this compiler is not compatible"


@dataclass(frozen=True)
class Port:
    """An input or output of the model; a dimension is a number, the name of a symbolic size, or None."""

    name: str
    dtype: torch.dtype
    dims: tuple[int | str | None, ...] | None

    @classmethod
    def from_value_info(cls, value: onnx.ValueInfoProto) -> Port:
        """Read name, dtype and dimensions."""
        kind = value.type.tensor_type
        dims = tuple(d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in kind.shape.dim)
        return cls(value.name, dtypes.to_torch(ir.DataType(kind.elem_type)), dims if kind.HasField("shape") else None)

    def mismatch(self, dtype: torch.dtype, shape: Sequence[int], sizes: dict[str, int]) -> str | None:
        """Return how a tensor differs from this port, or None; sizes of one name must agree within a call."""
        if dtype != self.dtype:
            return f"has dtype {dtype}, expected {self.dtype}"
        if self.dims is None:
            return None
        if len(shape) != len(self.dims):
            return f"has {len(shape)} dimensions, expected {len(self.dims)}"
        for size, dim in zip(shape, self.dims, strict=True):
            expected = sizes.setdefault(dim, size) if isinstance(dim, str) else size if dim is None else dim
            if size != expected:
                return f"has shape {list(shape)}, expected {[sizes.get(str(d), d) for d in self.dims]}"
        return None

    def __str__(self) -> str:
        return f"{self.name!r}: {self.dtype} {'of any shape' if self.dims is None else list(self.dims)}"


class Library:
    """A loaded library; it is closed once it and all tensors that it allocated are unused."""

    def __init__(self, path: Path) -> None:
        self._tag = path.stem
        constants = path.with_name(path.stem + CONSTANTS)
        with _constants_folder(path.parent if constants.exists() else None):
            self._open(path)
            if constants.exists():
                self._load_constants()
        functions = {
            name: _function(self._cdll, name, result, *arguments) for name, (result, arguments) in _FUNCTIONS.items()
        }
        self.c = SimpleNamespace(**functions)
        self._main = _function(self._cdll, f"run_main_graph_{self._tag}", _Pointer, _Pointer)

    def _open(self, path: Path) -> None:
        try:
            self._cdll = ctypes.CDLL(str(path), use_errno=True)  # local symbols; calls release the GIL
        except OSError as error:
            raise EngineError(
                f"the library compiled by onnx-mlir cannot be loaded: {error}",
                hint="a library compiled in a container may need a newer libc than this machine has",
            ) from error
        # At exit tensors may outlive this object, and freeing them needs the library.
        weakref.finalize(self, _ctypes.dlclose, self._cdll._handle).atexit = False

    def _load_constants(self) -> None:
        """Load constants now: the library would look for their file only at its first run."""
        try:
            load = self._cdll[f"omLoadConstantsFromFile_{self._tag}"]
        except AttributeError:
            raise EngineError(
                "the library's constants are in a file, but it does not export a function to load them",
                hint='compile_options="--store-constants-to-file=false" puts them into the library',
            ) from None
        load.restype = None  # newer versions return a status, older ones nothing
        load()

    def signature(self, kind: str) -> list[dict[str, Any]]:
        """Return the library's signature of its inputs or outputs (`kind` is "Input" or "Output")."""
        query = _function(self._cdll, f"om{kind}Signature_{self._tag}", ctypes.c_char_p, ctypes.c_char_p)
        text = query(f"run_main_graph_{self._tag}".encode())
        try:
            entries: list[dict[str, Any]] = json.loads(text or b"null")
            return [{"type": str(entry["type"]), "dims": list(entry["dims"])} for entry in entries]
        except (ValueError, TypeError, KeyError) as error:
            raise EngineError(f"invalid {kind.lower()} signature in the library: {text!r}", hint=_HINT) from error

    def run(self, inputs: Sequence[torch.Tensor]) -> list[_RuntimeTensor]:
        """Run the model on the memory of these tensors; each returned object frees its result."""
        tensors = (_Pointer * len(inputs))(*map(self._wrap, inputs))
        feeds = self.c.omTensorListCreate(tensors, len(inputs))
        if not feeds or not all(tensors):
            raise EngineError("onnx-mlir's runtime is out of memory")
        try:
            ctypes.set_errno(0)
            results = self._main(feeds)
            errno = ctypes.get_errno()
        finally:
            self.c.omTensorListDestroy(feeds)  # with its tensors, but not their data, which torch owns
        if not results:
            reason = f": {os.strerror(errno)}" if errno else ""
            raise EngineError(
                f"the model compiled by onnx-mlir failed at run time (errno {errno}{reason})",
                hint="stderr may have more information",
            )
        size = self.c.omTensorListGetSize(results)
        owned = [_RuntimeTensor(self, self.c.omTensorListGetOmtByIndex(results, index)) for index in range(size)]
        self.c.omTensorListDestroyShallow(results)  # the list, not its tensors
        return owned

    def _wrap(self, x: torch.Tensor) -> Any:
        shape = (_Integer * x.dim())(*x.shape)
        return self.c.omTensorCreate(x.data_ptr(), shape, x.dim(), _onnx_dtype(x.dtype))


@cache
def _onnx_dtype(dtype: torch.dtype) -> int:
    """Return ONNX's number of a dtype, which onnx-mlir uses too."""
    return int(dtypes.to_onnx(dtype))


def _function(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Any:
    try:
        function = library[name]
    except AttributeError:
        raise EngineError(f"the library that onnx-mlir compiled has no function {name}", hint=_HINT) from None
    function.restype, function.argtypes = result, arguments
    return function


class _RuntimeTensor:
    """A tensor of onnx-mlir's runtime, destroyed with this object."""

    def __init__(self, library: Library, tensor: int) -> None:
        self._library, self._tensor = library, tensor
        if not tensor:
            raise EngineError("the model compiled by onnx-mlir returned a null tensor")
        rank = library.c.omTensorGetRank(tensor)
        self.onnx_dtype: int = library.c.omTensorGetDataType(tensor)
        self.shape: tuple[int, ...] = tuple(library.c.omTensorGetShape(tensor)[:rank])
        self.strides: tuple[int, ...] = tuple(library.c.omTensorGetStrides(tensor)[:rank])

    def __del__(self) -> None:
        self._library.c.omTensorDestroy(self._tensor)

    def is_contiguous(self) -> bool:
        """Whether memory holds the elements in C order, without gaps."""
        steps = zip(self.shape, self.strides, _contiguous_strides(self.shape), strict=True)
        return all(size < 2 or stride == step for size, stride, step in steps)

    def as_torch(self, dtype: torch.dtype, used: set[int]) -> torch.Tensor:
        """Return a tensor that shares this memory and keeps it alive; a copy if the result does not own its memory.

        A result may be a constant of the library, an input, or another result; `used` has the addresses seen so far.
        """
        count = math.prod(self.shape)
        if not count:
            return torch.empty(self.shape, dtype=dtype)
        address = self._library.c.omTensorGetDataPtr(self._tensor)
        memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
        memory.owner = self  # type: ignore[attr-defined]  # torch keeps the buffer alive, which keeps this alive
        stored = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
        tensor = torch.empty(0, dtype=dtype).set_(stored, 0, self.shape, _contiguous_strides(self.shape))
        if address in used:
            self._library.c.omTensorSetOwning(self._tensor, 0)  # even if it claims to own it
        used.add(address)
        return tensor if self._library.c.omTensorGetOwning(self._tensor) else tensor.clone()


def _contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


class OnnxMlirRunner(Runner):
    """One compiled model. Calls share only the library, so threads need no lock."""

    def __init__(self, job: Job, path: Path) -> None:
        graph = onnx.load_from_string(job.model).graph
        known = {value.name: Port.from_value_info(value) for value in (*graph.input, *graph.output)}
        self._inputs = tuple(known[name] for name in job.inputs)
        self._outputs = tuple(known[name] for name in job.outputs)
        self._library: Library | None = Library(path)
        _check("Input", self._inputs, self._library)
        _check("Output", self._outputs, self._library)

    def __call__(self, inputs: Sequence[torch.Tensor | int]) -> list[torch.Tensor]:
        """Run once. Inputs that do not match the compiled model are refused: it would read out of bounds."""
        library = self._library
        if library is None:
            raise EngineError("the model is closed")
        sizes: dict[str, int] = {}
        tensors = [_checked_input(port, x, sizes) for port, x in zip(self._inputs, inputs, strict=True)]
        results = library.run(tensors)
        if len(results) != len(self._outputs):
            raise EngineError(f"the compiled model returned {len(results)} results, expected {len(self._outputs)}")
        used = {x.data_ptr() for x in tensors}
        return [_checked_output(port, result, sizes, used) for port, result in zip(self._outputs, results, strict=True)]

    def close(self) -> None:
        """Release the library, which stays loaded as long as a result is alive."""
        self._library = None


def _check(kind: str, expected: Sequence[Port], library: Library) -> None:
    """Check that the library is of this model, by dtypes, ranks and sizes."""
    entries = library.signature(kind)
    plural = f"{kind.lower()}s"
    if len(entries) != len(expected):
        raise _wrong_library(f"it has {len(entries)} {plural}, the model {len(expected)}")
    for port, entry in zip(expected, entries, strict=True):
        if _TYPES.get(entry["type"]) != port.dtype or not _dims_agree(port.dims, entry["dims"]):
            raise _wrong_library(f"its {plural} have {entry['type']} {entry['dims']} where the model has {port}")


def _dims_agree(dims: Sequence[int | str | None] | None, listed: Sequence[Any]) -> bool:
    """Whether ranks and known sizes agree; the library writes unknown sizes as -1."""
    if dims is None:
        return True
    known = [(a, b) for a, b in zip(dims, listed, strict=False) if isinstance(a, int) and isinstance(b, int) and b >= 0]
    return len(dims) == len(listed) and all(a == b for a, b in known)


def _wrong_library(reason: str) -> EngineError:
    return EngineError(f"the compiled library does not match the model: {reason}", hint=_HINT)


def _checked_input(port: Port, x: torch.Tensor | int, sizes: dict[str, int]) -> torch.Tensor:
    """Return a contiguous input, or raise if the model was not compiled for it."""
    if isinstance(x, int):
        x = torch.tensor([x])
    if not x.is_cpu:
        raise EngineError(f"the input {port.name!r} is on {x.device}, but onnx-mlir runs on the CPU only")
    mismatch = port.mismatch(x.dtype, x.shape, sizes)
    if mismatch:
        raise EngineError(f"the input {port.name!r} {mismatch}", hint="compile for this shape, or make it dynamic")
    return contiguous(x)


def _checked_output(port: Port, result: _RuntimeTensor, sizes: dict[str, int], used: set[int]) -> torch.Tensor:
    """Return a result as a torch tensor, or raise if it does not match the model."""
    if result.onnx_dtype != _onnx_dtype(port.dtype):
        raise EngineError(
            f"the result {port.name!r} has ONNX dtype {result.onnx_dtype}, expected {port.dtype}", hint=_HINT
        )
    mismatch = port.mismatch(port.dtype, result.shape, sizes)
    if mismatch or not result.is_contiguous():
        raise EngineError(f"the result {port.name!r} {mismatch or f'has strides {result.strides}'}", hint=_HINT)
    return result.as_torch(port.dtype, used)


_environment_lock = threading.Lock()


@contextmanager
def _constants_folder(folder: Path | None) -> Iterator[None]:
    """Have libraries look for files of constants in this folder. The environment variable affects the whole process."""
    if folder is None:
        yield
        return
    with _environment_lock:
        previous = os.environ.get("OM_CONSTANT_PATH")
        os.environ["OM_CONSTANT_PATH"] = str(folder)
        try:
            yield
        finally:
            if previous is None:
                del os.environ["OM_CONSTANT_PATH"]
            else:
                os.environ["OM_CONSTANT_PATH"] = previous
