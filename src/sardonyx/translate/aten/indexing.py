"""Gathering, scattering and indexing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir
import torch

from sardonyx import dtypes
from sardonyx.errors import Unsupported
from sardonyx.sizes import Dim, dim_of
from sardonyx.translate.builder import Builder, Operand
from sardonyx.translate.table import aten

Value = ir.Value
_END = 2**63 - 1


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
    """Return the indexed axes, the indices, and whether those axes are adjacent."""
    axes = [axis for axis, index in enumerate(indices) if index is not None]
    present = [index for index in indices if index is not None]
    if any(g.dtype(index) in (torch.bool, torch.uint8) for index in present):
        raise Unsupported("indexing by a mask, whose result has a data-dependent shape")
    adjacent = axes == list(range(axes[0], axes[-1] + 1))
    return axes, [g.cast(index, torch.int64) for index in present], adjacent


def _front(axes: Sequence[int], rank: int) -> list[int]:
    return [*axes, *(axis for axis in range(rank) if axis not in axes)]


@aten("index.Tensor", "_unsafe_index.Tensor")
def index(g: Builder, x: Value, indices: Sequence[Value | None]) -> Value:
    axes, tensors, adjacent = _indexed(g, x, indices)
    if len(tensors) == 1:
        return g.Gather(x, tensors[0], axis=axes[0])
    shape = g.broadcast(*tensors)
    joined = _stack_indices(g, tensors, shape)
    front = g.transpose(x, _front(axes, g.rank(x)))
    rest = g.dims(front)[len(axes) :]
    gathered = g.shaped(g.GatherND(front, joined), [*shape, *rest])
    if not adjacent or axes[0] == 0:
        return gathered
    # torch puts the indexed dimensions where the first indexed axis was.
    count, lead = len(shape), axes[0]
    order = [*range(count, count + lead), *range(count), *range(count + lead, len(g.dims(gathered)))]
    return g.transpose(gathered, order)


def _stack_indices(g: Builder, tensors: Sequence[Value], shape: Sequence[Dim]) -> Value:
    """Stack the indices along a last axis, as GatherND and ScatterND need them."""
    columns = [g.unsqueeze(g.expand(index, shape), [-1]) for index in tensors]
    joined = columns[0] if len(columns) == 1 else g.Concat(*columns, axis=-1)
    return g.shaped(joined, [*shape, len(columns)])


@aten("index_put", "_unsafe_index_put")
def index_put(g: Builder, x: Value, indices: Sequence[Value | None], values: Value, accumulate: bool = False) -> Value:
    masks = [i for i in indices if i is not None and g.dtype(i) == torch.bool]
    if masks:
        return _masked_put(g, x, indices, values, accumulate)
    axes, tensors, adjacent = _indexed(g, x, indices)
    shape = g.broadcast(*tensors)
    order = _front(axes, g.rank(x))
    front = g.transpose(x, order)
    rest = g.dims(front)[len(axes) :]
    updates = _updates(g, values, shape, rest, axes, adjacent)
    if accumulate:
        placed = _accumulate(g, front, tensors, shape, updates)
    else:
        placed = g.ScatterND(front, _stack_indices(g, tensors, shape), g.cast(updates, g.dtype(x)))
    g.shaped(placed, g.dims(front))
    return g.transpose(placed, [order.index(axis) for axis in range(len(order))])


def _accumulate(g: Builder, front: Value, tensors: Sequence[Value], shape: Sequence[Dim], updates: Value) -> Value:
    """Add rows to `front` at indices along its first axes.

    This uses ScatterElements: ONNX Runtime's ScatterND loses updates when threads add at one index.
    """
    dtype, dims = g.dtype(front), g.dims(front)
    wide = dtypes.accumulation_dtype(dtype)
    sizes, width = dims[: len(tensors)], element_count(dims[len(tensors) :])
    index_flat = tensors[0] if len(tensors) == 1 else _from_front(g, tensors[0], sizes[0])
    for index, size in zip(tensors[1:], sizes[1:], strict=True):
        index_flat = g.Add(g.Mul(index_flat, g.scalar(size, torch.int64)), _from_front(g, index, size))
    count = element_count(shape)
    rows = g.reshape(g.cast(front, wide), [element_count(sizes), width])
    indices = g.expand(g.reshape(g.expand(index_flat, shape), [count, 1]), [count, width])
    summed = g.ScatterElements(rows, indices, g.reshape(g.cast(updates, wide), [count, width]), axis=0, reduction="add")
    return g.reshape(g.cast(g.shaped(summed, g.dims(rows)), dtype), dims)


def _from_front(g: Builder, index: Value, size: Dim) -> Value:
    """Return nonnegative indices: negative ones count from the end."""
    zero, end = (g.scalar(number, torch.int64) for number in (0, size))
    return g.Where(g.Less(index, zero), g.Add(index, end), index)


def _updates(
    g: Builder, values: Value, shape: Sequence[Dim], rest: Sequence[Dim], axes: Sequence[int], adjacent: bool
) -> Value:
    """Broadcast `values` to the shape of the assigned part, with the indexed dimensions in front."""
    if not adjacent or axes[0] == 0:
        return g.expand(values, [*shape, *rest])
    lead, count = axes[0], len(shape)
    values = g.expand(values, [*rest[:lead], *shape, *rest[lead:]])
    return g.transpose(values, [*range(lead, lead + count), *range(lead), *range(lead + count, len(rest) + count)])


def _masked_put(g: Builder, x: Value, indices: Sequence[Value | None], values: Value, accumulate: bool) -> Value:
    mask = indices[0]
    if mask is None or len(indices) > 1:
        raise Unsupported("assigning with a mask and other indices")
    values = g.cast(values, g.dtype(x))
    if accumulate:
        zeros = g.expand(g.scalar(0, g.dtype(x)), g.dims(x))
        added = _masked_put(g, zeros, indices, values, False)
        return g.Or(x, added) if g.dtype(x) == torch.bool else g.Add(x, added)
    rest = g.dims(x)[g.rank(mask) :]
    if g.rank(values) > len(rest):
        if g.dims(values)[0] != 1:
            return _masked_scatter(g, x, mask, values)
        values = g.squeeze(values, [0])
    return g.Where(g.unsqueeze(mask, range(g.rank(mask), g.rank(x))), values, x)


def _masked_scatter(g: Builder, x: Value, mask: Value, values: Value) -> Value:
    """Assign the next of the values to each marked position; the mask has the leading dimensions."""
    rest = g.dims(x)[g.rank(mask) :]
    values = g.expand(values, [g.dims(values)[0], *rest])
    rank_of_place = g.CumSum(g.cast(flat(g, mask), torch.int64), g.scalar(0, torch.int64), exclusive=1)
    # After the last marked position the count exceeds the values; what is gathered there is not used.
    source = g.Concat(values, g.expand(g.scalar(0, g.dtype(x)), [1, *rest]), axis=0)
    gathered = g.reshape(g.Gather(source, rank_of_place, axis=0), g.dims(x))
    return g.Where(g.unsqueeze(mask, range(g.rank(mask), g.rank(x))), gathered, x)


@aten("slice_scatter")
def slice_scatter(
    g: Builder, x: Value, src: Value, dim: int = 0, start: Dim | None = None, end: Dim | None = None, step: Dim = 1
) -> Value:
    axis = g.axis(x, dim)
    size = g.dims(x)[axis]
    if not isinstance(step, int):
        raise Unsupported("slice_scatter with a symbolic step")
    if not all(isinstance(v, (int, type(None))) for v in (start, end, size)):
        window = g.slice(positions(g, size), 0, 0 if start is None else start, _END if end is None else end, step)
        return _scatter_along(g, x, src, axis, g.shaped(window, [g.dims(src)[axis]]))
    places = range(size)[slice(start, end, step)]
    if not places:
        return x
    if len(places) == size:
        return g.cast(g.expand(src, g.dims(x)), g.dtype(x))
    return _scatter_along(g, x, src, axis, g.ints(places))


@aten("select_scatter")
def select_scatter(g: Builder, x: Value, src: Value, dim: int, index: Dim) -> Value:
    axis = g.axis(x, dim)
    return _scatter_along(g, x, g.unsqueeze(src, [axis]), axis, g.sizes.value(index))


def _scatter_along(g: Builder, x: Value, src: Value, axis: int, places: Value) -> Value:
    count = g.dims(places)[0]
    dims = [count if i == axis else dim for i, dim in enumerate(g.dims(x))]
    shape = [count if i == axis else 1 for i in range(len(dims))]
    index = g.expand(g.reshape(places, shape), dims)
    return g.ScatterElements(x, index, g.expand(g.cast(src, g.dtype(x)), dims), axis=axis)


@aten("index_fill.int_Scalar", "index_fill.int_Tensor")
def index_fill(g: Builder, x: Value, dim: int, index: Value, value: Operand) -> Value:
    return g.Where(mask_along(g, g.dims(x), dim, index), g.cast(value, g.out.dtype), x)


def mask_along(g: Builder, dims: Sequence[Dim], dim: int, index: Value) -> Value:
    """Return a mask of the indices along an axis, which broadcasts to these sizes; a scalar has one index."""
    axis, size = (dim % len(dims), dims[dim]) if dims else (0, 1)
    index = index if g.rank(index) else g.unsqueeze(index, [0])
    no, yes = (g.expand(g.scalar(marked, torch.bool), [count]) for marked, count in ((0, size), (1, g.dims(index)[0])))
    mask = g.shaped(g.ScatterElements(no, g.cast(index, torch.int64), yes, axis=0), [size])
    return g.reshape(mask, [size if i == axis else 1 for i in range(len(dims))])


@aten("slice_backward")
def slice_backward(
    g: Builder, grad: Value, input_sizes: Sequence[Dim], dim: int, start: Dim, end: Dim, step: Dim
) -> Value:
    axis = dim % len(input_sizes)
    size = input_sizes[axis]
    from_the_front = start >= 0 if isinstance(start, int) else bool(start.is_nonnegative)
    if step == 1 and from_the_front:
        return _between_zeros(g, grad, axis, start, size)
    if step == 1 and isinstance(start, int) and isinstance(size, int):
        return _between_zeros(g, grad, axis, max(size + start, 0), size)
    return slice_scatter(g, _zeros_like_result(g), grad, axis, start, end, step)


@aten("select_backward")
def select_backward(g: Builder, grad: Value, input_sizes: Sequence[Dim], dim: int, index: Dim) -> Value:
    axis = dim % len(input_sizes)
    if isinstance(index, int):
        place = index if index >= 0 else input_sizes[axis] + index
        return _between_zeros(g, g.unsqueeze(grad, [axis]), axis, place, input_sizes[axis])
    return select_scatter(g, _zeros_like_result(g), grad, axis, index)


def _between_zeros(g: Builder, x: Value, axis: int, start: Dim, size: Dim) -> Value:
    """Place `x` along an axis of the given size from `start` on, with zeros elsewhere."""
    rest = g.dim(size - start - g.dims(x)[axis])
    if start == 0 and rest == 0:
        return x
    return g.Pad(x, g.shape_value([start, rest]), None, g.ints([axis]))


def _zeros_like_result(g: Builder) -> Value:
    return g.expand(g.scalar(0, g.out.dtype), g.like(g.out))


def positions(g: Builder, size: Dim) -> Value:
    """Return 0, 1, 2, … along an axis of the given size."""
    if isinstance(size, int):
        return g.ints(range(size))
    return g.shaped(g.Range(*(g.scalar(number, torch.int64) for number in (0, size, 1))), [size])


@aten("nonzero")
def nonzero(g: Builder, x: Value) -> Value:
    coordinates = g.Transpose(g.NonZero(x if g.rank(x) else g.unsqueeze(x, [0])), perm=[1, 0])
    return coordinates if g.rank(x) else g.slice(coordinates, 1, 0, 0)  # an index of a scalar has no coordinates


@aten("take")
def take(g: Builder, x: Value, index: Value) -> Value:
    return g.Gather(flat(g, x), index, axis=0)


def flat(g: Builder, x: Value) -> Value:
    return g.reshape(x, [element_count(g.dims(x))])


def element_count(dims: Sequence[Dim]) -> Dim:
    return dim_of(math.prod(dims))


@aten("masked_select")
def masked_select(g: Builder, x: Value, mask: Value) -> Value:
    shape = g.broadcast(x, mask)
    values = g.cast(x, torch.float32) if g.dtype(x) == torch.bfloat16 else x  # Compress does not support bfloat16
    return g.cast(g.Compress(flat(g, g.expand(values, shape)), flat(g, g.expand(mask, shape)), axis=0), g.dtype(x))


@aten("masked_scatter")
def masked_scatter(g: Builder, x: Value, mask: Value, source: Value) -> Value:
    """Assign the elements of `source` in order to the marked positions."""
    shape = g.broadcast(x, mask)
    if 0 in (*shape, *g.dims(source)):
        return g.expand(x, shape)
    marked = g.expand(mask, shape)
    counted = g.CumSum(g.cast(flat(g, marked), torch.int64), g.scalar(0, torch.int64))
    rank_of_place = g.Max(g.Sub(counted, g.scalar(1, torch.int64)), g.scalar(0, torch.int64))
    gathered = g.shaped(g.Gather(flat(g, source), rank_of_place, axis=0), [element_count(shape)])
    return g.shaped(g.Where(marked, g.reshape(gathered, shape), x), shape)


@aten("masked_scatter_backward")
def masked_scatter_backward(g: Builder, grad: Value, mask: Value, sizes: Sequence[Dim]) -> Value:
    """Return the gradients at the marked positions, in order, and zeros for unused elements."""
    count = element_count(sizes)
    marked = flat(g, mask)
    rank_of_place = g.CumSum(g.cast(marked, torch.int64), g.scalar(0, torch.int64), exclusive=1)
    spare = g.scalar(count, torch.int64)  # one position more, for all that is not marked
    scattered = g.ScatterElements(
        g.expand(g.scalar(0, g.dtype(grad)), [count + 1]), g.Where(marked, rank_of_place, spare), flat(g, grad), axis=0
    )
    return g.reshape(g.shaped(g.slice(scattered, 0, 0, count), [count]), sizes)


def _diagonal_positions(g: Builder, length: Dim, offset: int) -> Value:
    """Return row and column of each element of a diagonal."""
    steps = g.unsqueeze(positions(g, length), [1])
    return g.shaped(g.Add(steps, g.ints([max(-offset, 0), max(offset, 0)])), [length, 2])


@aten("diagonal", "diagonal_copy")
def diagonal(g: Builder, x: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    front = g.transpose(x, _front([g.axis(x, dim1), g.axis(x, dim2)], g.rank(x)))
    *rest, length = g.like(g.out)
    gathered = g.shaped(g.GatherND(front, _diagonal_positions(g, length, offset)), [length, *rest])
    return g.transpose(gathered, [*range(1, len(rest) + 1), 0])


@aten("diagonal_scatter")
def diagonal_scatter(g: Builder, x: Value, src: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    order = _front([g.axis(x, dim1), g.axis(x, dim2)], g.rank(x))
    index = _diagonal_positions(g, g.dims(src)[-1], offset)
    updates = g.transpose(g.cast(src, g.dtype(x)), [g.rank(src) - 1, *range(g.rank(src) - 1)])
    front = g.transpose(x, order)
    placed = g.shaped(g.ScatterND(front, index, updates), g.dims(front))
    return g.transpose(placed, [order.index(axis) for axis in range(len(order))])
