"""The mapping between torch and ONNX dtypes."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
import torch

from sardonyx.errors import Unsupported

_ONNX_OF_TORCH: dict[torch.dtype, ir.DataType] = {
    torch.float32: ir.DataType.FLOAT,
    torch.float64: ir.DataType.DOUBLE,
    torch.float16: ir.DataType.FLOAT16,
    torch.bfloat16: ir.DataType.BFLOAT16,
    torch.int8: ir.DataType.INT8,
    torch.int16: ir.DataType.INT16,
    torch.int32: ir.DataType.INT32,
    torch.int64: ir.DataType.INT64,
    torch.uint8: ir.DataType.UINT8,
    torch.uint16: ir.DataType.UINT16,
    torch.uint32: ir.DataType.UINT32,
    torch.uint64: ir.DataType.UINT64,
    torch.bool: ir.DataType.BOOL,
}
_TORCH_OF_ONNX = {onnx: torch_ for torch_, onnx in _ONNX_OF_TORCH.items()}
_ONNX_OF_TORCH |= {
    torch.complex64: ir.DataType.FLOAT,
    torch.complex128: ir.DataType.DOUBLE,
}  # as pairs


def to_onnx(dtype: torch.dtype) -> ir.DataType:
    """Return the ONNX dtype that stores `dtype`.

    >>> to_onnx(torch.float16)
    FLOAT16
    """
    try:
        return _ONNX_OF_TORCH[dtype]
    except KeyError:
        raise Unsupported(f"ONNX has no tensors of dtype {dtype}") from None


def is_known(dtype: torch.dtype) -> bool:
    """Whether ONNX has tensors that can store this dtype."""
    return dtype in _ONNX_OF_TORCH


def to_torch(dtype: ir.DataType) -> torch.dtype:
    """Return the torch dtype that the ONNX dtype `dtype` stores."""
    return _TORCH_OF_ONNX[dtype]


def is_integer(dtype: torch.dtype) -> bool:
    """Whether it is an integer dtype; bool is not."""
    return not dtype.is_floating_point and not dtype.is_complex and dtype != torch.bool


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which torch accumulates sums: float32 for half precision."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def to_array(tensor: torch.Tensor) -> np.ndarray:
    """Return a numpy array over the tensor's memory; dtypes that numpy lacks are those of ml_dtypes."""
    tensor = tensor.detach().contiguous().resolve_conj().resolve_neg()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(ir.DataType.BFLOAT16.numpy())
    return tensor.numpy()


def fits_attribute(number: float) -> bool:
    """Whether an attribute of ONNX, a float32, can hold a number."""
    return not math.isfinite(number) or abs(number) <= torch.finfo(torch.float32).max
