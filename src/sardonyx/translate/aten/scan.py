"""Running results along an axis, which ONNX has for sums only: log₂ n steps, each over the whole tensor."""

from __future__ import annotations

import math

import onnx_ir as ir
import torch

from sardonyx.translate import dtypes
from sardonyx.translate.aten.activation import log_one_plus
from sardonyx.translate.builder import Builder
from sardonyx.translate.errors import Unsupported
from sardonyx.translate.table import aten

Value = ir.Value


def _length(g: Builder, x: Value, axis: int) -> int:
    length = g.dims(x)[axis]
    if not isinstance(length, int):
        raise Unsupported("a running product or extreme along a symbolic size")
    return length


def _shifted(g: Builder, x: Value, axis: int, by: int, head: Value) -> Value:
    """Each element's predecessor by `by` places; the first ones have `head` instead."""
    dims = g.dims(x)
    body = g.slice(x, axis, 0, _length(g, x, axis) - by)
    return g.shaped(g.Concat(head, body, axis=axis), dims)


def _steps(length: int) -> list[int]:
    return [2**i for i in range((length - 1).bit_length())] if length > 1 else []


@aten("cumprod")
def cumprod(g: Builder, x: Value, dim: int, *, dtype: torch.dtype | None = None) -> Value:
    x = g.cast(x, g.out.dtype)
    if not g.rank(x):
        return x
    axis = g.axis(x, dim)
    for step in _steps(_length(g, x, axis)):
        ones = [step if i == axis else size for i, size in enumerate(g.dims(x))]
        x = g.Mul(x, _shifted(g, x, axis, step, g.expand(g.scalar(1, g.out.dtype), ones)))
    return x


@aten("logcumsumexp")
def logcumsumexp(g: Builder, x: Value, dim: int) -> Value:
    """log(eᵃ + eᵇ) = max + log(1 + e⁻|ᵃ⁻ᵇ|), step by step: one sum for all would lose what is far below the largest."""
    dtype = dtypes.summing(g.dtype(x))
    x = g.cast(x, dtype)
    if not g.rank(x):
        return x
    axis = g.axis(x, dim)
    for step in _steps(_length(g, x, axis)):
        dims = [step if i == axis else size for i, size in enumerate(g.dims(x))]
        before = _shifted(g, x, axis, step, g.expand(g.scalar(-math.inf, dtype), dims))
        larger = g.Where(g.IsNaN(before), before, g.Where(g.Less(x, before), before, x))
        nearer = log_one_plus(g, g.Exp(g.Neg(g.Abs(g.Sub(x, before)))))
        x = g.Where(g.IsInf(larger), larger, g.Add(larger, nearer))
    return x


def _running(g: Builder, x: Value, dim: int, op_type: str) -> tuple[Value, Value]:
    """The extreme so far and where it stands: the last place of several, and NaN beats every number."""
    if g.dtype(x) == torch.bool:
        values, places = _running(g, g.Cast(x, dtype=ir.DataType.INT32), dim, op_type)
        return g.cast(values, torch.bool), places
    if not g.rank(x):
        return x, g.scalar(0, torch.int64)
    axis = g.axis(x, dim)
    length = _length(g, x, axis)
    places = g.reshape(g.ints(range(length)), [length if i == axis else 1 for i in range(g.rank(x))])
    places = g.expand(places, g.dims(x))
    for step in _steps(length):
        before, place = (_shifted(g, v, axis, step, g.slice(v, axis, 0, step)) for v in (x, places))
        stays = g.node(op_type, [x, before])
        if g.dtype(x).is_floating_point:
            stays = g.Or(g.IsNaN(x), g.And(stays, g.Not(g.IsNaN(before))))
        x, places = g.Where(stays, x, before), g.Where(stays, places, place)
    return x, places


@aten("cummax")
def cummax(g: Builder, x: Value, dim: int) -> tuple[Value, Value]:
    return _running(g, x, dim, "GreaterOrEqual")


@aten("cummin")
def cummin(g: Builder, x: Value, dim: int) -> tuple[Value, Value]:
    return _running(g, x, dim, "LessOrEqual")
