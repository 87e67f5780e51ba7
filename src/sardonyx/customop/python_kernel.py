"""Kernels in Python, called back by ONNX Runtime: slow, for prototypes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch.utils._pytree import tree_leaves

from sardonyx import dtypes
from sardonyx.customop.shapes import ShapeRule
from sardonyx.customop.signature import Signature
from sardonyx.customop.torch_registration import bind_arguments, resolve_dtypes, sizes_of

_MAX_RANK = 16


class _CArray(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("ready", ctypes.c_bool),
        ("dims", ctypes.c_int64 * _MAX_RANK),
    )


class _CList(ctypes.Structure):
    _fields_ = (("values", ctypes.c_void_p), ("count", ctypes.c_int64))


class _CAttribute(ctypes.Structure):
    _fields_ = (
        ("i", ctypes.c_int64),
        ("f", ctypes.c_double),
        ("length", ctypes.c_size_t),
        ("text", ctypes.c_void_p),
        ("ints", _CList),
        ("floats", _CList),
    )


class _CCall(ctypes.Structure):
    _fields_ = (
        ("inputs", ctypes.POINTER(_CArray)),
        ("variadic", ctypes.c_int64),
        ("outputs", ctypes.POINTER(_CArray)),
        ("allocate", ctypes.c_void_p),
        ("allocates_for", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_CAttribute)),
        ("runs_on", ctypes.c_void_p),
        ("run", ctypes.c_void_p),
    )


_CALLBACK = ctypes.CFUNCTYPE(
    None,
    ctypes.POINTER(_CCall),
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
        """Run as torch's kernel; results are checked against the shape rule and the signature."""
        results = self._results(bind_arguments(self._signature, args, kwargs))
        return results[0] if len(results) == 1 else tuple(results)

    def serve(self, library: Path) -> None:
        """Register the function as the callback of a library."""
        loaded = ctypes.CDLL(str(library))
        loaded.sardonyx_set_output.restype = ctypes.c_char_p
        self._callback = _CALLBACK(lambda call, types, _, error, room: self._on_call(loaded, call, types, error, room))
        loaded.sardonyx_set_callback(self._callback)  # the library keeps its address

    def _results(self, arguments: dict[str, Any]) -> list[torch.Tensor]:
        signature = self._signature
        choice, shapes = resolve_dtypes(signature, arguments), self._shapes(sizes_of(signature, arguments))
        result = self._function(**arguments)
        results = list(result) if isinstance(result, (tuple, list)) else [result]
        if len(results) != len(signature.outputs) or not all(isinstance(x, torch.Tensor) for x in results):
            raise RuntimeError(f"{signature.qualified}: its function does not return {len(signature.outputs)} tensors")
        for tensor, x, shape in zip(signature.outputs, results, shapes, strict=True):
            if len(shape) != x.dim() or any(dim not in (None, size) for dim, size in zip(shape, x.shape, strict=True)):
                expected = tuple("?" if dim is None else dim for dim in shape)
                raise RuntimeError(
                    f"{signature.qualified}: its function returns {tensor.name} with shape {tuple(x.shape)}, and the "
                    f"shape rule says {expected}"
                )
            dtype = signature.dtype_of(tensor, choice)
            if x.dtype != dtype:
                raise RuntimeError(
                    f"{signature.qualified}: its function returns {tensor.name} as {x.dtype}, and the signature says "
                    f"{dtype}"
                )
        return _unaliased(results, [x for x in tree_leaves(arguments) if isinstance(x, torch.Tensor)])

    def _on_call(self, library: Any, call: Any, types: Any, error: int, room: int) -> None:
        try:
            with torch.no_grad():
                for i, result in enumerate(self._results(self._read_arguments(call.contents, types))):
                    _set_output(library, call, i, result)
        except BaseException as failed:
            message = f"{type(failed).__name__}: {failed}".removeprefix(f"RuntimeError: {self._signature.qualified}: ")
            text = message.encode()[: room - 1].decode(errors="ignore").encode() + b"\0"
            ctypes.memmove(error, text, len(text))

    def _read_arguments(self, call: _CCall, types: Any) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        for i, tensor in enumerate(self._signature.inputs):
            if tensor.kind == "variadic":
                arguments[tensor.name] = [_tensor(call.inputs[i + k], types[i]) for k in range(call.variadic)]
            else:
                arguments[tensor.name] = _tensor(call.inputs[i], types[i])
        for i, attribute in enumerate(self._signature.attributes):
            arguments[attribute.name] = _ATTRIBUTE_READERS[attribute.type](call.attributes[i])
        return arguments


def _unaliased(results: list[torch.Tensor], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return contiguous results in memory of their own: a torch operator must not return its inputs."""
    used = {x.untyped_storage()._cdata for x in inputs}
    unaliased = []
    for x in results:
        x = x.contiguous()
        x = x.clone() if x.untyped_storage()._cdata in used else x
        used.add(x.untyped_storage()._cdata)
        unaliased.append(x)
    return unaliased


def _set_output(library: Any, call: Any, index: int, result: torch.Tensor) -> None:
    dims = (ctypes.c_int64 * max(result.dim(), 1))(*result.shape)
    size = ctypes.c_size_t(result.numel() * result.element_size())
    rank = ctypes.c_int64(result.dim())
    error = library.sardonyx_set_output(call, index, dims, rank, ctypes.c_void_p(result.data_ptr()), size)
    if error is not None:
        raise RuntimeError(error.decode())


def _tensor(array: _CArray, kind: int) -> torch.Tensor | None:
    if array.rank < 0:
        return None
    dtype, shape = dtypes.to_torch(ir.DataType(kind)), tuple(array.dims[: array.rank])
    if not array.count:
        return torch.empty(shape, dtype=dtype)
    size = array.count * dtype.itemsize
    memory = (ctypes.c_uint8 * size).from_address(array.data)
    return torch.frombuffer(memory, dtype=dtype).view(shape).clone()


def _read_list(values: _CList, ctype: Any) -> Sequence[Any]:
    return list((ctype * values.count).from_address(values.values)) if values.count else []


_ATTRIBUTE_READERS: dict[str, Callable[[_CAttribute], Any]] = {
    "int": lambda attribute: attribute.i,
    "bool": lambda attribute: bool(attribute.i),
    "float": lambda attribute: attribute.f,
    "str": lambda attribute: ctypes.string_at(attribute.text, attribute.length).decode() if attribute.length else "",
    "int[]": lambda attribute: _read_list(attribute.ints, ctypes.c_int64),
    "float[]": lambda attribute: _read_list(attribute.floats, ctypes.c_double),
}
