"""Operators that gather elements, or compute with indices."""

from __future__ import annotations

import onnx_ir as ir

from sardonyx.native.region import CannotLower, Lowering
from sardonyx.native.table import (
    INT64,
    indices_along,
    int_of,
    lowers,
    negative,
    operand,
    optional,
    to_type,
    where,
)
from sardonyx.native.values import Value, dim_of
from sardonyx.sizes import Dim


def gather_along(r: Lowering, x: Value, axis: int, index: Value, lead: int) -> Value:
    """Gather along an axis of x, which becomes `lead` others, by the index at each position."""
    without_axis = r.squeeze(r.slice(r.stored(x), axis, 0, 1, 1), [axis])
    view = r.unsqueeze(without_axis, range(axis, axis + lead))
    return r.gather(view, r.stored(x), axis, index)


@lowers("Gather")
def _gather(r: Lowering, node: ir.Node) -> None:
    x, index = operand(r, node, 0), operand(r, node, 1)
    axis = int_of(node, "axis", 0) % len(x.dims)
    after = len(x.dims) - axis - 1
    rank = len(index.dims)
    wide = to_type(r, index, INT64)
    spread = r.unsqueeze(wide, [*range(axis), *range(axis + rank, axis + rank + after)])
    r.define(node.outputs[0], gather_along(r, x, axis, spread, rank))


@lowers("GatherElements")
def _gather_elements(r: Lowering, node: ir.Node) -> None:
    x, index = operand(r, node, 0), to_type(r, operand(r, node, 1), INT64)
    axis = int_of(node, "axis", 0) % len(x.dims)
    view: Value = r.stored(x)
    for other, size in enumerate(index.dims):
        if other != axis and size != x.dims[other]:
            if not (isinstance(size, int) and isinstance(x.dims[other], int)):
                raise CannotLower("GatherElements of sizes that may or may not be equal")
            view = r.slice(view, other, 0, 1, size)
    r.define(node.outputs[0], r.gather(r.slice(view, axis, 0, 1, 1), r.stored(x), axis, index))


@lowers("OneHot")
def _one_hot(r: Lowering, node: ir.Node) -> None:
    index, values, dims = operand(r, node, 0), operand(r, node, 2), r.dims(node.outputs[0])
    axis = int_of(node, "axis", -1) % len(dims)
    depth = dims[axis]
    if not isinstance(depth, int):
        raise CannotLower("OneHot of a symbolic depth")
    wrapped = where(r, negative(r, index), r.apply("add", index, r.number(depth, index)), index)
    position = to_type(r, indices_along(r, depth, len(dims), axis), index.dtype)
    chosen = r.apply("equal", r.unsqueeze(wrapped, [axis]), position, dtype=ir.DataType.BOOL)
    off, on = (r.squeeze(r.slice(values, 0, i, 1, 1), [0]) for i in (0, 1))
    r.define(node.outputs[0], where(r, chosen, on, off))


@lowers("Trilu")
def _trilu(r: Lowering, node: ir.Node) -> None:
    """Keep the upper or lower triangle, and zero elsewhere."""
    x, shift = operand(r, node, 0), optional(r, node, 1)
    rank = len(x.dims)
    row, column = (indices_along(r, x.dims[axis], rank, axis) for axis in (rank - 2, rank - 1))
    if shift is not None:
        row = r.apply("add", row, shift if not shift.dims else r.squeeze(shift, [0]))
    upper = int_of(node, "upper", 1)
    inside = r.apply("less_equal", *((row, column) if upper else (column, row)), dtype=ir.DataType.BOOL)
    r.define(node.outputs[0], where(r, inside, x, r.number(0, x)))


@lowers("Range")
def _range(r: Lowering, node: ir.Node) -> None:
    start, step, dims = operand(r, node, 0), operand(r, node, 2), r.dims(node.outputs[0])
    position = to_type(r, r.indices(dims), start.dtype)
    r.define(node.outputs[0], r.apply("add", start, r.apply("mul", position, step)))


# Rotary embedding


@lowers("RotaryEmbedding")
def _rotary(r: Lowering, node: ir.Node) -> None:
    """Rotate the first elements of each head, in pairs, by an angle per position."""
    x = operand(r, node, 0)
    flat = len(x.dims) == 3
    if flat:
        heads = int_of(node, "num_heads", 0)
        batch, length, hidden = x.dims
        if not heads or not isinstance(hidden, int):
            raise CannotLower("RotaryEmbedding without the number of heads")
        x = r.view_as(x, (batch, length, heads, hidden // heads))
    else:
        x = r.permute(x, [0, 2, 1, 3])
    size = x.dims[3]
    rotary_size = int_of(node, "rotary_embedding_dim", 0) or size
    if not isinstance(size, int):
        raise CannotLower("RotaryEmbedding of a symbolic size")
    half = rotary_size // 2
    cos, sin = (r.unsqueeze(r.slice(_rotary_table(r, node, i), 2, 0, 1, half), [2]) for i in (1, 2))
    result = _rotate(r, x, cos, sin, half, interleaved=bool(int_of(node, "interleaved", 0)))
    if rotary_size < size:
        result = r.concat([result, r.slice(x, 3, rotary_size, 1, size - rotary_size)], 3, x.dims)
    output = r.reshape(result, r.dims(node.outputs[0])) if flat else r.permute(result, [0, 2, 1, 3])
    r.define(node.outputs[0], output)


def _rotary_table(r: Lowering, node: ir.Node, index: int) -> Value:
    """Return cosines or sines for each position of each sequence."""
    cache, positions = operand(r, node, index), optional(r, node, 3)
    if positions is None:
        return cache
    return gather_along(r, cache, 0, r.unsqueeze(positions, [2]), 2)


def _rotate(r: Lowering, x: Value, cos: Value, sin: Value, half: Dim, *, interleaved: bool) -> Value:
    step = 2 if interleaved else 1
    a, b = (r.slice(x, 3, start, step, half) for start in (0, 1 if interleaved else half))
    real = r.apply("sub", r.apply("mul", cos, a), r.apply("mul", sin, b))
    other = r.apply("add", r.apply("mul", sin, a), r.apply("mul", cos, b))
    size = dim_of(2 * half)
    if interleaved:
        pairs = r.concat([r.unsqueeze(v, [4]) for v in (real, other)], 4, (*real.dims, 2))
        return r.view_as(pairs, (*real.dims[:3], size))
    return r.concat([real, other], 3, (*real.dims[:3], size))
