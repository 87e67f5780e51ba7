"""Segments of sequences, each reduced to one element."""

from __future__ import annotations

import math

import onnx_ir as ir
import torch

from sardonyx import dtypes
from sardonyx.errors import Unsupported
from sardonyx.translate.aten.scatter import scatter_combined
from sardonyx.translate.aten.search import insertion_index
from sardonyx.translate.builder import Builder
from sardonyx.translate.table import aten

Value = ir.Value
_REDUCTIONS = {"sum": ("add", 0.0), "mean": ("add", 0.0), "prod": ("mul", 1.0)}
_EXTREMES = {"max": ("max", -math.inf), "min": ("min", math.inf)}


def _all_segments(g: Builder, x: Value, axis: int, offsets: Value, reduction: str, initial: float) -> Value:
    """Combine the elements from each offset to the next; there is a segment before the first offset, too."""
    length = g.dims(x)[axis]
    if not isinstance(length, int) or not length:
        raise Unsupported("segments of a sequence that is empty or of symbolic length")
    begun = insertion_index(g, g.unsqueeze(offsets, [-2]), g.ints(range(length)), right=True)
    dims = g.dims(offsets)[:-1]
    piece = g.reshape(g.shaped(begun, [*dims, length]), [*dims, length] + [1] * (g.rank(x) - axis - 1))
    start = g.expand(g.scalar(initial, g.dtype(x)), [*dims, g.dims(offsets)[-1] + 1, *g.dims(x)[axis + 1 :]])
    return scatter_combined(g, start, axis, g.expand(piece, g.dims(x)), x, reduction)


def _inner_segments(g: Builder, x: Value, axis: int, count: int) -> Value:
    """Drop the segment before the first offset, and those after the last."""
    dims = [count if i == axis else size for i, size in enumerate(g.dims(x))]
    return g.shaped(g.slice(x, axis, 1, count + 1), dims)


@aten("segment_reduce")
def segment_reduce(
    g: Builder,
    data: Value,
    reduce: str,
    *,
    lengths: Value | None = None,
    indices: Value | None = None,
    offsets: Value | None = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: float | None = None,
) -> Value:
    if offsets is None:
        if lengths is None:
            raise Unsupported("segments by index")
        offsets = _offsets(g, lengths)
    count = g.dims(offsets)[-1] - 1
    if not isinstance(count, int):
        raise Unsupported("a symbolic number of segments")
    dtype = dtypes.accumulation_dtype(g.dtype(data))
    reduction, neutral = {**_REDUCTIONS, **_EXTREMES}[reduce]
    x, start = g.cast(data, dtype), neutral if initial is None else float(initial)
    result = _inner_segments(g, _all_segments(g, x, axis, offsets, reduction, start), axis, count)
    if reduce in _EXTREMES:
        return _with_nan(g, result, x, axis, offsets, count)
    return result if reduce != "mean" else _mean(g, result, offsets, axis, initial is None)


def _offsets(g: Builder, lengths: Value) -> Value:
    wide = g.cast(lengths, torch.int64)
    *dims, count = g.dims(lengths)
    first = g.expand(g.scalar(0, torch.int64), [*dims, 1])
    ends = g.CumSum(wide, g.scalar(len(dims), torch.int64))
    return g.shaped(g.Concat(first, ends, axis=-1), [*dims, count + 1])


def _with_nan(g: Builder, result: Value, x: Value, axis: int, offsets: Value, count: int) -> Value:
    """Return NaN where a segment has one: engines skip NaN in extremes, torch propagates it."""
    missing = g.cast(g.IsNaN(x), g.dtype(x))
    broken = _inner_segments(g, _all_segments(g, missing, axis, offsets, "add", 0), axis, count)
    return g.Where(g.cast(broken, torch.bool), g.scalar(math.nan, g.dtype(x)), result)


def _mean(g: Builder, total: Value, offsets: Value, axis: int, empty_is_nan: bool) -> Value:
    *dims, edges = g.dims(offsets)
    ends, starts = (g.slice(offsets, axis, i, edges - 1 + i) for i in (1, 0))
    lengths = g.shaped(g.Sub(ends, starts), [*dims, edges - 1])
    lengths = g.cast(g.unsqueeze(lengths, range(axis + 1, g.rank(total))), g.dtype(total))
    # An empty segment keeps its initial value.
    return g.Div(total, lengths if empty_is_nan else g.Max(lengths, g.scalar(1, g.dtype(total))))
