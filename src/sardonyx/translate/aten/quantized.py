"""Models that are quantized already: PT2E's `quantized_decomposed`, and products with weights in 8 bits.

Engines replace a product between DequantizeLinear and QuantizeLinear by one of integers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import onnx_ir as ir
import torch

from sardonyx import dtypes
from sardonyx.errors import Unsupported
from sardonyx.sizes import Dim, Dims
from sardonyx.translate.builder import Builder, Operand
from sardonyx.translate.table import aten, operator

Value = ir.Value

_CODES = frozenset({torch.int8, torch.uint8, torch.int16, torch.uint16})
"""The types that QuantizeLinear returns, of those that torch quantizes to."""


@dataclass(frozen=True)
class _Affine:
    """The parameters of x = scale · (code − zero point), for a tensor or for each place along an axis."""

    scale: Value
    zero_point: Value | None
    axis: int | None = None

    def quantize(self, g: Builder, x: Value, low: Operand, high: Operand, dtype: torch.dtype) -> Value:
        """Round to codes of `low` … `high`."""
        if dtype not in _CODES:
            raise Unsupported(f"ONNX does not quantize to {dtype}")
        x, to = g.cast(x, torch.float32), dtypes.to_onnx(dtype)
        codes = g.node("QuantizeLinear", [x, self.scale, self._zero_point(g, dtype)], dtype=to, axis=self.axis)
        g.shaped(codes, g.dims(x))
        info = torch.iinfo(dtype)
        if (low, high) == (info.min, info.max):
            return codes
        return g.Min(g.Max(codes, g.cast(low, dtype)), g.cast(high, dtype))

    def dequantize(self, g: Builder, codes: Value) -> Value:
        """Return scale · (codes − zero point) in float32."""
        dtype, dims = g.dtype(codes), g.dims(codes)
        if dtype in _CODES:
            inputs = [codes, self.scale, self._zero_point(g, dtype)]
            return g.shaped(g.node("DequantizeLinear", inputs, dtype=ir.DataType.FLOAT, axis=self.axis), dims)
        scale, zero_point = self._along(g, self.scale, dims), self.zero_point
        if zero_point is not None:
            codes = g.Sub(codes, self._along(g, g.cast(zero_point, dtype), dims))
        return g.Mul(g.cast(codes, torch.float32), scale)

    def _zero_point(self, g: Builder, dtype: torch.dtype) -> Value:
        """Return the zero point, which also tells QuantizeLinear its type."""
        if self.zero_point is not None:
            return g.cast(self.zero_point, dtype)
        return g.expand(g.scalar(0, dtype), g.dims(self.scale))

    def _along(self, g: Builder, x: Value, dims: Dims) -> Value:
        if self.axis is None:
            return x
        return g.unsqueeze(x, [axis for axis in range(len(dims)) if axis != self.axis])


def _scalar(g: Builder, x: Operand, dtype: torch.dtype) -> Value:
    """Return a number, or a tensor of one, as a scalar."""
    return g.reshape(g.cast(x, dtype), ())


def _per_tensor(g: Builder, scale: Operand, zero_point: Operand) -> _Affine:
    return _Affine(_scalar(g, scale, torch.float32), _scalar(g, zero_point, torch.int64))


def _per_axis(g: Builder, scales: Value, zero_points: Value | None, axis: int) -> _Affine:
    return _Affine(g.cast(scales, torch.float32), zero_points, axis)


def _bound(g: Builder, bound: Operand, dtype: torch.dtype) -> Operand:
    return _scalar(g, bound, dtype) if isinstance(bound, Value) else bound


@operator(*(f"quantized_decomposed::quantize_per_tensor{overload}" for overload in ("", ".tensor", ".tensor2")))
def quantize_per_tensor(
    g: Builder, x: Value, scale: Operand, zero_point: Operand, low: Operand, high: Operand, dtype: torch.dtype
) -> Value:
    low, high = (_bound(g, bound, dtype) for bound in (low, high))
    return _per_tensor(g, scale, zero_point).quantize(g, x, low, high, dtype)


@operator(*(f"quantized_decomposed::dequantize_per_tensor{overload}" for overload in ("", ".tensor", ".tensor2")))
def dequantize_per_tensor(
    g: Builder,
    codes: Value,
    scale: Operand,
    zero_point: Operand,
    low: Operand,
    high: Operand,
    dtype: torch.dtype,
    out_dtype: torch.dtype | None = None,
) -> Value:
    return g.cast(_per_tensor(g, scale, zero_point).dequantize(g, codes), g.out.dtype)


@operator("quantized_decomposed::quantize_per_channel")
def quantize_per_channel(
    g: Builder, x: Value, scales: Value, zero_points: Value, axis: int, low: int, high: int, dtype: torch.dtype
) -> Value:
    return _per_axis(g, scales, zero_points, g.axis(x, axis)).quantize(g, x, low, high, dtype)


@operator("quantized_decomposed::dequantize_per_channel")
def dequantize_per_channel(
    g: Builder,
    codes: Value,
    scales: Value,
    zero_points: Value | None,
    axis: int,
    low: int,
    high: int,
    dtype: torch.dtype,
    out_dtype: torch.dtype | None = None,
) -> Value:
    return g.cast(_per_axis(g, scales, zero_points, g.axis(codes, axis)).dequantize(g, codes), g.out.dtype)


# Rows, as of tokens, and groups of a row's numbers, which are rows of a longer matrix


def _as_rows(g: Builder, x: Value, groups: int) -> Value:
    """Return a matrix whose rows are those of `x`, each divided into this many."""
    *outer, size = g.dims(x)
    return g.reshape(x, (math.prod(outer) * groups, size if groups == 1 else _divided(size, groups)))


def _divided(size: Dim, groups: int) -> int:
    if not isinstance(size, int):
        raise Unsupported("groups of a symbolic size")
    return size // groups


def _per_row(g: Builder, scales: Value, zero_points: Value | None) -> _Affine:
    flat = [None if x is None else g.reshape(x, (math.prod(g.dims(x)),)) for x in (scales, zero_points)]
    assert flat[0] is not None
    return _per_axis(g, flat[0], flat[1], 0)


def _quantize_rows(
    g: Builder, x: Value, parameters: _Affine, low: int, high: int, dtype: torch.dtype, groups: int = 1
) -> Value:
    return g.reshape(parameters.quantize(g, _as_rows(g, x, groups), low, high, dtype), g.dims(x))


def _dequantize_rows(g: Builder, codes: Value, parameters: _Affine, groups: int = 1) -> Value:
    rows = parameters.dequantize(g, _as_rows(g, codes, groups))
    return g.cast(g.reshape(rows, g.dims(codes)), g.out.dtype)


@operator("quantized_decomposed::quantize_per_token")
def quantize_per_token(
    g: Builder, x: Value, scales: Value, zero_points: Value, low: int, high: int, dtype: torch.dtype
) -> Value:
    return _quantize_rows(g, x, _per_row(g, scales, zero_points), low, high, dtype)


@operator("quantized_decomposed::dequantize_per_token")
def dequantize_per_token(
    g: Builder,
    codes: Value,
    scales: Value,
    zero_points: Value,
    low: int,
    high: int,
    dtype: torch.dtype,
    output_dtype: torch.dtype,
) -> Value:
    return _dequantize_rows(g, codes, _per_row(g, scales, zero_points))


def _groups(g: Builder, x: Value, group_size: int) -> int:
    """Return the number of groups in a row; a row that is shorter than a group is one."""
    return max(_divided(g.dims(x)[-1], group_size), 1)


@operator("quantized_decomposed::quantize_per_channel_group")
def quantize_per_channel_group(
    g: Builder,
    x: Value,
    scales: Value,
    zero_points: Value,
    low: int,
    high: int,
    dtype: torch.dtype,
    group_size: int = 128,
) -> Value:
    parameters = _per_row(g, scales, zero_points)
    return _quantize_rows(g, x, parameters, low, high, dtype, _groups(g, x, group_size))


@operator("quantized_decomposed::dequantize_per_channel_group")
def dequantize_per_channel_group(
    g: Builder,
    codes: Value,
    scales: Value,
    zero_points: Value | None,
    low: int,
    high: int,
    dtype: torch.dtype,
    group_size: int = 128,
    output_dtype: torch.dtype = torch.float32,
) -> Value:
    return _dequantize_rows(g, codes, _per_row(g, scales, zero_points), _groups(g, codes, group_size))


# Parameters that are chosen in each call


def _range(g: Builder, x: Value, axes: Sequence[int] | None) -> tuple[Value, Value]:
    """Return the smallest and the largest number, or zero where that is beyond them."""
    zero, over = g.scalar(0, g.dtype(x)), None if axes is None else g.ints(axes)
    lowest, highest = (g.node(f"Reduce{end}", [x, over], keepdims=int(axes is not None)) for end in ("Min", "Max"))
    return g.Min(lowest, zero), g.Max(highest, zero)


def _results(g: Builder, scale: Value, zero_point: Value) -> tuple[Value, Value]:
    """Return the parameters as torch's operator does, in double precision and 64 bits."""
    scales, zero_points = g.out
    dims = g.like(scales)
    return g.cast(g.reshape(scale, dims), scales.dtype), g.cast(g.reshape(zero_point, dims), zero_points.dtype)


@operator("quantized_decomposed::choose_qparams.tensor")
def choose_qparams(g: Builder, x: Value, low: int, high: int, eps: float, dtype: torch.dtype) -> tuple[Value, Value]:
    """scale = (max − min) / (high − low), zero point = low − round(min / scale)."""
    lowest, highest = _range(g, x, None)
    scale = g.Div(g.Sub(highest, lowest), g.scalar(high - low, g.dtype(x)))
    scale = g.Max(g.cast(scale, torch.float32), g.scalar(eps, torch.float32))
    zero_point = g.Sub(g.scalar(low, torch.float32), g.Round(g.Div(g.cast(lowest, torch.float32), scale)))
    zero_point = g.Clip(zero_point, g.scalar(low, torch.float32), g.scalar(high, torch.float32))
    return _results(g, scale, zero_point)


@operator("quantized_decomposed::choose_qparams_symmetric.tensor")
def choose_qparams_symmetric(
    g: Builder, x: Value, low: int, high: int, eps: float, dtype: torch.dtype
) -> tuple[Value, Value]:
    """scale = 2 · max |x| / (high − low); the zero point is in the middle of the type."""
    lowest, highest = _range(g, x, None)
    scale = g.Div(g.Max(g.Neg(lowest), highest), g.scalar((high - low) / 2, g.dtype(x)))
    scale = g.Max(g.cast(scale, torch.float32), g.scalar(eps, torch.float32))
    return _results(g, scale, g.scalar(128 if dtype == torch.uint8 else 0, torch.int64))


@operator("quantized_decomposed::choose_qparams_per_token")
def choose_qparams_per_token(g: Builder, x: Value, dtype: torch.dtype) -> tuple[Value, Value]:
    """scale = max |x| / 127 of each row, and zero points of zero."""
    x = g.cast(x, torch.float32) if g.dtype(x) == torch.float16 else x
    largest = g.node("ReduceMax", [g.Abs(x), g.ints([g.rank(x) - 1])], keepdims=1)
    scale = g.Div(g.Max(largest, g.scalar(1e-5, g.dtype(x))), g.scalar(127, g.dtype(x)))
    return _results(g, scale, g.expand(g.scalar(0, torch.int64), g.like(g.out[0])))


@operator("quantized_decomposed::choose_qparams_per_token_asymmetric")
def choose_qparams_per_token_asymmetric(g: Builder, x: Value, dtype: torch.dtype) -> tuple[Value, Value]:
    """Parameters of each row; the zero point is that of the end whose rounding error is smaller."""
    number = partial(g.scalar, dtype=g.dtype(x))
    lowest, highest = _range(g, x, [g.rank(x) - 1])
    scale = g.Max(g.Div(g.Sub(highest, lowest), number(255)), number(torch.finfo(torch.float32).eps))
    below, above = g.Div(lowest, scale), g.Div(highest, scale)
    from_lowest = g.Greater(g.Add(g.Add(number(-128), below), g.Add(number(127), above)), number(0))
    zero_point = g.Where(from_lowest, g.Sub(number(-128), below), g.Sub(number(127), above))
    return _results(g, scale, g.Round(g.Clip(zero_point, number(-128), number(127))))


@operator("quantized_decomposed::convert_element_type.no_fuse")
def convert_element_type(g: Builder, x: Value, dtype: torch.dtype) -> Value:
    return g.cast(x, dtype)


# Products of integers, and with weights of 8 bits


@aten("_int_mm")
def int_mm(g: Builder, x: Value, weight: Value) -> Value:
    if 0 in g.dims(x):  # ONNX Runtime leaves an empty sum uninitialized
        return g.expand(g.scalar(0, torch.int32), g.like(g.out))
    return g.node("MatMulInteger", [x, weight], dtype=ir.DataType.INT32)


@aten("_weight_int8pack_mm")
def weight_int8pack_mm(g: Builder, x: Value, weight: Value, scales: Value) -> Value:
    """Multiply by the rows of a weight in int8, each of which has a scale."""
    columns = g.transpose(weight, [1, 0])
    return g.cast(g.MatMul(g.cast(x, torch.float32), _per_axis(g, scales, None, 1).dequantize(g, columns)), g.out.dtype)
