"""Operators that only move elements."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
import sympy

from sardonyx.native.nests import count
from sardonyx.native.operators.indexing import gather_along
from sardonyx.native.region import CannotLower, Lowering, constant_of
from sardonyx.native.table import INT64, constants, indices_along, int_of, ints_of, lowers, operand, optional, text_of
from sardonyx.native.values import Number, Value, dim_of
from sardonyx.sizes import Dim, Dims


@lowers("Identity")
def _identity(r: Lowering, node: ir.Node) -> None:
    r.define(node.outputs[0], operand(r, node, 0))


@lowers("Reshape", "Flatten")
def _reshape(r: Lowering, node: ir.Node) -> None:
    source = node.inputs[0]
    assert source is not None
    x = r.operand(source)
    r.define(node.outputs[0], r.reshape(x, _target_shape(r, node, x.dims)))


def _target_shape(r: Lowering, node: ir.Node, dims: Dims) -> Dims:
    """Return the requested shape of a Reshape or Flatten if it is constant, else the inferred one."""
    if node.op_type == "Flatten":
        axis = int_of(node, "axis", 1)
        axis += len(dims) if axis < 0 else 0
        return (count(dims[:axis]), count(dims[axis:]))
    shape = node.inputs[1]
    requested = constant_of(shape) if shape is not None else None
    if requested is None or 0 in dims or int_of(node, "allowzero", 0):
        return r.dims(node.outputs[0])
    sizes: list[Dim] = [dims[i] if size == 0 else int(size) for i, size in enumerate(requested)]
    if -1 in sizes:
        position = sizes.index(-1)
        rest = sympy.cancel(sympy.sympify(count(dims)) / count([*sizes[:position], *sizes[position + 1 :]]))
        if sympy.denom(rest) != 1:
            return r.dims(node.outputs[0])
        sizes[position] = dim_of(rest)
    return tuple(sizes)


@lowers("Squeeze")
def _squeeze(r: Lowering, node: ir.Node) -> None:
    x = operand(r, node, 0)
    axes = constants(node, 1, "axes")
    if axes is None and not all(isinstance(dim, int) for dim in x.dims):
        raise CannotLower("Squeeze of sizes that may or may not be one")
    chosen = [axis % len(x.dims) for axis in axes] if axes is not None else [i for i, d in enumerate(x.dims) if d == 1]
    if any(x.dims[axis] != 1 for axis in chosen):
        raise CannotLower("Squeeze of a size that may not be one")
    r.define(node.outputs[0], r.squeeze(x, chosen))


@lowers("Unsqueeze")
def _unsqueeze(r: Lowering, node: ir.Node) -> None:
    x = operand(r, node, 0)
    axes = constants(node, 1, "axes") or []
    rank = len(x.dims) + len(axes)
    r.define(node.outputs[0], r.unsqueeze(x, [axis % rank for axis in axes]))


@lowers("Expand")
def _expand(r: Lowering, node: ir.Node) -> None:
    x, dims = operand(r, node, 0), r.dims(node.outputs[0])
    if any(have not in (1, want) for have, want in zip(reversed(x.dims), reversed(dims), strict=False)):
        raise CannotLower(f"sizes {x.dims} and {dims} that may or may not be equal")
    r.define(node.outputs[0], r.expand(x, dims))


@lowers("Tile")
def _tile(r: Lowering, node: ir.Node) -> None:
    """Insert an axis before each repeated one, and expand it."""
    x, repeats = operand(r, node, 0), constants(node, 1)
    assert repeats is not None
    interleaved: list[Dim] = []
    for times, dim in zip(repeats, x.dims, strict=True):
        interleaved += [times, dim]
    spread = r.expand(r.unsqueeze(x, range(0, len(interleaved), 2)), tuple(interleaved))
    r.define(node.outputs[0], r.reshape(spread, tuple(dim_of(n * d) for n, d in zip(repeats, x.dims, strict=True))))


@lowers("Transpose")
def _transpose(r: Lowering, node: ir.Node) -> None:
    x = operand(r, node, 0)
    r.define(node.outputs[0], r.permute(x, ints_of(node, "perm", list(range(len(x.dims)))[::-1])))


@lowers("Concat")
def _concat(r: Lowering, node: ir.Node) -> None:
    pieces = [r.operand(x) for x in node.inputs if x is not None]
    axis = int_of(node, "axis", 0) % len(pieces[0].dims)
    other_dims = {(*piece.dims[:axis], *piece.dims[axis + 1 :]) for piece in pieces}
    if len(other_dims) > 1:
        raise CannotLower(f"Concat of sizes {[piece.dims for piece in pieces]} that may or may not be equal")
    total = dim_of(sum(piece.dims[axis] for piece in pieces))
    r.define(node.outputs[0], r.concat(pieces, axis, (*pieces[0].dims[:axis], total, *pieces[0].dims[axis + 1 :])))


@lowers("Split")
def _split(r: Lowering, node: ir.Node) -> None:
    x = operand(r, node, 0)
    axis = int_of(node, "axis", 0) % len(x.dims)
    sizes = _split_sizes(r, node, x.dims[axis], axis)
    if dim_of(sum(sizes)) != x.dims[axis] and constants(node, 1) is None:
        raise CannotLower(f"a Split of {x.dims[axis]} into {sizes}")
    start: Dim = 0
    for output, size in zip(node.outputs, sizes, strict=True):
        r.define(output, r.slice(x, axis, start, 1, size))
        start = dim_of(start + size)


def _split_sizes(r: Lowering, node: ir.Node, size: Dim, axis: int) -> Sequence[Dim]:
    sizes = constants(node, 1)
    if sizes is not None:
        for rest in (size - sum(sizes), sum(sizes) - size):
            r.require(dim_of(rest))
        return sizes
    if not isinstance(size, int):
        return [r.dims(output)[axis] for output in node.outputs]
    each = -(-size // len(node.outputs))
    return [each] * (len(node.outputs) - 1) + [size - each * (len(node.outputs) - 1)]


@lowers("Slice")
def _slice(r: Lowering, node: ir.Node) -> None:
    x = operand(r, node, 0)
    starts, ends = constants(node, 1), constants(node, 2)
    assert starts is not None
    assert ends is not None
    axes = constants(node, 3) or list(range(len(starts)))
    steps = constants(node, 4) or [1] * len(starts)
    for start, end, step, axis in zip(starts, ends, steps, axes, strict=True):
        axis %= len(x.dims)
        size = x.dims[axis]
        if not isinstance(size, int):
            x = _slice_symbolic(r, x, axis, (start, end, step), r.dims(node.outputs[0])[axis])
            continue
        selected = range(size)[start:end:step]
        x = r.slice(x, axis, selected.start if selected else 0, step, len(selected))
    r.define(node.outputs[0], x)


def _slice_symbolic(r: Lowering, x: Value, axis: int, part: tuple[int, int, int], size: Dim) -> Value:
    """Slice a symbolic axis to the size inferred by the graph, which is required at each call."""
    start, _, step = part
    if step < 1:
        raise CannotLower("a Slice with a negative step of a symbolic size")
    begin = dim_of(x.dims[axis] + start) if start < 0 else start
    for least in (begin, size, dim_of(x.dims[axis] - begin - (size - 1) * step - 1)):
        r.require(least)
    return r.slice(x, axis, begin, step, size)


@lowers("Pad")
def _pad(r: Lowering, node: ir.Node) -> None:
    mode = text_of(node, "mode", "constant")
    x, fill = operand(r, node, 0), optional(r, node, 2) if mode == "constant" else None
    if fill is not None and not isinstance(fill, Number):
        raise CannotLower("Pad with a value that is not constant")
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
            x = _pad_by_index(r, x, axis, before, size, mode)
        elif before or after:
            x = r.pad(x, axis, before, size, number)
    r.define(node.outputs[0], x)


def _pad_by_index(r: Lowering, x: Value, axis: int, before: int, size: Dim, mode: str) -> Value:
    """Pad an axis in edge, wrap or reflect mode, by computing the source index."""
    position = indices_along(r, size, len(x.dims), axis)
    position = r.apply("sub", position, r.number(before, position))
    last, zero = Number(dim_of(x.dims[axis] - 1), (), INT64), r.number(0, position)
    if mode == "edge":
        position = r.apply("min", r.apply("max", position, zero), last)
    elif mode == "wrap":
        position = r.apply("mod", position, Number(x.dims[axis], (), INT64))
    else:
        period = Number(dim_of(2 * last.value), (), INT64)
        position = r.apply("mod", position, period)
        position = r.apply("min", position, r.apply("sub", period, position))
    return gather_along(r, x, axis, position, 1)


@lowers("DepthToSpace", "SpaceToDepth")
def _blocks(r: Lowering, node: ir.Node) -> None:
    """Move blocks of an image to channels, or back."""
    x, size = operand(r, node, 0), int_of(node, "blocksize", 1)
    n, c, h, w = x.dims
    to_depth = node.op_type == "SpaceToDepth"
    if not all(isinstance(dim, int) for dim in ((h, w) if to_depth else (c,))):
        raise CannotLower(f"{node.op_type} of symbolic sizes")
    if to_depth:
        permutation = [0, 3, 5, 1, 2, 4] if text_of(node, "mode", "DCR") == "DCR" else [0, 1, 3, 5, 2, 4]
        dims = (n, c, h // size, size, w // size, size)
    elif text_of(node, "mode", "DCR") == "DCR":
        permutation, dims = [0, 3, 4, 1, 5, 2], (n, size, size, c // size**2, h, w)
    else:
        permutation, dims = [0, 1, 4, 2, 5, 3], (n, c // size**2, size, size, h, w)
    result_dims = (n, c * size**2, h // size, w // size) if to_depth else (n, c // size**2, h * size, w * size)
    r.define(node.outputs[0], r.reshape(r.permute(r.view_as(x, dims), permutation), tuple(map(dim_of, result_dims))))
