"""Kernels that are Python functions, called back by ONNX Runtime: slow, for trying something out."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch.utils._pytree import tree_leaves

from sardonyx import dtypes
from sardonyx.customop.in_torch import bound, choice_of, sizes_of
from sardonyx.customop.shapes import ShapeRule
from sardonyx.customop.signature import Signature

_MOST_DIMS = 16


class _Array(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("ready", ctypes.c_bool),
        ("dims", ctypes.c_int64 * _MOST_DIMS),
    )


class _List(ctypes.Structure):
    _fields_ = (("values", ctypes.c_void_p), ("count", ctypes.c_int64))


class _Attribute(ctypes.Structure):
    _fields_ = (
        ("i", ctypes.c_int64),
        ("f", ctypes.c_double),
        ("length", ctypes.c_size_t),
        ("text", ctypes.c_void_p),
        ("ints", _List),
        ("floats", _List),
    )


class _Call(ctypes.Structure):
    _fields_ = (
        ("inputs", ctypes.POINTER(_Array)),
        ("variadic", ctypes.c_int64),
        ("outputs", ctypes.POINTER(_Array)),
        ("allocate", ctypes.c_void_p),
        ("allocates_for", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("runs_on", ctypes.c_void_p),
        ("run", ctypes.c_void_p),
    )


_CALLBACK = ctypes.CFUNCTYPE(
    None,
    ctypes.POINTER(_Call),
    ctypes.POINTER(ctypes.c_int),
    ctypes.POINTER(ctypes.c_int),
    ctypes.c_void_p,
    ctypes.c_size_t,
)


class PythonKernel:
    """A Python function as the kernel of an operator."""

    def __init__(self, signature: Signature, shapes: ShapeRule, function: Callable[..., Any]) -> None:
        self._signature, self._shapes, self._function = signature, shapes, function
        self._callback: Any = None

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """As torch calls it; what it gives is compared with the shape rule and the signature."""
        results = self._results(bound(self._signature, args, kwargs))
        return results[0] if len(results) == 1 else tuple(results)

    def serve(self, library: Path) -> None:
        """Let a library that was built for it call it."""
        loaded = ctypes.CDLL(str(library))
        loaded.sardonyx_give.restype = ctypes.c_char_p
        self._callback = _CALLBACK(lambda call, types, _, error, room: self._called(loaded, call, types, error, room))
        loaded.sardonyx_call_back(self._callback)  # the library has its address from now on

    def _results(self, given: dict[str, Any]) -> list[torch.Tensor]:
        signature = self._signature
        chosen, shapes = choice_of(signature, given), self._shapes(sizes_of(signature, given))
        result = self._function(**given)
        results = list(result) if isinstance(result, (tuple, list)) else [result]
        if len(results) != len(signature.outputs) or not all(isinstance(x, torch.Tensor) for x in results):
            raise RuntimeError(f"{signature.qualified}: its function does not give {len(signature.outputs)} tensors")
        for tensor, x, shape in zip(signature.outputs, results, shapes, strict=True):
            if len(shape) != x.dim() or any(dim not in (None, size) for dim, size in zip(shape, x.shape, strict=True)):
                expected = tuple("?" if dim is None else dim for dim in shape)
                raise RuntimeError(
                    f"{signature.qualified}: its function gives {tensor.name} the shape {tuple(x.shape)}, and the "
                    f"shape rule says {expected}"
                )
            dtype = signature.dtype_of(tensor, chosen)
            if x.dtype != dtype:
                raise RuntimeError(
                    f"{signature.qualified}: its function gives {tensor.name} in {x.dtype}, and the signature says "
                    f"{dtype}"
                )
        return _apart(results, [x for x in tree_leaves(given) if isinstance(x, torch.Tensor)])

    def _called(self, library: Any, call: Any, types: Any, error: int, room: int) -> None:
        try:
            with torch.no_grad():
                for i, result in enumerate(self._results(self._given(call.contents, types))):
                    _give(library, call, i, result)
        except BaseException as failed:
            said = f"{type(failed).__name__}: {failed}".removeprefix(f"RuntimeError: {self._signature.qualified}: ")
            text = said.encode()[: room - 1].decode(errors="ignore").encode() + b"\0"
            ctypes.memmove(error, text, len(text))

    def _given(self, call: _Call, types: Any) -> dict[str, Any]:
        given: dict[str, Any] = {}
        for i, tensor in enumerate(self._signature.inputs):
            if tensor.kind == "variadic":
                given[tensor.name] = [_tensor(call.inputs[i + k], types[i]) for k in range(call.variadic)]
            else:
                given[tensor.name] = _tensor(call.inputs[i], types[i])
        for i, attribute in enumerate(self._signature.attributes):
            given[attribute.name] = _READ[attribute.type](call.attributes[i])
        return given


def _apart(results: list[torch.Tensor], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Results in memory of their own, in order: an operator of torch must not give a part of what it was given."""
    taken = {x.untyped_storage()._cdata for x in inputs}
    made = []
    for x in results:
        x = x.contiguous()
        x = x.clone() if x.untyped_storage()._cdata in taken else x
        taken.add(x.untyped_storage()._cdata)
        made.append(x)
    return made


def _give(library: Any, call: Any, index: int, result: torch.Tensor) -> None:
    dims = (ctypes.c_int64 * max(result.dim(), 1))(*result.shape)
    size = ctypes.c_size_t(result.numel() * result.element_size())
    rank = ctypes.c_int64(result.dim())
    wrong = library.sardonyx_give(call, index, dims, rank, ctypes.c_void_p(result.data_ptr()), size)
    if wrong is not None:
        raise RuntimeError(wrong.decode())


def _tensor(array: _Array, kind: int) -> torch.Tensor | None:
    if array.rank < 0:
        return None
    dtype, shape = dtypes.to_torch(ir.DataType(kind)), tuple(array.dims[: array.rank])
    if not array.count:
        return torch.empty(shape, dtype=dtype)
    size = array.count * dtype.itemsize
    memory = (ctypes.c_uint8 * size).from_address(array.data)
    return torch.frombuffer(memory, dtype=dtype).view(shape).clone()


def _numbers(found: _List, kind: Any) -> Sequence[Any]:
    return list((kind * found.count).from_address(found.values)) if found.count else []


_READ: dict[str, Callable[[_Attribute], Any]] = {
    "int": lambda found: found.i,
    "bool": lambda found: bool(found.i),
    "float": lambda found: found.f,
    "str": lambda found: ctypes.string_at(found.text, found.length).decode() if found.length else "",
    "int[]": lambda found: _numbers(found.ints, ctypes.c_int64),
    "float[]": lambda found: _numbers(found.floats, ctypes.c_double),
}
