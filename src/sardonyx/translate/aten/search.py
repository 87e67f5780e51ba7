"""Search in sorted sequences."""

from __future__ import annotations

import onnx_ir as ir
import torch

from sardonyx import dtypes
from sardonyx.errors import Unsupported
from sardonyx.sizes import Dim
from sardonyx.translate.aten.indexing import element_count, flat
from sardonyx.translate.aten.scatter import scatter_combined
from sardonyx.translate.builder import Builder, Operand
from sardonyx.translate.table import aten

Value = ir.Value
_LONGEST = 1024


def insertion_index(g: Builder, sequence: Value, values: Value, right: bool) -> Value:
    """Return how many elements of the sequence are before each value, by comparing all pairs; for short sequences."""
    length: Dim = g.dims(sequence)[-1]
    if not isinstance(length, int) or length > _LONGEST:
        raise Unsupported(f"a search in a sequence of {length}; up to {_LONGEST} are compared one by one")
    if not length:
        return g.expand(g.scalar(0, torch.int64), g.dims(values))
    sequence, values = g.promote(sequence, values)
    values = g.unsqueeze(values, [-1])
    # Written so that NaN, for which no comparison holds, comes last.
    behind = g.Not(g.node("Greater" if right else "GreaterOrEqual", [sequence, values]))
    if not g.dtype(sequence).is_floating_point:
        return _count(g, behind)
    broken = g.IsNaN(sequence)
    place = _count(g, g.And(behind, g.Or(g.Not(broken), g.IsNaN(values))))
    return _end_if_nan_read(g, place, _count(g, g.Not(broken)), length)


def _count(g: Builder, condition: Value) -> Value:
    """Return how often the condition holds along the last axis."""
    return g.ReduceSum(g.cast(condition, torch.int64), g.ints([-1]), keepdims=0)


def _end_if_nan_read(g: Builder, place: Value, numbers: Value, length: int) -> Value:
    """torch's binary search returns the end of the sequence if it reads a NaN, which is behind the numbers."""
    read = g.ints([_last_position_read(place, length) for place in range(length + 1)])
    end = g.scalar(length, torch.int64)
    return g.Where(g.GreaterOrEqual(g.Gather(read, place), numbers), end, place)


def _last_position_read(place: int, length: int) -> int:
    """Return the last position at or after the insertion index that a binary search reads; −1 if there is none."""
    start, end = 0, length
    while start < end:
        middle = (start + end) // 2
        if middle >= place:
            return middle
        start = middle + 1
    return -1


@aten("bucketize.Tensor", "bucketize.Scalar")
def bucketize(g: Builder, x: Operand, boundaries: Value, *, out_int32: bool = False, right: bool = False) -> Value:
    return insertion_index(g, boundaries, _as_tensor(g, x), right)


@aten("searchsorted.Tensor", "searchsorted.Scalar")
def searchsorted(
    g: Builder,
    sequence: Value,
    values: Operand,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Value | None = None,
) -> Value:
    if sorter is not None:
        sequence = g.shaped(g.GatherElements(sequence, sorter, axis=-1), g.dims(sequence))
    if g.rank(sequence) > 1:
        sequence = g.unsqueeze(sequence, [-2])
    return insertion_index(g, sequence, _as_tensor(g, values), right or side == "right")


@aten("isin.Tensor_Tensor")
def isin(g: Builder, x: Value, tests: Value, *, assume_unique: bool = False, invert: bool = False) -> Value:
    count = element_count(g.dims(tests))
    if isinstance(count, int) and count > _LONGEST:
        raise Unsupported(f"isin with {count} elements to compare with; up to {_LONGEST} are compared one by one")
    x, tests = g.promote(x, tests)
    result = _count(g, g.Equal(g.unsqueeze(x, [-1]), flat(g, tests)))
    zero = g.scalar(0, torch.int64)
    return g.Equal(result, zero) if invert else g.Greater(result, zero)


@aten("isin.Tensor_Scalar")
def isin_scalar(g: Builder, x: Value, test: Operand, *, assume_unique: bool = False, invert: bool = False) -> Value:
    result = g.Equal(*g.promote(x, test))
    return g.Not(result) if invert else result


def _as_tensor(g: Builder, x: Operand) -> Value:
    return x if isinstance(x, Value) else g.scalar(x, torch.float32 if isinstance(x, float) else torch.int64)


@aten("histc")
def histc(g: Builder, x: Value, bins: int = 100, min: float = 0, max: float = 0) -> Value:
    """Count the elements between two numbers by the interval they are in, computed in float32 for half precision."""
    if min == max:
        raise Unsupported("a histogram whose range is that of the data")
    dtype = dtypes.accumulation_dtype(g.out.dtype) if g.out.dtype.is_floating_point else torch.float64
    elements, low, high = flat(g, g.cast(x, dtype)), g.scalar(min, dtype), g.scalar(max, dtype)
    inside = g.And(g.GreaterOrEqual(elements, low), g.LessOrEqual(elements, high))
    place = g.Floor(g.Mul(g.Sub(elements, low), g.scalar(bins / (max - min), dtype)))
    nearest = g.Min(place, g.scalar(bins - 1, dtype))  # the last interval has its upper end too
    index = g.cast(g.Where(inside, nearest, g.scalar(0, dtype)), torch.int64)
    zeros = g.expand(g.scalar(0, dtype), [bins])
    return g.cast(scatter_combined(g, zeros, 0, index, g.cast(inside, dtype), "add"), g.out.dtype)
