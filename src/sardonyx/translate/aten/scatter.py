"""Scattering: values assigned, or combined, at indices."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
import torch

from sardonyx import dtypes
from sardonyx.sizes import Dim
from sardonyx.translate.aten.division import floor_divide
from sardonyx.translate.aten.indexing import flat
from sardonyx.translate.builder import Builder, Operand
from sardonyx.translate.table import aten

Value = ir.Value


@aten("scatter.src", "scatter.value")
def scatter(g: Builder, x: Value, dim: int, index: Value, src: Operand) -> Value:
    return _scatter(g, x, dim, index, src, None)


@aten("scatter_add")
def scatter_add(g: Builder, x: Value, dim: int, index: Value, src: Value) -> Value:
    return _scatter(g, x, dim, index, src, "add")


@aten("scatter.reduce", "scatter.value_reduce")
def scatter_with(g: Builder, x: Value, dim: int, index: Value, src: Operand, *, reduce: str) -> Value:
    return _scatter(g, x, dim, index, src, {"add": "add", "multiply": "mul"}[reduce])


def _scatter(g: Builder, x: Value, dim: int, index: Value, src: Operand, reduction: str | None) -> Value:
    if 0 in g.dims(index):
        return x
    if not g.rank(x) or not g.rank(index):
        return _scatter_flat(g, x, index, src, reduction)
    if isinstance(src, Value):
        src = _prefix(g, src, g.dims(index))
    else:
        src = g.expand(g.scalar(src, g.dtype(x)), g.dims(index))
    if reduction is None:
        return g.shaped(g.ScatterElements(x, index, src, axis=g.axis(x, dim)), g.dims(x))
    return scatter_combined(g, x, g.axis(x, dim), index, src, reduction)


def scatter_combined(g: Builder, x: Value, axis: int, index: Value, src: Value, reduction: str) -> Value:
    """Add, multiply or compare each element of `src` into `x` at its index along the axis."""
    dtype = g.dtype(x)
    if dtype == torch.bool:
        x, src = (g.Cast(value, dtype=ir.DataType.INT32) for value in (x, src))
        return g.cast(scatter_combined(g, x, axis, index, src, _OF_BOOLEANS[reduction]), torch.bool)
    wide = dtypes.accumulation_dtype(dtype)  # engines do not combine half precision, though they declare it
    result = g.ScatterElements(g.cast(x, wide), index, g.cast(src, wide), axis=axis, reduction=reduction)
    result = g.cast(g.shaped(result, g.dims(x)), dtype)
    if not dtype.is_floating_point or reduction not in ("max", "min"):
        return result
    # Engines skip NaN; torch propagates it.
    broken = scatter_combined(g, g.IsNaN(x), axis, index, g.IsNaN(src), "max")
    return g.Where(broken, g.scalar(float("nan"), dtype), result)


def _scatter_flat(g: Builder, x: Value, index: Value, src: Operand, reduction: str | None) -> Value:
    """Treat a scalar tensor as one of one element, as torch does."""
    line, places = (v if g.rank(v) else g.unsqueeze(v, [0]) for v in (x, index))
    if isinstance(src, Value) and not g.rank(src):
        src = g.unsqueeze(src, [0])
    return g.reshape(_scatter(g, line, 0, places, src, reduction), g.dims(x))


def _prefix(g: Builder, x: Value, dims: Sequence[Dim]) -> Value:
    """Return the leading part of `x` of these sizes: torch allows `src` to be larger than `index`."""
    for axis, want in enumerate(dims):
        have = g.dims(x)
        if have[axis] != want:
            x = g.shaped(g.slice(x, axis, 0, want), [*have[:axis], want, *have[axis + 1 :]])
    return x


_OF_BOOLEANS = {"add": "max", "max": "max", "mul": "min", "min": "min"}
_REDUCTIONS = {"sum": "add", "mean": "add", "prod": "mul", "amax": "max", "amin": "min"}


@aten("scatter_reduce.two")
def scatter_reduce(
    g: Builder, x: Value, dim: int, index: Value, src: Value, reduce: str, *, include_self: bool = True
) -> Value:
    if 0 in g.dims(index):
        return x
    start = x if include_self else _scatter(g, x, dim, index, _neutral(g.dtype(x), reduce), None)
    total = _scatter(g, start, dim, index, src, _REDUCTIONS[reduce])
    return total if reduce != "mean" else _mean(g, total, dim, index, include_self)


def _neutral(dtype: torch.dtype, reduce: str) -> float | int:
    if dtype == torch.bool:
        return reduce in ("prod", "amin")
    if reduce in ("amax", "amin"):
        if dtype.is_floating_point:
            return float("-inf") if reduce == "amax" else float("inf")
        limits = torch.iinfo(dtype)
        return limits.min if reduce == "amax" else limits.max
    return 1 if reduce == "prod" else 0


def _mean(g: Builder, total: Value, dim: int, index: Value, include_self: bool) -> Value:
    dtype = g.dtype(total)
    ones = g.expand(g.scalar(1 if include_self else 0, dtype), g.dims(total))
    count = _scatter(g, ones, dim, index, 1, "add")
    # A position without updates keeps its value.
    count = g.Max(count, g.scalar(1, dtype))
    return g.Div(total, count) if dtype.is_floating_point else floor_divide(g, total, count)


@aten("index_reduce")
def index_reduce(
    g: Builder, x: Value, dim: int, index: Value, source: Value, reduce: str, *, include_self: bool = True
) -> Value:
    if not g.rank(x):
        line, source = g.unsqueeze(x, [0]), g.reshape(source, [1])
        return g.squeeze(index_reduce(g, line, 0, index, source, reduce, include_self=include_self), [0])
    axis = g.axis(x, dim)
    places = g.reshape(index, [1] * axis + list(g.dims(source))[axis : axis + 1] + [1] * (g.rank(x) - axis - 1))
    return scatter_reduce(g, x, dim, g.expand(places, g.dims(source)), source, reduce, include_self=include_self)


@aten("put")
def put(g: Builder, x: Value, index: Value, source: Value, accumulate: bool = False) -> Value:
    placed = _scatter(g, flat(g, x), 0, flat(g, index), flat(g, source), "add" if accumulate else None)
    return g.reshape(placed, g.dims(x))
