"""torch tensors as ONNX Runtime values and back, sharing memory."""

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
    """ONNX Runtime's C binding: its raw value class costs a sixth of the Python one around it."""
    from onnxruntime.capi import _pybind_state

    return _pybind_state


def from_torch(x: torch.Tensor | int) -> Any:
    """A value over a tensor's memory, or over a copy where its elements do not lie there in order; of an integer, one.

    DLPack keeps the memory alive as long as the value.
    """
    if isinstance(x, int):
        x = torch.tensor([x])
    x = contiguous(x)
    if not x.numel():
        return _empty(x)
    if x.dtype == torch.bool:  # torch's DLPack has a code for booleans, ONNX Runtime's takes them as bytes
        return binding().OrtValue.from_dlpack(to_dlpack(x.view(torch.uint8)), True)
    return binding().OrtValue.from_dlpack(to_dlpack(x), False)


def _empty(tensor: torch.Tensor) -> Any:
    # DLPack cannot carry an empty tensor into ONNX Runtime.
    onnx = int(dtypes.to_onnx(tensor.dtype))
    return binding().OrtValue.ortvalue_from_shape_and_onnx_type(list(tensor.shape), onnx, _cpu())


@cache
def _cpu() -> Any:
    c = binding()
    return c.OrtDevice(c.OrtDevice.cpu(), c.OrtDevice.default_memory(), 0)


def device_of(device: torch.device) -> Any:
    """ONNX Runtime's name for a torch device."""
    if device.type == "cpu":
        return _cpu()
    c = binding()
    return c.OrtDevice(c.OrtDevice.cuda(), c.OrtDevice.default_memory(), device.index or 0)


def reader(dtype: torch.dtype, device: torch.device) -> Callable[[Any, int], torch.Tensor]:
    """A function that takes the value at an index of a vector over to torch, without a copy."""

    def read(vector: Any, index: int) -> torch.Tensor:
        try:
            tensor = from_dlpack(vector.dlpack_at(index))
        except RuntimeError:
            return _read_empty(vector[index], dtype, device)
        return tensor.view(torch.bool) if is_bool else tensor  # DLPack carries booleans as bytes

    is_bool = dtype == torch.bool
    return read


def _read_empty(value: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor without elements, which DLPack does not carry."""
    shape = value.shape()
    if 0 not in shape:
        raise RuntimeError(f"ONNX Runtime's output of shape {shape} cannot be taken over by torch")
    return torch.empty(shape, dtype=dtype, device=device)
