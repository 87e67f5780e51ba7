"""One memory under two names: what lies on the device `ort` is ordinary memory, which the CPU can see too.

DLPack carries a tensor from one to the other: its description says on which device it is, and that is changed. The core
in C++ does the same without it.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch._C import _from_dlpack as from_dlpack
from torch._C import _to_dlpack as to_dlpack

from sardonyx.engines.ortvalue import binding

DEVICE = "ort"

_CPU, _EXTENSION = 1, 12  # as DLPack numbers devices; torch takes the second for its own kind, PrivateUse1

_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype = ctypes.c_void_p
_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


class _Described(ctypes.Structure):
    """How DLPack describes a tensor, and who frees the description."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32),
        ("index", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("sizes", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_UNSIGNED, _BOOLEAN = 1, 6  # the codes of dtypes; ONNX Runtime has booleans as bytes


def renamed(capsule: Any, device: int, index: int = 0) -> Any:
    """A DLPack capsule whose tensor is said to be on another device."""
    described = _Described.from_address(_pointer(capsule, b"dltensor"))
    described.device, described.index = device, index
    return capsule


class _Core:
    """Whether the core has been loaded."""

    loaded = False


def by_the_core() -> None:
    """Leave the renaming of memory to the core from now on."""
    _Core.loaded = True


def on_device(tensor: torch.Tensor, index: int = 0) -> torch.Tensor:
    """A tensor of the device over the memory of one of the CPU's."""
    if _Core.loaded:
        made: torch.Tensor = torch.ops.sardonyx_eager.device(tensor, index)
        return made
    return _elsewhere(tensor, _EXTENSION, index)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the CPU's over the memory of one of the device."""
    if _Core.loaded:
        made: torch.Tensor = torch.ops.sardonyx_eager.host(tensor)
        return made
    return _elsewhere(tensor, _CPU, 0)


def _elsewhere(tensor: torch.Tensor, device: int, index: int) -> torch.Tensor:
    """DLPack cannot say that elements are conjugate or of the other sign: what is read that way here is there too."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_conj():
        return _elsewhere(tensor.conj(), device, index).conj()
    if tensor.is_neg():
        return torch._neg_view(_elsewhere(torch._neg_view(tensor), device, index))
    made: torch.Tensor = from_dlpack(renamed(to_dlpack(tensor), device, index))
    return made


_libc = ctypes.CDLL(None)
_libc.malloc.restype = ctypes.c_void_p
_libc.malloc.argtypes = [ctypes.c_size_t]
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


def value_over(tensor: torch.Tensor) -> Any:
    """A value of ONNX Runtime's over a tensor's memory that does not keep it: for as long as a tensor is there."""
    capsule = to_dlpack(tensor)
    code = _Described.from_address(_pointer(capsule, b"dltensor")).code
    place = _libc.malloc(ctypes.sizeof(_Described) + 8 * tensor.dim())
    block = _Described.from_address(place)
    ctypes.memset(place, 0, ctypes.sizeof(_Described))
    block.data, block.device, block.rank = tensor.data_ptr(), _CPU, tensor.dim()
    block.code, block.bits, block.lanes = _UNSIGNED if code == _BOOLEAN else code, 8 * tensor.element_size(), 1
    block.sizes = place + ctypes.sizeof(_Described)
    (ctypes.c_int64 * tensor.dim()).from_address(block.sizes)[:] = list(tensor.shape)
    block.deleter = ctypes.cast(_libc.free, ctypes.c_void_p).value
    return binding().OrtValue.from_dlpack(_new_capsule(place, b"dltensor", None), code == _BOOLEAN)


def from_runtime(capsule: Any, boolean: bool, index: int = 0) -> torch.Tensor:
    """A tensor of the device over memory that ONNX Runtime gave."""
    described = _Described.from_address(_pointer(capsule, b"dltensor"))
    described.device, described.index = _EXTENSION, index
    if boolean:
        described.code = _BOOLEAN
    made: torch.Tensor = from_dlpack(capsule)
    return made


def is_on_device(value: Any) -> bool:
    """Whether something is a tensor of the device."""
    return isinstance(value, torch.Tensor) and value.device.type == DEVICE
