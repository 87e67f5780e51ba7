"""Gathering, scattering and indexing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import torch

from sardonyx.translate import dtypes
from sardonyx.translate.builder import Builder
from sardonyx.translate.errors import Unsupported
from sardonyx.translate.inference import broadcast
from sardonyx.translate.sizes import Dim
from sardonyx.translate.table import aten

Value = ir.Value


@aten("embedding")
def embedding(
    g: Builder, weight: Value, indices: Value, padding_idx: int = -1, scale_grad: bool = False, sparse: bool = False
) -> Value:
    return g.Gather(weight, indices, axis=0)


@aten("index_select")
def index_select(g: Builder, x: Value, dim: int, index: Value) -> Value:
    if not g.rank(x):
        return x
    index = g.reshape(index, [1]) if not g.rank(index) else index
    return g.Gather(x, index, axis=g.axis(x, dim))


@aten("gather")
def gather(g: Builder, x: Value, dim: int, index: Value, *, sparse_grad: bool = False) -> Value:
    if not g.rank(index):
        return x if not g.rank(x) else g.reshape(g.GatherElements(x, g.unsqueeze(index, [0]), axis=0), [])
    if not g.rank(x):
        return g.expand(x, g.dims(index))
    return g.GatherElements(x, index, axis=g.axis(x, dim))


# x[i, :, j]: advanced indexing


def _indexed(g: Builder, x: Value, indices: Sequence[Value | None]) -> tuple[list[int], list[Value], bool]:
    """Which axes are indexed, the indices broadcast together, and whether those axes are neighbours."""
    axes = [axis for axis, index in enumerate(indices) if index is not None]
    given = [index for index in indices if index is not None]
    if any(g.dtype(index) in (torch.bool, torch.uint8) for index in given):
        raise Unsupported("indexing by a mask, whose result has a data-dependent shape")
    adjacent = axes == list(range(axes[0], axes[-1] + 1))
    return axes, [g.cast(index, torch.int64) for index in given], adjacent


def _front(axes: Sequence[int], rank: int) -> list[int]:
    return [*axes, *(axis for axis in range(rank) if axis not in axes)]


@aten("index.Tensor", "_unsafe_index.Tensor")
def index(g: Builder, x: Value, indices: Sequence[Value | None]) -> Value:
    axes, given, adjacent = _indexed(g, x, indices)
    if len(given) == 1:
        return g.Gather(x, given[0], axis=axes[0])
    shape = broadcast(*map(g.dims, given))
    joined = _joined(g, given, shape)
    front = g.transpose(x, _front(axes, g.rank(x)))
    rest = g.dims(front)[len(axes) :]
    taken = g.shaped(g.GatherND(front, joined), [*shape, *rest])
    if not adjacent or axes[0] == 0:
        return taken
    # torch puts the indexed dimensions where the first indexed axis was.
    count, lead = len(shape), axes[0]
    order = [*range(count, count + lead), *range(count), *range(count + lead, len(g.dims(taken)))]
    return g.transpose(taken, order)


def _joined(g: Builder, given: Sequence[Value], shape: Sequence[Dim]) -> Value:
    """The indices as one tensor whose last axis holds a position, as GatherND and ScatterND take it."""
    columns = [g.unsqueeze(g.expand(index, shape), [-1]) for index in given]
    joined = columns[0] if len(columns) == 1 else g.Concat(*columns, axis=-1)
    return g.shaped(joined, [*shape, len(columns)])


@aten("index_put", "_unsafe_index_put")
def index_put(g: Builder, x: Value, indices: Sequence[Value | None], values: Value, accumulate: bool = False) -> Value:
    masks = [i for i in indices if i is not None and g.dtype(i) == torch.bool]
    if masks:
        return _masked_put(g, x, indices, values, accumulate)
    axes, given, adjacent = _indexed(g, x, indices)
    shape = broadcast(*map(g.dims, given))
    order = _front(axes, g.rank(x))
    front = g.transpose(x, order)
    rest = g.dims(front)[len(axes) :]
    updates = _updates(g, values, shape, rest, axes, adjacent)
    reduction = "add" if accumulate else None
    wide = dtypes.summing(g.dtype(x)) if accumulate else g.dtype(x)
    front, updates = g.cast(front, wide), g.cast(updates, wide)
    placed = g.cast(g.ScatterND(front, _joined(g, given, shape), updates, reduction=reduction), g.dtype(x))
    g.shaped(placed, g.dims(front))
    return g.transpose(placed, [order.index(axis) for axis in range(len(order))])


def _updates(
    g: Builder, values: Value, shape: Sequence[Dim], rest: Sequence[Dim], axes: Sequence[int], adjacent: bool
) -> Value:
    """`values` broadcast to what is assigned, with the indexed dimensions in front."""
    if not adjacent or axes[0] == 0:
        return g.expand(values, [*shape, *rest])
    lead, count = axes[0], len(shape)
    values = g.expand(values, [*rest[:lead], *shape, *rest[lead:]])
    return g.transpose(values, [*range(lead, lead + count), *range(lead), *range(lead + count, len(rest) + count)])


def _masked_put(g: Builder, x: Value, indices: Sequence[Value | None], values: Value, accumulate: bool) -> Value:
    mask = indices[0]
    if mask is None or len(indices) > 1:
        raise Unsupported("assigning under a mask beside other indices")
    values = g.cast(values, g.dtype(x))
    if accumulate:
        nothing = g.expand(g.scalar(0, g.dtype(x)), g.dims(x))
        added = _masked_put(g, nothing, indices, values, False)
        return g.Or(x, added) if g.dtype(x) == torch.bool else g.Add(x, added)
    rest = g.dims(x)[g.rank(mask) :]
    if g.rank(values) > len(rest):
        if g.dims(values)[0] != 1:
            return _masked_scatter(g, x, mask, values)
        values = g.squeeze(values, [0])
    return g.Where(g.unsqueeze(mask, range(g.rank(mask), g.rank(x))), values, x)


def _masked_scatter(g: Builder, x: Value, mask: Value, values: Value) -> Value:
    """Each marked place, of as many dimensions as the mask has, takes the next of the values."""
    rest = g.dims(x)[g.rank(mask) :]
    values = g.expand(values, [g.dims(values)[0], *rest])
    rank_of_place = g.CumSum(g.cast(flat(g, mask), torch.int64), g.scalar(0, torch.int64), exclusive=1)
    # Behind the last marked place the count runs out of the values; what it takes there is not used.
    source = g.Concat(values, g.expand(g.scalar(0, g.dtype(x)), [1, *rest]), axis=0)
    taken = g.reshape(g.Gather(source, rank_of_place, axis=0), g.dims(x))
    return g.Where(g.unsqueeze(mask, range(g.rank(mask), g.rank(x))), taken, x)


@aten("slice_scatter")
def slice_scatter(
    g: Builder, x: Value, src: Value, dim: int = 0, start: Dim | None = None, end: Dim | None = None, step: Dim = 1
) -> Value:
    axis = g.axis(x, dim)
    size = g.dims(x)[axis]
    if not all(isinstance(v, (int, type(None))) for v in (start, end, step, size)):
        raise Unsupported("slice_scatter over a symbolic size")
    positions = range(size)[slice(start, end, step)]
    if not positions:
        return x
    if len(positions) == size:
        return g.cast(g.expand(src, g.dims(x)), g.dtype(x))
    return _placed(g, x, src, axis, list(positions))


@aten("select_scatter")
def select_scatter(g: Builder, x: Value, src: Value, dim: int, index: int) -> Value:
    axis = g.axis(x, dim)
    size = g.dims(x)[axis]
    if not isinstance(size, int) or not isinstance(index, int):
        raise Unsupported("select_scatter over a symbolic size")
    return _placed(g, x, g.unsqueeze(src, [axis]), axis, [index % size])


def _placed(g: Builder, x: Value, src: Value, axis: int, positions: Sequence[int]) -> Value:
    dims = [len(positions) if i == axis else dim for i, dim in enumerate(g.dims(x))]
    shape = [len(positions) if i == axis else 1 for i in range(len(dims))]
    index = g.expand(g.reshape(g.ints(positions), shape), dims)
    return g.ScatterElements(x, index, g.expand(g.cast(src, g.dtype(x)), dims), axis=axis)


@aten("nonzero")
def nonzero(g: Builder, x: Value) -> Value:
    found = g.Transpose(g.NonZero(x if g.rank(x) else g.unsqueeze(x, [0])), perm=[1, 0])
    return found if g.rank(x) else g.slice(found, 1, 0, 0)  # a position in no dimensions has no coordinates


@aten("take")
def take(g: Builder, x: Value, index: Value) -> Value:
    return g.Gather(flat(g, x), index, axis=0)


def flat(g: Builder, x: Value) -> Value:
    """`x` with one dimension."""
    count: Dim = 1
    for dim in g.dims(x):
        count = count * dim
    return g.reshape(x, [count])


@aten("masked_select")
def masked_select(g: Builder, x: Value, mask: Value) -> Value:
    shape = broadcast(g.dims(x), g.dims(mask))
    return g.Compress(flat(g, g.expand(x, shape)), flat(g, g.expand(mask, shape)), axis=0)


@aten("diagonal_scatter")
def diagonal_scatter(g: Builder, x: Value, src: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    first, second = g.axis(x, dim1), g.axis(x, dim2)
    length = g.dims(src)[-1]
    if not isinstance(length, int):
        raise Unsupported("diagonal_scatter over a symbolic size")
    order = _front([first, second], g.rank(x))
    places = [i + start for i in range(length) for start in (max(-offset, 0), max(offset, 0))]
    index = g.constant(np.array(places, dtype=np.int64).reshape(length, 2))
    updates = g.transpose(g.cast(src, g.dtype(x)), [g.rank(src) - 1, *range(g.rank(src) - 1)])
    front = g.transpose(x, order)
    placed = g.shaped(g.ScatterND(front, index, updates), g.dims(front))
    return g.transpose(placed, [order.index(axis) for axis in range(len(order))])


def _places(g: Builder, size: Sequence[Dim], stride: Sequence[Dim], offset: Dim | None) -> np.ndarray:
    """Where in memory each element of a strided view of the operator's first operand lies."""
    viewed = g.operand(0)
    known = all(isinstance(v, int) for v in (*size, *stride, offset or 0, *viewed.shape))
    if not known or not viewed.is_contiguous() or viewed.storage_offset():
        raise Unsupported("strides of symbolic sizes, or into memory that is not contiguous")
    places = np.full(tuple(map(int, size)), int(offset or 0), dtype=np.int64)
    for axis, step in enumerate(stride):
        places += np.arange(int(size[axis])).reshape([-1 if i == axis else 1 for i in range(len(size))]) * int(step)
    if places.size and places.max() >= viewed.numel():
        raise Unsupported("strides that reach beyond the tensor")
    return places


@aten("as_strided_copy")
def as_strided_copy(
    g: Builder, x: Value, size: Sequence[Dim], stride: Sequence[Dim], storage_offset: Dim | None = None
) -> Value:
    return g.Gather(flat(g, x), g.constant(_places(g, size, stride, storage_offset)), axis=0)


@aten("as_strided_scatter")
def as_strided_scatter(
    g: Builder, x: Value, src: Value, size: Sequence[Dim], stride: Sequence[Dim], storage_offset: Dim | None = None
) -> Value:
    places = _places(g, size, stride, storage_offset).reshape(-1)
    if len(np.unique(places)) < len(places):
        raise Unsupported("writing more than once to the same place")
    placed = g.ScatterElements(flat(g, x), g.constant(places), flat(g, g.cast(src, g.dtype(x))), axis=0)
    return g.reshape(placed, g.dims(x))
