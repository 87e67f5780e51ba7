"""Creation of tensors."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import sympy
import torch

from sardonyx import dtypes
from sardonyx.errors import Unsupported
from sardonyx.sizes import Dim
from sardonyx.translate.aten.indexing import positions
from sardonyx.translate.builder import Builder, Operand
from sardonyx.translate.table import aten, prims

Value = ir.Value


def _filled(g: Builder, value: Operand) -> Value:
    return g.expand(g.scalar(value, g.out.dtype), g.like(g.out))


@aten("full", "new_full")
def full(g: Builder, *args: Any, **ignored: Any) -> Value:
    return _filled(g, args[-1])


@aten("full_like")
def full_like(g: Builder, x: Value, value: Operand, **ignored: Any) -> Value:
    return _filled(g, value)


@aten("zeros", "zeros_like", "new_zeros", "empty.memory_format", "empty_like", "new_empty", "empty_strided")
@aten("new_empty_strided", "empty_permuted")
def zeros(g: Builder, *args: Any, **ignored: Any) -> Value:
    return _filled(g, 0)


@aten("ones", "ones_like", "new_ones")
def ones(g: Builder, *args: Any, **ignored: Any) -> Value:
    return _filled(g, 1)


@aten("scalar_tensor")
def scalar_tensor(g: Builder, value: Operand, **ignored: Any) -> Value:
    return g.scalar(value, g.out.dtype)


@aten("fill.Scalar", "fill.Tensor")
def fill(g: Builder, x: Value, value: Operand) -> Value:
    return _filled(g, value)


@aten("arange.start_step")
def arange_start_step(g: Builder, start: Operand, end: Operand, step: Operand = 1, **ignored: Any) -> Value:
    numbers = (start, end, step)
    if not any(isinstance(number, sympy.Expr) for number in numbers):
        return _constant_range(g, *numbers)
    if any(isinstance(number, float) for number in numbers):
        return g.cast(g.Range(*(g.scalar(number, torch.float64) for number in numbers)), g.out.dtype)
    places = positions(g, g.like(g.out)[0])  # engines compute the length in double precision, so it starts at 0
    first, by = (g.scalar(number, torch.int64) for number in (start, step))
    return g.cast(g.Add(first, g.Mul(by, places)) if (start, step) != (0, 1) else places, g.out.dtype)


def _constant_range(g: Builder, start: Any, end: Any, step: Any) -> Value:
    values = torch.arange(start, end, step, dtype=g.out.dtype)
    return g.constant(dtypes.to_array(values), dtypes.to_onnx(values.dtype))


@aten("arange.start")
def arange_start(g: Builder, start: Operand, end: Operand, **ignored: Any) -> Value:
    return arange_start_step(g, start, end)


@aten("arange")
def arange(g: Builder, end: Operand, **ignored: Any) -> Value:
    return arange_start_step(g, 0, end)


@prims("iota")
def iota(g: Builder, length: Dim, *, start: Dim, step: Dim, **ignored: Any) -> Value:
    return arange_start_step(g, start, start + length * step, step)


@aten("eye", "eye.m")
def eye(g: Builder, n: Dim, m: Dim | None = None, **ignored: Any) -> Value:
    base = g.expand(g.scalar(0, g.out.dtype), g.like(g.out))
    return g.EyeLike(base)


@aten("linspace")
def linspace(g: Builder, start: Any, end: Any, steps: Any, **ignored: Any) -> Value:
    if not all(isinstance(number, (int, float)) for number in (start, end, steps)):
        raise Unsupported("linspace of symbolic numbers")
    values = torch.linspace(start, end, steps, dtype=g.out.dtype)
    return g.constant(dtypes.to_array(values), dtypes.to_onnx(values.dtype))


@aten("linspace.Tensor_Tensor", "linspace.Tensor_Scalar", "linspace.Scalar_Tensor")
def linspace_between_tensors(g: Builder, start: Operand, end: Operand, steps: Any, **ignored: Any) -> Value:
    """Count from either end towards the middle, as torch does."""
    if not g.out.dtype.is_floating_point or not isinstance(steps, int):
        raise Unsupported("integers between tensors, whose rounding depends on the processor; or a symbolic count")
    dtype = dtypes.accumulation_dtype(g.out.dtype)
    low, high = (g.cast(number, dtype) for number in (start, end))
    step = g.Div(g.Sub(high, low), g.scalar(max(steps - 1, 1), dtype))
    places = torch.arange(steps, dtype=dtype)
    up, down = (g.constant(dtypes.to_array(p)) for p in (places, steps - 1 - places))
    first = g.constant((places < steps // 2 if steps > 1 else places == 0).numpy())
    return g.Where(first, g.Add(low, g.Mul(step, up)), g.Sub(high, g.Mul(step, down)))


@aten("tril_indices")
def tril_indices(g: Builder, row: int, col: int, offset: int = 0, **ignored: Any) -> Value:
    return g.constant(dtypes.to_array(torch.tril_indices(row, col, offset, dtype=g.out.dtype)))


@aten("triu_indices")
def triu_indices(g: Builder, row: int, col: int, offset: int = 0, **ignored: Any) -> Value:
    return g.constant(dtypes.to_array(torch.triu_indices(row, col, offset, dtype=g.out.dtype)))
