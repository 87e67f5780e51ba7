"""Order statistics, unique elements and histograms, by sorting."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir
import torch
from torch.utils._sympy.functions import FloorDiv

from sardonyx import dtypes
from sardonyx.errors import Unsupported
from sardonyx.sizes import Dim
from sardonyx.translate.aten.indexing import flat
from sardonyx.translate.aten.reduction import sorted_topk
from sardonyx.translate.aten.search import insertion_index
from sardonyx.translate.builder import Builder, Operand
from sardonyx.translate.table import aten

Value = ir.Value


def _smallest(g: Builder, x: Value, count: Dim, axis: int) -> tuple[Value, Value]:
    """Return the `count` smallest in order and their indices; NaN comes last."""
    dtype = g.dtype(x)
    wide = dtype if dtype.is_floating_point else torch.int64
    values, places = sorted_topk(g, g.cast(x, wide), g.shape_value([count]), axis, largest=False)
    dims = [count if i == axis else size for i, size in enumerate(g.dims(x))]
    return g.cast(g.shaped(values, dims), dtype), g.shaped(places, dims)


def _gather_along(g: Builder, x: Value, axis: int, place: Value) -> Value:
    dims = [1 if i == axis else size for i, size in enumerate(g.dims(x))]
    return g.shaped(g.GatherElements(x, place, axis=axis), dims)


def _squeeze_results(g: Builder, axis: int, keepdim: bool, *results: Value) -> tuple[Value, ...]:
    return results if keepdim else tuple(g.squeeze(x, [axis]) for x in results)


@aten("kthvalue")
def kthvalue(g: Builder, x: Value, k: Dim, dim: int = -1, keepdim: bool = False) -> tuple[Value, ...]:
    if not g.rank(x):
        return x, g.scalar(0, torch.int64)
    axis = g.axis(x, dim)
    results = (_last_of(g, v, axis, k) for v in _smallest(g, x, k, axis))
    return _squeeze_results(g, axis, keepdim, *results)


def _last_of(g: Builder, x: Value, axis: int, count: Dim) -> Value:
    dims = [1 if i == axis else size for i, size in enumerate(g.dims(x))]
    return g.shaped(g.slice(x, axis, count - 1, count), dims)


@aten("median.dim")
def median_dim(g: Builder, x: Value, dim: int, keepdim: bool = False) -> tuple[Value, ...]:
    if not g.rank(x):
        return x, g.scalar(0, torch.int64)
    axis = g.axis(x, dim)
    half: Dim = _median_rank(g.dims(x)[axis] + 1)
    value, place = (_last_of(g, v, axis, half) for v in _smallest(g, x, half, axis))
    if g.dtype(x).is_floating_point:
        # One NaN makes the median NaN, and torch returns its index.
        missing = g.Cast(g.IsNaN(x), dtype=ir.DataType.INT32)
        first = g.shaped(g.ArgMax(missing, axis=axis, keepdims=1), g.dims(place))
        broken = g.cast(_gather_along(g, missing, axis, first), torch.bool)
        value = g.Where(broken, g.scalar(float("nan"), g.dtype(x)), value)
        place = g.Where(broken, first, place)
    return _squeeze_results(g, axis, keepdim, value, place)


def _median_rank(size: Dim) -> Dim:
    return size // 2 if isinstance(size, int) else FloorDiv(size, 2)


@aten("nanmedian.dim")
def nanmedian_dim(g: Builder, x: Value, dim: int, keepdim: bool = False) -> tuple[Value, ...]:
    if not g.rank(x) or not g.dtype(x).is_floating_point:
        return median_dim(g, x, dim, keepdim)
    axis = g.axis(x, dim)
    ordered, places = _smallest(g, x, g.dims(x)[axis], axis)
    numbers = g.ReduceSum(g.cast(g.Not(g.IsNaN(x)), torch.int64), g.ints([axis]), keepdims=1)
    # The lower one of two in the middle; the first NaN if there is no number.
    middle = g.Div(g.Max(g.Sub(numbers, g.ints([1])), g.ints([0])), g.ints([2]))
    return _squeeze_results(g, axis, keepdim, *(_gather_along(g, v, axis, middle) for v in (ordered, places)))


@aten("median")
def median(g: Builder, x: Value) -> Value:
    return _flattened_median(g, x, median_dim)


@aten("nanmedian")
def nanmedian(g: Builder, x: Value) -> Value:
    return _flattened_median(g, x, nanmedian_dim)


def _flattened_median(g: Builder, x: Value, along: Callable[..., tuple[Value, ...]]) -> Value:
    if 0 in g.dims(x):
        if not g.dtype(x).is_floating_point:
            raise Unsupported("the median of an empty integer tensor")
        return g.scalar(float("nan"), g.dtype(x))
    return along(g, flat(g, x), 0)[0]


@aten("mode")
def mode(g: Builder, x: Value, dim: int = -1, keepdim: bool = False) -> tuple[Value, ...]:
    """Equal elements are adjacent when sorted: return the first of the longest runs, and the last index in it."""
    if not g.rank(x):
        return x, g.scalar(0, torch.int64)
    axis = g.axis(x, dim)
    size = g.dims(x)[axis]
    ordered, places = _smallest(g, x, size, axis)
    one, along = g.scalar(1, torch.int64), g.scalar(axis, torch.int64)
    run = g.Sub(g.CumSum(g.cast(_run_starts(g, ordered, axis), torch.int64), along), one)
    none, ones = (g.expand(g.scalar(n, torch.int64), g.dims(x)) for n in (0, 1))
    lengths = g.shaped(g.ScatterElements(none, run, ones, axis=axis, reduction="add"), g.dims(x))
    longest = g.ArgMax(lengths, axis=axis, keepdims=1)
    end = g.Sub(_gather_along(g, g.CumSum(lengths, along), axis, longest), one)
    return _squeeze_results(g, axis, keepdim, *(_gather_along(g, v, axis, end) for v in (ordered, places)))


def _run_starts(g: Builder, x: Value, axis: int) -> Value:
    """Return where an element differs from the one before it along the axis; the first does."""
    size = g.dims(x)[axis]
    if size == 0:
        return g.expand(g.scalar(True, torch.bool), g.dims(x))
    head = [1 if i == axis else n for i, n in enumerate(g.dims(x))]
    rest = [size - 1 if i == axis else n for i, n in enumerate(g.dims(x))]
    pair = [g.shaped(g.slice(x, axis, start, end), rest) for start, end in ((1, size), (0, size - 1))]
    first = g.expand(g.scalar(True, torch.bool), head)
    return g.shaped(g.Concat(first, g.Not(g.Equal(*pair)), axis=axis), g.dims(x))


# Unique elements. Their number depends on the data: torch gives it a symbol, which is read from the result.


def _counts(g: Builder, starts: Value, size: Dim) -> Value:
    """Return the lengths of the runs that begin at `starts`."""
    begins = g.Squeeze(g.NonZero(starts), g.ints([0]))
    ends = g.Concat(g.slice(begins, 0, 1, 2**62), g.shape_value([size]), axis=0)
    # Without elements there is no run, but an end.
    return g.Sub(ends, begins) if size != 0 else begins


def _run_indices(g: Builder, starts: Value) -> Value:
    """Return the index of the run of each position."""
    total = g.CumSum(g.cast(starts, torch.int64), g.scalar(0, torch.int64))
    return g.Sub(total, g.scalar(1, torch.int64))


@aten("_unique2")
def unique2(
    g: Builder, x: Value, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> tuple[Value | None, ...]:
    line = flat(g, x)
    size = g.dims(line)[0]
    if size == 0:
        raise Unsupported("the unique elements of an empty tensor")
    ordered, places = _smallest(g, line, size, 0)
    starts = _run_starts(g, ordered, 0)
    inverse = None
    if return_inverse:
        scattered = g.ScatterElements(places, places, _run_indices(g, starts), axis=0)
        inverse = g.reshape(g.shaped(scattered, [size]), g.dims(x))
    counts = _counts(g, starts, size) if return_counts else None
    return g.Compress(ordered, starts, axis=0), inverse, counts


@aten("unique_consecutive")
def unique_consecutive(
    g: Builder, x: Value, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> tuple[Value | None, ...]:
    line = flat(g, x) if dim is None or not g.rank(x) else x
    axis = 0 if dim is None else g.axis(x, dim)
    size = g.dims(line)[axis]
    if 0 in g.dims(line):
        raise Unsupported("the unique elements of an empty tensor")
    starts = _run_starts(g, line, axis)
    others = [i for i in range(g.rank(line)) if i != axis]
    if others:
        wide = g.ReduceMax(g.Cast(starts, dtype=ir.DataType.INT32), g.ints(others), keepdims=0)
        starts = g.shaped(g.cast(wide, torch.bool), [size])
    inverse = counts = None
    if return_inverse or dim is not None:  # along a dimension, torch always returns them
        inverse = g.reshape(_run_indices(g, starts), g.dims(x) if dim is None else [size])
    if return_counts or dim is not None:
        counts = _counts(g, starts, size)
    return g.Compress(line, starts, axis=axis), inverse, counts


@aten("unique_dim")
def unique_dim(
    g: Builder,
    x: Value,
    dim: int,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
) -> tuple[Value, ...]:
    """Return slices in lexicographic order, undefined for NaN as in torch; torch always returns all results."""
    if 0 in g.dims(x) or not g.rank(x):
        raise Unsupported("the unique slices of an empty tensor")
    dtype = g.dtype(x)
    wide = (torch.float64 if dtype == torch.float64 else torch.float32) if dtype.is_floating_point else torch.int64
    values, *rest = g.several("Unique", 4, [g.cast(x, wide)], axis=g.axis(x, dim), sorted=1)
    for value in rest:
        value.type = ir.TensorType(ir.DataType.INT64)
    return g.cast(values, dtype), rest[1], rest[2]


@aten("nonzero_static")
def nonzero_static(g: Builder, x: Value, *, size: Dim, fill_value: int = -1) -> Value:
    dims = [size, g.rank(x)]
    coordinates = g.Transpose(g.NonZero(x), perm=[1, 0])
    padding = g.expand(g.scalar(fill_value, torch.int64), dims)
    return g.slice(g.Concat(coordinates, padding, axis=0), 0, 0, size)


@aten("repeat_interleave.Tensor")
def repeat_interleave(g: Builder, repeats: Value, *, output_size: Operand | None = None) -> Value:
    """Position j is the number of elements whose repetitions end before it: marks at the ends, summed."""
    size = g.dims(repeats)[0]
    if size == 0:
        raise Unsupported("repeating an empty tensor")
    ends = g.shaped(g.CumSum(g.cast(repeats, torch.int64), g.scalar(0, torch.int64)), [size])
    total = g.slice(ends, 0, size - 1, size)
    zeros = g.Expand(g.scalar(0, torch.int64), g.Add(total, g.ints([1])))
    marks = g.ScatterElements(zeros, ends, g.expand(g.scalar(1, torch.int64), [size]), axis=0, reduction="add")
    marks = g.Slice(marks, g.ints([0]), total, g.ints([0]))
    return g.cast(g.CumSum(marks, g.scalar(0, torch.int64)), g.out.dtype)


# Histograms


@aten("histogram.bins_tensor")
def histogram(
    g: Builder, x: Value, bins: Value, *, weight: Value | None = None, density: bool = False
) -> tuple[Value, Value]:
    count, dtype = g.dims(bins)[0] - 1, g.dtype(x)
    if not isinstance(count, int):
        raise Unsupported("a symbolic number of bins")
    line = flat(g, x)
    last = g.shaped(g.slice(bins, 0, count, count + 1), [1])
    # A bin before the first edge and one after the last are discarded; the last edge itself counts.
    place = g.Where(g.Equal(line, last), g.scalar(count, torch.int64), insertion_index(g, bins, line, right=True))
    weights = g.expand(g.scalar(1, dtype), g.dims(line)) if weight is None else flat(g, g.cast(weight, dtype))
    none = g.expand(g.scalar(0, dtype), [count + 2])
    counts = none if 0 in g.dims(x) else g.ScatterElements(none, place, weights, axis=0, reduction="add")
    counts = g.shaped(g.slice(counts, 0, 1, count + 1), [count])
    return (_density(g, counts, bins, count) if density else counts), bins


def _density(g: Builder, counts: Value, bins: Value, count: int) -> Value:
    widths = g.Sub(*(g.shaped(g.slice(bins, 0, i, count + i), [count]) for i in (1, 0)))
    return g.Div(counts, g.Mul(widths, g.ReduceSum(counts, g.ints([0]), keepdims=1)))


@aten("histogram.bin_ct")
def histogram_of_equal_bins(
    g: Builder,
    x: Value,
    bins: int = 100,
    *,
    range: Sequence[float] | None = None,
    weight: Value | None = None,
    density: bool = False,
) -> tuple[Value, Value]:
    if range is None or range[0] == range[1]:
        raise Unsupported("bins between the smallest and the largest element, whose edges engines round differently")
    edges = torch.linspace(range[0], range[1], bins + 1, dtype=g.dtype(x))
    return histogram(g, x, g.constant(dtypes.to_array(edges)), weight=weight, density=density)
