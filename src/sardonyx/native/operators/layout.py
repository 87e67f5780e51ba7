"""Operators that move elements about."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
import sympy

from sardonyx.native.nests import count
from sardonyx.native.operators.indexing import looked_up
from sardonyx.native.region import CannotLower, Lowering, constant_of
from sardonyx.native.table import INT64, constants, given, int_of, ints_of, lowers, optional, places_along, text_of
from sardonyx.native.values import Number, Value, dim_of
from sardonyx.sizes import Dim, Dims


@lowers("Identity")
def _identity(r: Lowering, node: ir.Node) -> None:
    r.give(node.outputs[0], given(r, node, 0))


@lowers("Reshape", "Flatten")
def _reshape(r: Lowering, node: ir.Node) -> None:
    source = node.inputs[0]
    assert source is not None
    x = r.unread(source)
    r.give(node.outputs[0], r.reshape(x, _target(r, node, x.dims)))


def _target(r: Lowering, node: ir.Node, dims: Dims) -> Dims:
    """The sizes that a Reshape or Flatten asks for, as far as these are constants; else as inferred."""
    if node.op_type == "Flatten":
        axis = int_of(node, "axis", 1)
        axis += len(dims) if axis < 0 else 0
        return (count(dims[:axis]), count(dims[axis:]))
    shape = node.inputs[1]
    wanted = constant_of(shape) if shape is not None else None
    if wanted is None or 0 in dims or int_of(node, "allowzero", 0):
        return r.dims(node.outputs[0])
    sizes: list[Dim] = [dims[i] if size == 0 else int(size) for i, size in enumerate(wanted)]
    if -1 in sizes:
        at = sizes.index(-1)
        rest = sympy.cancel(sympy.sympify(count(dims)) / count([*sizes[:at], *sizes[at + 1 :]]))
        if sympy.denom(rest) != 1:
            return r.dims(node.outputs[0])
        sizes[at] = dim_of(rest)
    return tuple(sizes)


@lowers("Squeeze")
def _squeeze(r: Lowering, node: ir.Node) -> None:
    x = given(r, node, 0)
    axes = constants(node, 1, "axes")
    if axes is None and not all(isinstance(dim, int) for dim in x.dims):
        raise CannotLower("Squeeze of sizes that may or may not be one")
    chosen = [axis % len(x.dims) for axis in axes] if axes is not None else [i for i, d in enumerate(x.dims) if d == 1]
    if any(x.dims[axis] != 1 for axis in chosen):
        raise CannotLower("Squeeze of a size that may not be one")
    r.give(node.outputs[0], r.squeeze(x, chosen))


@lowers("Unsqueeze")
def _unsqueeze(r: Lowering, node: ir.Node) -> None:
    x = given(r, node, 0)
    axes = constants(node, 1, "axes") or []
    rank = len(x.dims) + len(axes)
    r.give(node.outputs[0], r.unsqueeze(x, [axis % rank for axis in axes]))


@lowers("Expand")
def _expand(r: Lowering, node: ir.Node) -> None:
    x, dims = given(r, node, 0), r.dims(node.outputs[0])
    if any(have not in (1, want) for have, want in zip(reversed(x.dims), reversed(dims), strict=False)):
        raise CannotLower(f"sizes {x.dims} and {dims} that may or may not be equal")
    r.give(node.outputs[0], r.expand(x, dims))


@lowers("Tile")
def _tile(r: Lowering, node: ir.Node) -> None:
    """Each axis that is repeated gets one before it, along which nothing changes."""
    x, repeats = given(r, node, 0), constants(node, 1)
    assert repeats is not None
    apart: list[Dim] = []
    for times, dim in zip(repeats, x.dims, strict=True):
        apart += [times, dim]
    spread = r.expand(r.unsqueeze(x, range(0, len(apart), 2)), tuple(apart))
    r.give(node.outputs[0], r.reshape(spread, tuple(dim_of(n * d) for n, d in zip(repeats, x.dims, strict=True))))


@lowers("Transpose")
def _transpose(r: Lowering, node: ir.Node) -> None:
    x = given(r, node, 0)
    r.give(node.outputs[0], r.permute(x, ints_of(node, "perm", list(range(len(x.dims)))[::-1])))


@lowers("Concat")
def _concat(r: Lowering, node: ir.Node) -> None:
    pieces = [r.unread(x) for x in node.inputs if x is not None]
    axis = int_of(node, "axis", 0) % len(pieces[0].dims)
    around = {(*piece.dims[:axis], *piece.dims[axis + 1 :]) for piece in pieces}
    if len(around) > 1:
        raise CannotLower(f"Concat of sizes {[piece.dims for piece in pieces]} that may or may not be equal")
    total = dim_of(sum(piece.dims[axis] for piece in pieces))
    r.give(node.outputs[0], r.joined(pieces, axis, (*pieces[0].dims[:axis], total, *pieces[0].dims[axis + 1 :])))


@lowers("Split")
def _split(r: Lowering, node: ir.Node) -> None:
    x = given(r, node, 0)
    axis = int_of(node, "axis", 0) % len(x.dims)
    sizes = _pieces(r, node, x.dims[axis], axis)
    if dim_of(sum(sizes)) != x.dims[axis] and constants(node, 1) is None:
        raise CannotLower(f"a Split of {x.dims[axis]} into {sizes}")
    start: Dim = 0
    for output, size in zip(node.outputs, sizes, strict=True):
        r.give(output, r.cut(x, axis, start, 1, size))
        start = dim_of(start + size)


def _pieces(r: Lowering, node: ir.Node, size: Dim, axis: int) -> Sequence[Dim]:
    """What a Split splits a size into."""
    given_sizes = constants(node, 1)
    if given_sizes is not None:
        for rest in (size - sum(given_sizes), sum(given_sizes) - size):
            r.require(dim_of(rest))
        return given_sizes
    if not isinstance(size, int):
        return [r.dims(output)[axis] for output in node.outputs]
    each = -(-size // len(node.outputs))
    return [each] * (len(node.outputs) - 1) + [size - each * (len(node.outputs) - 1)]


@lowers("Slice")
def _slice(r: Lowering, node: ir.Node) -> None:
    x = given(r, node, 0)
    starts, ends = constants(node, 1), constants(node, 2)
    assert starts is not None
    assert ends is not None
    axes = constants(node, 3) or list(range(len(starts)))
    steps = constants(node, 4) or [1] * len(starts)
    for start, end, step, axis in zip(starts, ends, steps, axes, strict=True):
        axis %= len(x.dims)
        size = x.dims[axis]
        if not isinstance(size, int):
            x = _sliced_symbolic(r, x, axis, (start, end, step), r.dims(node.outputs[0])[axis])
            continue
        taken = range(size)[start:end:step]
        x = r.cut(x, axis, taken.start if taken else 0, step, len(taken))
    r.give(node.outputs[0], x)


def _sliced_symbolic(r: Lowering, x: Value, axis: int, part: tuple[int, int, int], size: Dim) -> Value:
    """As much of a symbolic size as the graph says; at each call there has to be so much."""
    start, _, step = part
    if step < 1:
        raise CannotLower("a Slice backwards of a symbolic size")
    begin = dim_of(x.dims[axis] + start) if start < 0 else start
    for least in (begin, size, dim_of(x.dims[axis] - begin - (size - 1) * step - 1)):
        r.require(least)
    return r.cut(x, axis, begin, step, size)


@lowers("Pad")
def _pad(r: Lowering, node: ir.Node) -> None:
    mode = text_of(node, "mode", "constant")
    x, fill = given(r, node, 0), optional(r, node, 2) if mode == "constant" else None
    if fill is not None and not isinstance(fill, Number):
        raise CannotLower("Pad with a number that is no constant")
    number = 0 if fill is None else fill.value
    assert not isinstance(number, sympy.Expr)
    amounts = constants(node, 1)
    axes = constants(node, 3) or list(range(len(x.dims)))
    assert amounts is not None
    for axis, before, after in zip(axes, amounts[: len(axes)], amounts[len(axes) :], strict=True):
        axis %= len(x.dims)
        if before < 0 or after < 0:
            r.require(dim_of(x.dims[axis] + min(before, 0) + min(after, 0)))
        size = dim_of(x.dims[axis] + before + after)
        if mode != "constant" and (before or after):
            x = _repeated(r, x, axis, before, size, mode)
        elif before or after:
            x = r.pad(x, axis, before, size, number)
    r.give(node.outputs[0], x)


def _repeated(r: Lowering, x: Value, axis: int, before: int, size: Dim, mode: str) -> Value:
    """An axis that goes on beyond its ends with what is at them, with the same again, or with the same backwards."""
    place = places_along(r, size, len(x.dims), axis)
    place = r.apply("sub", place, r.number(before, place))
    last, zero = Number(dim_of(x.dims[axis] - 1), (), INT64), r.number(0, place)
    if mode == "edge":
        place = r.apply("min", r.apply("max", place, zero), last)
    elif mode == "wrap":
        place = r.apply("mod", place, Number(x.dims[axis], (), INT64))
    else:
        there_and_back = Number(dim_of(2 * last.value), (), INT64)
        place = r.apply("mod", place, there_and_back)
        place = r.apply("min", place, r.apply("sub", there_and_back, place))
    return looked_up(r, x, axis, place, 1)


@lowers("DepthToSpace", "SpaceToDepth")
def _blocks(r: Lowering, node: ir.Node) -> None:
    """Blocks of an image and its channels change places."""
    x, size = given(r, node, 0), int_of(node, "blocksize", 1)
    n, c, h, w = x.dims
    to_depth = node.op_type == "SpaceToDepth"
    if not all(isinstance(dim, int) for dim in ((h, w) if to_depth else (c,))):
        raise CannotLower(f"{node.op_type} of symbolic sizes")
    if to_depth:
        order = [0, 3, 5, 1, 2, 4] if text_of(node, "mode", "DCR") == "DCR" else [0, 1, 3, 5, 2, 4]
        dims = (n, c, h // size, size, w // size, size)
    elif text_of(node, "mode", "DCR") == "DCR":
        order, dims = [0, 3, 4, 1, 5, 2], (n, size, size, c // size**2, h, w)
    else:
        order, dims = [0, 1, 4, 2, 5, 3], (n, c // size**2, size, size, h, w)
    whole = (n, c * size**2, h // size, w // size) if to_depth else (n, c // size**2, h * size, w * size)
    r.give(node.outputs[0], r.reshape(r.permute(r.seen(x, dims), order), tuple(map(dim_of, whole))))
