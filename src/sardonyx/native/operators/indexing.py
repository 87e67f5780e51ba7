"""Operators that look elements up, or compute with where they are."""

from __future__ import annotations

import onnx_ir as ir

from sardonyx.native.region import CannotLower, Lowering
from sardonyx.native.table import (
    INT64,
    given,
    int_of,
    lowers,
    negative,
    optional,
    places_along,
    to_type,
    where,
)
from sardonyx.native.values import Value, dim_of
from sardonyx.sizes import Dim


def looked_up(r: Lowering, x: Value, axis: int, index: Value, lead: int) -> Value:
    """Along an axis of x, which becomes `lead` others, the element that the index of each place names."""
    around = r.squeeze(r.cut(r.stored(x), axis, 0, 1, 1), [axis])
    seen = r.unsqueeze(around, range(axis, axis + lead))
    return r.gather(seen, r.stored(x), axis, index)


@lowers("Gather")
def _gather(r: Lowering, node: ir.Node) -> None:
    x, index = given(r, node, 0), given(r, node, 1)
    axis = int_of(node, "axis", 0) % len(x.dims)
    after = len(x.dims) - axis - 1
    rank = len(index.dims)
    wide = to_type(r, index, INT64)
    spread = r.unsqueeze(wide, [*range(axis), *range(axis + rank, axis + rank + after)])
    r.give(node.outputs[0], looked_up(r, x, axis, spread, rank))


@lowers("GatherElements")
def _gather_elements(r: Lowering, node: ir.Node) -> None:
    x, index = given(r, node, 0), to_type(r, given(r, node, 1), INT64)
    axis = int_of(node, "axis", 0) % len(x.dims)
    seen: Value = r.stored(x)
    for other, size in enumerate(index.dims):
        if other != axis and size != x.dims[other]:
            if not (isinstance(size, int) and isinstance(x.dims[other], int)):
                raise CannotLower("GatherElements of sizes that may or may not be equal")
            seen = r.cut(seen, other, 0, 1, size)
    r.give(node.outputs[0], r.gather(r.cut(seen, axis, 0, 1, 1), r.stored(x), axis, index))


@lowers("OneHot")
def _one_hot(r: Lowering, node: ir.Node) -> None:
    index, values, dims = given(r, node, 0), given(r, node, 2), r.dims(node.outputs[0])
    axis = int_of(node, "axis", -1) % len(dims)
    depth = dims[axis]
    if not isinstance(depth, int):
        raise CannotLower("OneHot of a symbolic depth")
    wrapped = where(r, negative(r, index), r.apply("add", index, r.number(depth, index)), index)
    place = to_type(r, places_along(r, depth, len(dims), axis), index.dtype)
    chosen = r.apply("equal", r.unsqueeze(wrapped, [axis]), place, dtype=ir.DataType.BOOL)
    off, on = (r.squeeze(r.cut(values, 0, i, 1, 1), [0]) for i in (0, 1))
    r.give(node.outputs[0], where(r, chosen, on, off))


@lowers("Trilu")
def _trilu(r: Lowering, node: ir.Node) -> None:
    """What is above a diagonal, or below it; elsewhere nothing."""
    x, shift = given(r, node, 0), optional(r, node, 1)
    rank = len(x.dims)
    row, column = (places_along(r, x.dims[axis], rank, axis) for axis in (rank - 2, rank - 1))
    if shift is not None:
        row = r.apply("add", row, shift if not shift.dims else r.squeeze(shift, [0]))
    upper = int_of(node, "upper", 1)
    inside = r.apply("less_equal", *((row, column) if upper else (column, row)), dtype=ir.DataType.BOOL)
    r.give(node.outputs[0], where(r, inside, x, r.number(0, x)))


@lowers("Range")
def _range(r: Lowering, node: ir.Node) -> None:
    start, step, dims = given(r, node, 0), given(r, node, 2), r.dims(node.outputs[0])
    place = to_type(r, r.places(dims), start.dtype)
    r.give(node.outputs[0], r.apply("add", start, r.apply("mul", place, step)))


# Rotary embedding


@lowers("RotaryEmbedding")
def _rotary(r: Lowering, node: ir.Node) -> None:
    """The first elements of each head, in pairs, turned by an angle for each place."""
    x = given(r, node, 0)
    flat = len(x.dims) == 3
    if flat:
        heads = int_of(node, "num_heads", 0)
        batch, length, hidden = x.dims
        if not heads or not isinstance(hidden, int):
            raise CannotLower("RotaryEmbedding without the number of heads")
        x = r.seen(x, (batch, length, heads, hidden // heads))
    else:
        x = r.permute(x, [0, 2, 1, 3])
    size = x.dims[3]
    turned = int_of(node, "rotary_embedding_dim", 0) or size
    if not isinstance(size, int):
        raise CannotLower("RotaryEmbedding of a symbolic size")
    half = turned // 2
    cos, sin = (r.unsqueeze(r.cut(_angles(r, node, i), 2, 0, 1, half), [2]) for i in (1, 2))
    result = _turned(r, x, cos, sin, half, interleaved=bool(int_of(node, "interleaved", 0)))
    if turned < size:
        result = r.joined([result, r.cut(x, 3, turned, 1, size - turned)], 3, x.dims)
    shown = r.reshape(result, r.dims(node.outputs[0])) if flat else r.permute(result, [0, 2, 1, 3])
    r.give(node.outputs[0], shown)


def _angles(r: Lowering, node: ir.Node, index: int) -> Value:
    """Cosines or sines, for each place of each sequence."""
    cache, places = given(r, node, index), optional(r, node, 3)
    if places is None:
        return cache
    return looked_up(r, cache, 0, r.unsqueeze(places, [2]), 2)


def _turned(r: Lowering, x: Value, cos: Value, sin: Value, half: Dim, *, interleaved: bool) -> Value:
    step = 2 if interleaved else 1
    a, b = (r.cut(x, 3, start, step, half) for start in (0, 1 if interleaved else half))
    real = r.apply("sub", r.apply("mul", cos, a), r.apply("mul", sin, b))
    other = r.apply("add", r.apply("mul", sin, a), r.apply("mul", cos, b))
    whole = dim_of(2 * half)
    if interleaved:
        pairs = r.joined([r.unsqueeze(v, [4]) for v in (real, other)], 4, (*real.dims, 2))
        return r.seen(pairs, (*real.dims[:3], whole))
    return r.joined([real, other], 3, (*real.dims[:3], whole))
