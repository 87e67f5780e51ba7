"""Reductions, arg-reductions, cumulative sums, sorting."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir
import sympy
import torch
from torch.utils._sympy.functions import FloorDiv, PythonMod

from sardonyx import dtypes
from sardonyx.sizes import Dim, may_be_zero
from sardonyx.translate.aten.indexing import element_count, positions
from sardonyx.translate.aten.totals import integer_product, integer_sum
from sardonyx.translate.builder import Builder, Operand
from sardonyx.translate.table import aten

Value = ir.Value
Axes = Sequence[int] | int | None


def _axes(g: Builder, x: Value, dim: Axes) -> list[int]:
    """Return the axes of a torch `dim` argument: None and [] mean all."""
    if dim is None or (not isinstance(dim, int) and not dim):
        return list(range(g.rank(x)))
    return sorted({g.axis(x, d) for d in ([dim] if isinstance(dim, int) else dim)}) if g.rank(x) else []


_EMPTY_RESULT = {
    "ReduceSum": 0,
    "ReduceProd": 1,
    "ReduceMean": float("nan"),
    "ReduceLogSumExp": float("-inf"),
    "ReduceL1": 0,
    "ReduceL2": 0,
    "ReduceSumSquare": 0,
    "ReduceMax": 0,  # only for booleans, as any and all: torch refuses other empty maxima
    "ReduceMin": 1,
}
"""The result of an empty reduction; engines do not agree."""
_WRONG_OF_NOTHING = ("ReduceMean", "ReduceMax")
"""Reductions for which ONNX Runtime returns something else if the number of elements is symbolic."""


def _reduce(g: Builder, op_type: str, x: Value, dim: Axes, keepdim: bool) -> Value:
    axes = _axes(g, x, dim)
    if not axes:
        return x
    dims = [1 if i in axes else size for i, size in enumerate(g.dims(x)) if keepdim or i not in axes]
    if any(g.dims(x)[axis] == 0 for axis in axes):
        return g.expand(g.scalar(_EMPTY_RESULT[op_type], g.dtype(x)), dims)
    result = g.shaped(g.node(op_type, [x, g.ints(axes)], keepdims=int(keepdim)), dims)
    count = _count(g, x, axes)
    if op_type not in _WRONG_OF_NOTHING or not may_be_zero(count):
        return result
    empty = g.reshape(g.sizes.condition(sympy.Eq(count, 0)), ())
    return g.Where(empty, g.scalar(_EMPTY_RESULT[op_type], g.dtype(x)), result)


def _reduce_nonempty(g: Builder, op_type: str, x: Value, dim: Axes, keepdim: bool) -> Value:
    """Reduce, but raise for an empty reduction as torch does: the division by the count raises then."""
    axes = _axes(g, x, dim)
    if not axes or not may_be_zero(_count(g, x, axes)):
        return _reduce(g, op_type, x, dim, keepdim)
    dims = [1 if i in axes else size for i, size in enumerate(g.dims(x)) if keepdim or i not in axes]
    checked = g.Add(g.ints(axes), _zero_unless_empty(g, _count(g, x, axes)))
    return g.shaped(g.node(op_type, [x, checked], keepdims=int(keepdim)), dims)


def _zero_unless_empty(g: Builder, count: Dim) -> Value:
    """Return zero as a tensor of one element; the engine raises if the count is zero."""
    return g.Div(g.ints([0]), g.sizes.value(count))


def _count(g: Builder, x: Value, axes: Sequence[int]) -> Dim:
    """Return the number of elements along the axes."""
    return element_count([g.dims(x)[axis] for axis in axes])


@aten("sum", "sum.dim_IntList")
def sum_(g: Builder, x: Value, dim: Axes = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Value:
    if dtypes.is_integer(g.out.dtype):
        return _reduce_integers(g, x, dim, keepdim, integer_sum, 0)
    x = g.cast(x, g.out.dtype)
    axes = _axes(g, x, dim)
    if axes == list(range(len(axes))) and 0 < len(axes) < g.rank(x) and _are_many(g.dims(x)[: len(axes)], g.dtype(x)):
        total = _sum_in_blocks(g, g.reshape(x, [element_count(g.dims(x)[: len(axes)]), *g.dims(x)[len(axes) :]]))
        return g.unsqueeze(total, axes) if keepdim else total
    return _reduce(g, "ReduceSum", x, dim, keepdim)


@aten("trace")
def trace(g: Builder, x: Value) -> Value:
    rows, columns = (g.unsqueeze(positions(g, size), [1 - i]) for i, size in enumerate(g.dims(x)))
    return sum_(g, g.Where(g.Equal(rows, columns), x, g.scalar(0, g.dtype(x))))


def _reduce_integers(
    g: Builder, x: Value, dim: Axes, keepdim: bool, reduce: Callable[..., Value], empty_result: int
) -> Value:
    """Return an exact reduction; for a narrow dtype torch's result is its low bits."""
    if g.dtype(x).is_floating_point:
        x = g.cast(x, g.out.dtype)
    axes = _axes(g, x, dim)
    if any(g.dims(x)[axis] == 0 for axis in axes):
        return g.expand(g.scalar(empty_result, g.out.dtype), g.like(g.out))
    return g.cast(reduce(g, x, axes, keepdim) if axes else x, g.out.dtype)


_BLOCKS = 32


def _are_many(dims: Sequence[Dim], dtype: torch.dtype) -> bool:
    rows = element_count(dims)
    return dtype == torch.float32 and (not isinstance(rows, int) or rows >= 16 * _BLOCKS)


def _sum_in_blocks(g: Builder, x: Value) -> Value:
    """Sum many rows in blocks: engines add one row after the other, which is several times less accurate.

    Gradients of weights and biases are such sums. It takes no longer, unless rows of zeros must be added.
    """
    rows, *rest = g.dims(x)
    missing = g.dim(PythonMod(sympy.sympify(-rows), _BLOCKS))
    if missing != 0:
        x = g.Pad(x, g.shape_value([0, missing]), None, g.ints([0]))
    blocks = g.reshape(x, [_BLOCKS, g.dim(FloorDiv(sympy.sympify(rows + _BLOCKS - 1), _BLOCKS)), *rest])
    return _reduce(g, "ReduceSum", _reduce(g, "ReduceSum", blocks, 1, False), 0, False)


@aten("mean", "mean.dim")
def mean(g: Builder, x: Value, dim: Axes = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Value:
    return _reduce(g, "ReduceMean", g.cast(x, g.out.dtype), dim, keepdim)


@aten("prod", "prod.dim_int")
def prod(g: Builder, x: Value, dim: Axes = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Value:
    if dtypes.is_integer(g.out.dtype):
        return _reduce_integers(g, x, dim, keepdim, integer_product, 1)
    return _reduce(g, "ReduceProd", g.cast(x, g.out.dtype), dim, keepdim)


def _extreme(g: Builder, op_type: str, x: Value, dim: Axes, keepdim: bool) -> Value:
    if g.dtype(x) == torch.bool:
        wide = g.Cast(x, dtype=ir.DataType.INT32)
        return g.cast(_reduce(g, op_type, wide, dim, keepdim), torch.bool)
    result = _reduce_nonempty(g, op_type, x, dim, keepdim)
    return result if not g.dtype(x).is_floating_point or result is x else _with_nan(g, result, x, dim, keepdim)


def _with_nan(g: Builder, result: Value, x: Value, dim: Axes, keepdim: bool) -> Value:
    """Return NaN where an element is NaN: engines skip it, torch propagates it.

    Squares are not negative, so the sum of infinite ones is not NaN.
    """
    broken = g.IsNaN(_reduce(g, "ReduceSumSquare", x, dim, keepdim))
    return g.Where(broken, g.scalar(float("nan"), g.dtype(x)), result)


@aten("amax", "max")
def amax(g: Builder, x: Value, dim: Axes = None, keepdim: bool = False) -> Value:
    return _extreme(g, "ReduceMax", x, dim, keepdim)


@aten("amin", "min")
def amin(g: Builder, x: Value, dim: Axes = None, keepdim: bool = False) -> Value:
    return _extreme(g, "ReduceMin", x, dim, keepdim)


@aten("any", "any.dim", "any.dims")
def any_(g: Builder, x: Value, dim: Axes = None, keepdim: bool = False) -> Value:
    return g.cast(_extreme(g, "ReduceMax", g.cast(x, torch.bool), dim, keepdim), g.out.dtype)


@aten("all", "all.dim", "all.dims")
def all_(g: Builder, x: Value, dim: Axes = None, keepdim: bool = False) -> Value:
    return g.cast(_extreme(g, "ReduceMin", g.cast(x, torch.bool), dim, keepdim), g.out.dtype)


def _variance(g: Builder, x: Value, dim: Axes, correction: float | None, keepdim: bool) -> tuple[Value, Value]:
    """Return variance and mean by two passes, as torch computes them; the count may be symbolic."""
    axes = _axes(g, x, dim)
    dtype = dtypes.accumulation_dtype(g.dtype(x))
    x = g.cast(x, dtype)
    average = _reduce(g, "ReduceMean", x, dim, True)
    centred = g.Sub(x, average)
    spread = _reduce(g, "ReduceSum", g.Mul(centred, centred), dim, keepdim)
    count: Operand = 1
    for axis in axes:
        count = count * g.dims(x)[axis]
    freedom = g.Sub(g.scalar(count, dtype), g.scalar(1 if correction is None else correction, dtype))
    variance = g.Div(spread, g.Max(freedom, g.scalar(0, dtype)))
    if not keepdim and axes:
        average = g.squeeze(average, axes)
    return variance, average


@aten("var.correction", "var.dim")
def var(
    g: Builder,
    x: Value,
    dim: Axes = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> Value:
    correction = correction if unbiased else 0
    return _variance(g, x, dim, correction, keepdim)[0]


@aten("var_mean.correction")
def var_mean(
    g: Builder, x: Value, dim: Axes = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Value, Value]:
    return _variance(g, x, dim, correction, keepdim)


@aten("std.correction")
def std(g: Builder, x: Value, dim: Axes = None, *, correction: float | None = None, keepdim: bool = False) -> Value:
    return g.Sqrt(_variance(g, x, dim, correction, keepdim)[0])


@aten("logsumexp")
def logsumexp(g: Builder, x: Value, dim: Axes, keepdim: bool = False) -> Value:
    x = g.cast(x, g.out.dtype)
    result = _reduce(g, "ReduceLogSumExp", x, dim, keepdim)
    return result if result is x else _with_nan(g, result, x, dim, keepdim)  # NaN is skipped next to an infinity


def _arg(g: Builder, op_type: str, x: Value, dim: int | None, keepdim: bool) -> Value:
    if not g.rank(x):
        return g.scalar(0, torch.int64)
    if dim is None:
        x, dim = g.reshape(x, [element_count(g.dims(x))]), 0
    if g.dtype(x) == torch.bool:
        x = g.Cast(x, dtype=ir.DataType.INT32)
    axis = g.axis(x, dim)
    result = _arg_index(g, op_type, x, axis, keepdim)
    size = g.dims(x)[axis]
    return g.Add(result, g.reshape(_zero_unless_empty(g, size), ())) if may_be_zero(size) else result


def _arg_index(g: Builder, op_type: str, x: Value, axis: int, keepdim: bool) -> Value:
    if not g.dtype(x).is_floating_point:
        return g.node(op_type, [x], axis=axis, keepdims=int(keepdim))
    if g.dtype(x) in _WIDER:
        return g.node(op_type, [sort_key(g, x, 1 if op_type == "ArgMax" else -1)], axis=axis, keepdims=int(keepdim))
    return _arg_double(g, op_type, x, axis, keepdim)


def _arg_double(g: Builder, op_type: str, x: Value, axis: int, keepdim: bool) -> Value:
    """Return the index of the first NaN, or if there is none of the extreme, infinite or not."""
    worst = g.scalar(float("-inf" if op_type == "ArgMax" else "inf"), torch.float64)
    broken = g.Cast(g.IsNaN(x), dtype=ir.DataType.INT32)
    place, first = (
        g.node(kind, [v], axis=axis, keepdims=int(keepdim))
        for kind, v in ((op_type, g.Where(g.IsNaN(x), worst, x)), ("ArgMax", broken))
    )
    return g.Where(g.cast(_reduce(g, "ReduceMax", broken, axis, keepdim), torch.bool), first, place)


@aten("argmax")
def argmax(g: Builder, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
    return (
        g.reshape(_arg(g, "ArgMax", x, dim, keepdim and dim is not None), g.like(g.out))
        if dim is None
        else _arg(g, "ArgMax", x, dim, keepdim)
    )


@aten("argmin")
def argmin(g: Builder, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
    return (
        g.reshape(_arg(g, "ArgMin", x, dim, keepdim and dim is not None), g.like(g.out))
        if dim is None
        else _arg(g, "ArgMin", x, dim, keepdim)
    )


def _extreme_with_index(
    g: Builder, reduce_type: str, arg_type: str, x: Value, dim: int, keepdim: bool
) -> tuple[Value, Value]:
    values = _extreme(g, reduce_type, x, dim, keepdim) if g.rank(x) else x
    return values, _arg(g, arg_type, x, dim, keepdim)


@aten("max.dim")
def max_dim(g: Builder, x: Value, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
    return _extreme_with_index(g, "ReduceMax", "ArgMax", x, dim, keepdim)


@aten("min.dim")
def min_dim(g: Builder, x: Value, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
    return _extreme_with_index(g, "ReduceMin", "ArgMin", x, dim, keepdim)


@aten("cumsum")
def cumsum(g: Builder, x: Value, dim: int, *, dtype: torch.dtype | None = None) -> Value:
    x = g.cast(x, g.out.dtype)
    return g.CumSum(x, g.scalar(g.axis(x, dim), torch.int64)) if g.rank(x) else x


@aten("topk")
def topk(
    g: Builder, x: Value, k: Operand, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Value, Value]:
    if not g.rank(x):
        return x, g.scalar(0, torch.int64)
    return sorted_topk(g, x, g.shape_value([k]), g.axis(x, dim), largest)


def sorted_topk(g: Builder, x: Value, k: Value, axis: int, largest: bool) -> tuple[Value, Value]:
    """Return the `k` largest or smallest in order, NaN as the largest, and their indices; the sort is stable."""
    if g.dtype(x) == torch.bool:
        values, indices = sorted_topk(g, g.Cast(x, dtype=ir.DataType.INT32), k, axis, largest)
        return g.cast(values, torch.bool), indices
    if g.dtype(x) == torch.float64:
        return _topk_double(g, x, k, axis, largest)
    key = sort_key(g, x)
    values, indices = _topk(g, key, k, axis, largest)
    return (values if key is x else g.GatherElements(x, indices, axis=axis)), indices


def _topk(g: Builder, x: Value, k: Value, axis: int, largest: bool) -> tuple[Value, Value]:
    values, indices = g.several("TopK", 2, [x, k], axis=axis, largest=int(largest))
    indices.type = ir.TensorType(ir.DataType.INT64)
    return values, indices


def _topk_double(g: Builder, x: Value, k: Value, axis: int, largest: bool) -> tuple[Value, Value]:
    """Sort with NaN as infinity, then stably by whether it is NaN."""
    broken = g.Cast(g.IsNaN(x), dtype=ir.DataType.INT32)
    key = g.Where(g.IsNaN(x), g.scalar(float("inf"), torch.float64), x)
    _, order = _topk(g, key, g.shape_value([g.dims(x)[axis]]), axis, largest)
    _, places = _topk(g, g.GatherElements(broken, order, axis=axis), k, axis, largest)
    indices = g.GatherElements(order, places, axis=axis)
    return g.GatherElements(x, indices, axis=axis), indices


_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float64}


def sort_key(g: Builder, x: Value, side: int = 1) -> Value:
    """Return a key with NaN beyond infinity (below, if `side` is −1), as torch sorts; ONNX does not define its order.

    A wider dtype has numbers beyond the largest, which represent infinity and NaN: ONNX Runtime's TopK on CUDA pads
    with the largest number, and loses infinities. Not for doubles.
    """
    dtype = g.dtype(x)
    if not dtype.is_floating_point:
        return x
    wide, most = g.cast(x, _WIDER[dtype]), torch.finfo(_WIDER[dtype]).max
    infinity, nan = 0.997 * most, 0.998 * most  # bfloat16 ends at 0.9961 of float32's largest
    finite = g.Clip(wide, g.scalar(-infinity, _WIDER[dtype]), g.scalar(infinity, _WIDER[dtype]))
    return g.Where(g.IsNaN(wide), g.scalar(side * nan, _WIDER[dtype]), finite)


@aten("sort", "sort.stable")
def sort(
    g: Builder, x: Value, dim: int = -1, descending: bool = False, *, stable: bool | None = None
) -> tuple[Value, Value]:
    # ONNX's TopK breaks ties by the lower index, so it is a stable sort.
    if not g.rank(x):
        return x, g.scalar(0, torch.int64)
    axis = g.axis(x, dim)
    return sorted_topk(g, x, g.shape_value([g.dims(x)[axis]]), axis, descending)


@aten("linalg_vector_norm")
def linalg_vector_norm(
    g: Builder, x: Value, ord: float = 2, dim: Axes = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Value:
    wide = dtypes.accumulation_dtype(g.out.dtype)
    x = g.cast(x, wide)
    if ord in (1, 2):
        return _reduce(g, f"ReduceL{int(ord)}", x if _axes(g, x, dim) else g.Abs(x), dim, keepdim)
    if ord in (float("inf"), float("-inf")):
        return _extreme(g, "ReduceMax" if ord > 0 else "ReduceMin", g.Abs(x), dim, keepdim)
    if ord == 0:
        return _reduce(g, "ReduceSum", g.cast(g.Not(g.Equal(x, g.scalar(0, wide))), wide), dim, keepdim)
    total = _reduce(g, "ReduceSum", g.Pow(g.Abs(x), g.scalar(ord, wide)), dim, keepdim)
    return g.Pow(total, g.scalar(1 / ord, wide))
