"""One memory under two names: what lies on the device `ort` is ordinary memory, which the CPU can see too.

DLPack carries a tensor from one to the other: its description says on which device it is, and that is changed.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch._C import _from_dlpack as from_dlpack
from torch._C import _to_dlpack as to_dlpack

from sardonyx.run.ortvalue import binding

DEVICE = "ort"

_CPU, _EXTENSION = 1, 12  # as DLPack numbers devices; torch takes the second for its own kind, PrivateUse1

_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype = ctypes.c_void_p
_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


class _Described(ctypes.Structure):
    """How DLPack describes a tensor, as far as it is changed here."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32),
        ("index", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("code", ctypes.c_uint8),
    )


_UNSIGNED, _BOOLEAN = 1, 6  # the codes of dtypes; ONNX Runtime has booleans as bytes


def renamed(capsule: Any, device: int, index: int = 0) -> Any:
    """A DLPack capsule whose tensor is said to be on another device."""
    described = _Described.from_address(_pointer(capsule, b"dltensor"))
    described.device, described.index = device, index
    return capsule


def on_device(tensor: torch.Tensor, index: int = 0) -> torch.Tensor:
    """A tensor of the device over the memory of one of the CPU's."""
    return _elsewhere(tensor, _EXTENSION, index)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the CPU's over the memory of one of the device."""
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


def to_runtime(tensor: torch.Tensor) -> Any:
    """A tensor of the device as a value of ONNX Runtime's, over the same memory."""
    capsule = to_dlpack(tensor)
    described = _Described.from_address(_pointer(capsule, b"dltensor"))
    described.device, described.index = _CPU, 0
    if described.code != _BOOLEAN:
        return binding().OrtValue.from_dlpack(capsule, False)
    described.code = _UNSIGNED
    return binding().OrtValue.from_dlpack(capsule, True)


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
