"""Convert torch tensors to ONNX Runtime values and back, sharing memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch._C import _from_dlpack as from_dlpack
from torch._C import _to_dlpack as to_dlpack

from sardonyx import dtypes
from sardonyx.engines.contiguous import contiguous


@cache
def binding() -> Any:
    """Return ONNX Runtime's C binding, whose OrtValue costs a sixth of the Python class around it."""
    from onnxruntime.capi import _pybind_state

    return _pybind_state


def from_torch(x: torch.Tensor | int) -> Any:
    """Return an OrtValue that shares a tensor's memory, or that of a contiguous copy; an integer becomes a tensor.

    DLPack keeps the memory alive as long as the value.
    """
    if isinstance(x, int):
        x = torch.tensor([x])
    x = contiguous(x)
    if not x.numel():
        return _empty(x)
    if x.dtype == torch.bool:  # ONNX Runtime does not support DLPack's boolean type
        return binding().OrtValue.from_dlpack(to_dlpack(x.view(torch.uint8)), True)
    return binding().OrtValue.from_dlpack(to_dlpack(x), False)


def _empty(tensor: torch.Tensor) -> Any:
    # ONNX Runtime does not accept empty tensors by DLPack.
    onnx = int(dtypes.to_onnx(tensor.dtype))
    return binding().OrtValue.ortvalue_from_shape_and_onnx_type(list(tensor.shape), onnx, _cpu())


@cache
def _cpu() -> Any:
    c = binding()
    return c.OrtDevice(c.OrtDevice.cpu(), c.OrtDevice.default_memory(), 0)


def device_of(device: torch.device) -> Any:
    """Return the OrtDevice of a torch device."""
    if device.type == "cpu":
        return _cpu()
    c = binding()
    return c.OrtDevice(c.OrtDevice.cuda(), c.OrtDevice.default_memory(), device.index or 0)


def reader(dtype: torch.dtype, device: torch.device) -> Callable[[Any, int], torch.Tensor]:
    """Return a function that converts the value at an index of a vector to torch, without a copy."""

    def read(vector: Any, index: int) -> torch.Tensor:
        try:
            tensor = from_dlpack(vector.dlpack_at(index))
        except RuntimeError:
            return _read_empty(vector[index], dtype, device)
        return tensor.view(torch.bool) if is_bool else tensor  # booleans arrive as bytes

    is_bool = dtype == torch.bool
    return read


def _read_empty(value: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return an empty tensor of the value's shape, which DLPack does not support."""
    shape = value.shape()
    if 0 not in shape:
        raise RuntimeError(f"torch cannot import ONNX Runtime's output of shape {shape} by DLPack")
    return torch.empty(shape, dtype=dtype, device=device)
