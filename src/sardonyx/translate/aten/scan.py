"""Cumulative results along an axis, which ONNX has for sums only: log₂ n steps, each over the whole tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import onnx_ir as ir
import torch

from sardonyx import dtypes
from sardonyx.translate.aten.activation import log_one_plus
from sardonyx.translate.aten.indexing import positions
from sardonyx.translate.builder import Builder
from sardonyx.translate.formula import loop_values
from sardonyx.translate.table import aten

Value = ir.Value


def _doubling(
    g: Builder, start: Sequence[Value], axis: int, step: Callable[[Sequence[Value], Value], Sequence[Value]]
) -> Sequence[Value]:
    """Combine every element with the one 1, 2, 4, … positions before it, until the axis is covered."""
    length = g.dims(start[0])[axis]
    if isinstance(length, int):
        for i in range((length - 1).bit_length() if length > 1 else 0):
            start = step(start, g.ints([2**i]))
        return start
    powers = g.ints([2**i for i in range(63)])
    rounds = g.ReduceSum(g.cast(g.Less(powers, g.sizes.value(length)), torch.int64), keepdims=0)
    return loop_values(g, rounds, start, lambda count, state: step(state, g.reshape(g.Gather(powers, count), [1])))


def _shifted(g: Builder, x: Value, axis: int, by: Value, fill: float) -> Value:
    """Return each element's predecessor by `by` positions; the first ones are `fill`."""
    pads = g.Concat(by, g.Neg(by), axis=0)
    return g.shaped(g.Pad(x, pads, g.scalar(fill, g.dtype(x)), g.ints([axis])), g.dims(x))


@aten("cumprod")
def cumprod(g: Builder, x: Value, dim: int, *, dtype: torch.dtype | None = None) -> Value:
    x = g.cast(x, g.out.dtype)
    if not g.rank(x):
        return x
    return running_product(g, x, g.axis(x, dim))


def running_product(g: Builder, x: Value, axis: int) -> Value:
    return _doubling(g, [x], axis, lambda state, by: [g.Mul(state[0], _shifted(g, state[0], axis, by, 1))])[0]


@aten("logcumsumexp")
def logcumsumexp(g: Builder, x: Value, dim: int) -> Value:
    """log(eᵃ + eᵇ) = max + log(1 + e⁻|ᵃ⁻ᵇ|), step by step: one sum would lose what is far below the maximum."""
    x = g.cast(x, dtypes.accumulation_dtype(g.dtype(x)))
    if not g.rank(x):
        return x
    axis = g.axis(x, dim)

    def step(state: Sequence[Value], by: Value) -> list[Value]:
        (x,) = state
        before = _shifted(g, x, axis, by, -math.inf)
        larger = g.Where(g.IsNaN(before), before, g.Where(g.Less(x, before), before, x))
        nearer = log_one_plus(g, g.Exp(g.Neg(g.Abs(g.Sub(x, before)))))
        return [g.Where(g.IsInf(larger), larger, g.Add(larger, nearer))]

    return _doubling(g, [x], axis, step)[0]


def _running_extreme(g: Builder, x: Value, dim: int, op_type: str) -> tuple[Value, Value]:
    """Return the extreme so far and its index: the last of equals; NaN beats every number."""
    if g.dtype(x) == torch.bool:
        values, places = _running_extreme(g, g.Cast(x, dtype=ir.DataType.INT32), dim, op_type)
        return g.cast(values, torch.bool), places
    if not g.rank(x):
        return x, g.scalar(0, torch.int64)
    axis, dtype = g.axis(x, dim), g.dtype(x)
    worst = _lowest(dtype) if op_type == "GreaterOrEqual" else _highest(dtype)

    def step(state: Sequence[Value], by: Value) -> list[Value]:
        x, places = state
        before, place = _shifted(g, x, axis, by, worst), _shifted(g, places, axis, by, 0)
        stays = g.node(op_type, [x, before])
        if dtype.is_floating_point:
            stays = g.Or(g.IsNaN(x), g.And(stays, g.Not(g.IsNaN(before))))
        return [g.Where(stays, x, before), g.Where(stays, places, place)]

    length = g.dims(x)[axis]
    places = g.reshape(positions(g, length), [length if i == axis else 1 for i in range(g.rank(x))])
    values, places = _doubling(g, [x, g.expand(places, g.dims(x))], axis, step)
    return values, places


def _lowest(dtype: torch.dtype) -> float:
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def _highest(dtype: torch.dtype) -> float:
    return math.inf if dtype.is_floating_point else torch.iinfo(dtype).max


@aten("cummax")
def cummax(g: Builder, x: Value, dim: int) -> tuple[Value, Value]:
    return _running_extreme(g, x, dim, "GreaterOrEqual")


@aten("cummin")
def cummin(g: Builder, x: Value, dim: int) -> tuple[Value, Value]:
    return _running_extreme(g, x, dim, "LessOrEqual")
