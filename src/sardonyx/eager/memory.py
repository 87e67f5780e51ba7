"""Views of one memory as tensors of the CPU and of the device `ort`, which uses host memory.

DLPack passes a tensor between the two: only the device in its descriptor changes. The core does this in C++.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch._C import _from_dlpack as from_dlpack
from torch._C import _to_dlpack as to_dlpack

from sardonyx.engines.ortvalue import binding

DEVICE = "ort"

_CPU, _EXTENSION = 1, 12  # DLDeviceType; torch maps kDLExtDev to PrivateUse1

_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype = ctypes.c_void_p
_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


class _DLManagedTensor(ctypes.Structure):
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


_UNSIGNED, _BOOLEAN = 1, 6  # DLDataTypeCode; ONNX Runtime exports booleans as uint8


def with_device(capsule: Any, device: int, index: int = 0) -> Any:
    """Set the device of a DLPack capsule's tensor."""
    tensor = _DLManagedTensor.from_address(_pointer(capsule, b"dltensor"))
    tensor.device, tensor.index = device, index
    return capsule


class _Core:
    loaded = False


def use_core() -> None:
    """Let the core create views from now on."""
    _Core.loaded = True


def on_device(tensor: torch.Tensor, index: int = 0) -> torch.Tensor:
    """Return a device tensor over the memory of a CPU tensor."""
    if _Core.loaded:
        view: torch.Tensor = torch.ops.sardonyx_eager.device(tensor, index)
        return view
    return _via_dlpack(tensor, _EXTENSION, index)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor over the memory of a device tensor."""
    if _Core.loaded:
        view: torch.Tensor = torch.ops.sardonyx_eager.host(tensor)
        return view
    return _via_dlpack(tensor, _CPU, 0)


def _via_dlpack(tensor: torch.Tensor, device: int, index: int) -> torch.Tensor:
    """Return a view on another device; conjugate and negative bits, which DLPack lacks, are set again."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_conj():
        return _via_dlpack(tensor.conj(), device, index).conj()
    if tensor.is_neg():
        return torch._neg_view(_via_dlpack(torch._neg_view(tensor), device, index))
    view: torch.Tensor = from_dlpack(with_device(to_dlpack(tensor), device, index))
    return view


_libc = ctypes.CDLL(None)
_libc.malloc.restype = ctypes.c_void_p
_libc.malloc.argtypes = [ctypes.c_size_t]
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


def ort_value_view(tensor: torch.Tensor) -> Any:
    """Return an OrtValue over a tensor's memory, without a reference: valid while the tensor lives."""
    capsule = to_dlpack(tensor)
    code = _DLManagedTensor.from_address(_pointer(capsule, b"dltensor")).code
    address = _libc.malloc(ctypes.sizeof(_DLManagedTensor) + 8 * tensor.dim())
    block = _DLManagedTensor.from_address(address)
    ctypes.memset(address, 0, ctypes.sizeof(_DLManagedTensor))
    block.data, block.device, block.rank = tensor.data_ptr(), _CPU, tensor.dim()
    block.code, block.bits, block.lanes = _UNSIGNED if code == _BOOLEAN else code, 8 * tensor.element_size(), 1
    block.sizes = address + ctypes.sizeof(_DLManagedTensor)
    (ctypes.c_int64 * tensor.dim()).from_address(block.sizes)[:] = list(tensor.shape)
    block.deleter = ctypes.cast(_libc.free, ctypes.c_void_p).value
    return binding().OrtValue.from_dlpack(_new_capsule(address, b"dltensor", None), code == _BOOLEAN)


def from_ort(capsule: Any, boolean: bool, index: int = 0) -> torch.Tensor:
    """Return a device tensor over memory that ONNX Runtime returned."""
    tensor = _DLManagedTensor.from_address(_pointer(capsule, b"dltensor"))
    tensor.device, tensor.index = _EXTENSION, index
    if boolean:
        tensor.code = _BOOLEAN
    result: torch.Tensor = from_dlpack(capsule)
    return result


def is_on_device(value: Any) -> bool:
    """Return whether a value is a device tensor."""
    return isinstance(value, torch.Tensor) and value.device.type == DEVICE
