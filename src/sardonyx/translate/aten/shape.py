"""Views, copies, concatenation, splitting and padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import sympy
import torch
from torch.utils._sympy.functions import PythonMod

from sardonyx.errors import Unsupported
from sardonyx.sizes import Dim
from sardonyx.translate.aten.indexing import flat, positions
from sardonyx.translate.builder import Builder
from sardonyx.translate.table import aten, prims

Value = ir.Value
_END = 2**63 - 1


@aten("view", "_unsafe_view", "reshape", "view_copy", "_reshape_copy", "unflatten.int")
def view(g: Builder, x: Value, *ignored: Any) -> Value:
    return g.reshape(x, g.like(g.out))


@aten("flatten.using_ints")
def flatten(g: Builder, x: Value, *ignored: Any) -> Value:
    return g.reshape(x, g.like(g.out))


@aten("squeeze", "squeeze.dim", "squeeze.dims", "squeeze_copy", "squeeze_copy.dim", "squeeze_copy.dims")
def squeeze(g: Builder, x: Value, dim: int | Sequence[int] | None = None) -> Value:
    dims = g.dims(x)
    chosen = range(len(dims)) if dim is None else [dim] if isinstance(dim, int) else dim
    axes = sorted({g.axis(x, d) for d in chosen}) if dims else []
    dropped = [axis for axis in axes if dims[axis] == 1]
    symbolic = [axis for axis in axes if not isinstance(dims[axis], int)]
    if symbolic and len(dims) - len(dropped) - len(symbolic) == g.out.dim():
        dropped += symbolic  # torch guards that they are 1 in this graph
    return g.squeeze(x, dropped)


@aten("unsqueeze", "unsqueeze_copy")
def unsqueeze(g: Builder, x: Value, dim: int) -> Value:
    return g.unsqueeze(x, [dim])


@aten("t", "t_copy", "numpy_T", "mT", "adjoint")
def t(g: Builder, x: Value) -> Value:
    axes = list(range(g.rank(x)))
    return g.transpose(x, [*axes[:-2], *reversed(axes[-2:])])


@aten("transpose.int", "transpose_copy.int")
def transpose(g: Builder, x: Value, dim0: int, dim1: int) -> Value:
    axes = list(range(g.rank(x)))
    if axes:
        a, b = g.axis(x, dim0), g.axis(x, dim1)
        axes[a], axes[b] = axes[b], axes[a]
    return g.transpose(x, axes)


@aten("permute", "permute_copy")
def permute(g: Builder, x: Value, dims: Sequence[int]) -> Value:
    return g.transpose(x, [g.axis(x, dim) for dim in dims])


@prims("transpose")
def prims_transpose(g: Builder, x: Value, permutation: Sequence[int]) -> Value:
    return g.transpose(x, permutation)


@aten("expand", "expand_copy")
def expand(g: Builder, x: Value, size: Sequence[Dim], *, implicit: bool = False) -> Value:
    return g.expand(x, g.like(g.out))


@prims("broadcast_in_dim")
def broadcast_in_dim(g: Builder, x: Value, shape: Sequence[Dim], broadcast_dimensions: Sequence[int]) -> Value:
    missing = [axis for axis in range(len(shape)) if axis not in broadcast_dimensions]
    return g.expand(g.unsqueeze(x, missing), g.like(g.out))


@aten("repeat")
def repeat(g: Builder, x: Value, repeats: Sequence[Dim]) -> Value:
    x = g.unsqueeze(x, range(len(repeats) - g.rank(x)))
    return x if all(n == 1 for n in repeats) else g.Tile(x, g.shape_value(repeats))


@aten("slice.Tensor", "slice_copy.Tensor")
def slice_(
    g: Builder, x: Value, dim: int = 0, start: Dim | None = None, end: Dim | None = None, step: Dim = 1
) -> Value:
    if g.dims(x) == g.like(g.out) and step == 1:
        return x
    if not isinstance(step, int):
        raise Unsupported("a symbolic slice step")
    start = 0 if start is None else start
    end = _END if end is None else end
    return g.slice(x, g.axis(x, dim), start, end, step)


@aten("select.int", "select_copy.int")
def select(g: Builder, x: Value, dim: int, index: Dim) -> Value:
    axis = g.axis(x, dim)
    if isinstance(index, sympy.Expr):
        return g.squeeze(_with_size_one(g, g.Gather(x, g.sizes.value(index), axis=axis), x, axis), [axis])
    return g.Gather(x, g.scalar(index, torch.int64), axis=axis)


def _with_size_one(g: Builder, value: Value, x: Value, axis: int) -> Value:
    return g.shaped(value, [1 if i == axis else dim for i, dim in enumerate(g.dims(x))])


@aten("narrow", "narrow_copy")
def narrow(g: Builder, x: Value, dim: int, start: Dim, length: Dim) -> Value:
    axis = g.axis(x, dim)
    if isinstance(start, int) and start < 0:
        start = start + g.dims(x)[axis]
    return g.slice(x, axis, start, start + length)


@aten("cat")
def cat(g: Builder, tensors: Sequence[Value], dim: int = 0) -> Value:
    # torch skips one-dimensional empty tensors whatever the rank of the others.
    rank = len(g.like(g.out))
    axis = dim % rank
    parts = [
        g.cast(x, g.out.dtype)
        for x in tensors
        if g.dims(x) != (0,) and not (g.rank(x) == rank and g.dims(x)[axis] == 0)
    ]
    if not parts:
        return g.cast(next(x for x in tensors if g.rank(x) == rank), g.out.dtype)
    return parts[0] if len(parts) == 1 else g.Concat(*parts, axis=axis)


@aten("stack")
def stack(g: Builder, tensors: Sequence[Value], dim: int = 0) -> Value:
    axis = dim % (g.rank(tensors[0]) + 1)
    return g.Concat(*(g.unsqueeze(g.cast(x, g.out.dtype), [axis]) for x in tensors), axis=axis)


def _split(g: Builder, x: Value, axis: int) -> list[Value]:
    """Split into parts of the sizes in FX's metadata."""
    sizes = [g.like(part)[axis] for part in g.out]
    if len(sizes) == 1:
        return [x]
    return list(g.several("Split", len(sizes), [x, g.shape_value(sizes)], axis=axis))


@aten("split.Tensor", "split_with_sizes", "split.sizes", "split_copy.Tensor", "split_with_sizes_copy", "chunk")
@aten("tensor_split.sections", "unsafe_split.Tensor", "unsafe_split_with_sizes", "unsafe_chunk")
def split(g: Builder, x: Value, size: Any, dim: int = 0) -> list[Value]:
    return _split(g, x, g.axis(x, dim))


@aten("unbind.int", "unbind_copy.int")
def unbind(g: Builder, x: Value, dim: int = 0) -> list[Value]:
    axis, count = g.axis(x, dim), len(g.out)
    if count == 1:
        return [g.squeeze(x, [axis])]
    dims = [1 if i == axis else size for i, size in enumerate(g.dims(x))]
    parts = g.several("Split", count, [x], axis=axis, num_outputs=count)
    return [g.squeeze(g.shaped(part, dims), [axis]) for part in parts]


@aten("flip")
def flip(g: Builder, x: Value, dims: Sequence[int]) -> Value:
    axes = [g.axis(x, dim) for dim in dims]
    if not axes or not g.rank(x):
        return x
    minus = [-1] * len(axes)
    return g.Slice(x, g.ints(minus), g.ints([-(2**63)] * len(axes)), g.ints(axes), g.ints(minus))


@aten("roll")
def roll(g: Builder, x: Value, shifts: Sequence[Dim], dims: Sequence[int] = ()) -> Value:
    sizes = g.dims(x)
    if not dims:
        return g.reshape(_roll_axes(g, flat(g, x), shifts, [0]), sizes)
    return _roll_axes(g, x, shifts, dims)


def _roll_axes(g: Builder, x: Value, shifts: Sequence[Dim], dims: Sequence[int]) -> Value:
    sizes = g.dims(x)
    for shift, dim in zip(shifts, dims, strict=True):
        axis = g.axis(x, dim)
        size = sizes[axis]
        if size == 0 or shift == 0:
            continue
        back = PythonMod(sympy.sympify(shift), sympy.sympify(size))
        if back != 0:
            at = g.dim(size - back)
            x = g.Concat(g.slice(x, axis, at, size), g.slice(x, axis, 0, at), axis=axis)
            g.shaped(x, sizes)
    return x


@aten("constant_pad_nd")
def constant_pad_nd(g: Builder, x: Value, pad: Sequence[Dim], value: float = 0) -> Value:
    return _pad(g, x, pad, mode="constant", fill=g.scalar(value, g.dtype(x)))


@aten("reflection_pad1d", "reflection_pad2d", "reflection_pad3d")
def reflection_pad(g: Builder, x: Value, padding: Sequence[Dim]) -> Value:
    return _pad(g, x, padding, mode="reflect")


@aten("replication_pad1d", "replication_pad2d", "replication_pad3d")
def replication_pad(g: Builder, x: Value, padding: Sequence[Dim]) -> Value:
    return _pad(g, x, padding, mode="edge")


@aten("replication_pad1d_backward", "replication_pad2d_backward", "replication_pad3d_backward")
def replication_pad_backward(g: Builder, grad: Value, x: Value, padding: Sequence[Dim]) -> Value:
    """Gradients of all copies of an edge add up at the edge."""
    if not all(isinstance(side, int) for side in padding):
        raise Unsupported("padding of a symbolic size")
    for i in range(len(padding) // 2):
        axis = g.rank(x) - 1 - i
        grad = _sum_edges(g, grad, axis, g.dims(x)[axis], int(padding[2 * i]), int(padding[2 * i + 1]))
    return grad


def _sum_edges(g: Builder, grad: Value, axis: int, size: Dim, begin: int, end: int) -> Value:
    dims = [size if i == axis else dim for i, dim in enumerate(g.dims(grad))]
    if begin < 0 or end < 0:  # cropped elements have no gradient
        grad = g.Pad(grad, g.ints([max(-begin, 0), max(-end, 0)]), None, g.ints([axis]))
        begin, end = max(begin, 0), max(end, 0)
    if size == 1:
        return g.shaped(g.ReduceSum(grad, g.ints([axis]), keepdims=1), dims)
    last = begin + size - 1
    head, tail = ((g.slice(grad, axis, *at), g.ints([axis])) for at in ((0, begin + 1), (last, last + 1 + end)))
    inner = [] if size == 2 else [g.slice(grad, axis, begin + 1, last)]
    parts = [g.ReduceSum(*head, keepdims=1), *inner, g.ReduceSum(*tail, keepdims=1)]
    return g.shaped(g.Concat(*parts, axis=axis), dims)


def _pad(g: Builder, x: Value, pad: Sequence[Dim], mode: str, fill: Value | None = None) -> Value:
    if 0 in g.dims(x) and mode != "constant":
        raise Unsupported("padding an empty tensor with its own values")
    axes = [g.rank(x) - 1 - i for i in range(len(pad) // 2)]
    if mode != "constant":
        x, pad = _crop(g, x, pad, axes)
    begins, ends = list(pad[0::2]), list(pad[1::2])
    return g.Pad(x, g.shape_value([*begins, *ends]), fill, g.ints(axes), mode=mode)


def _crop(g: Builder, x: Value, pad: Sequence[Dim], axes: Sequence[int]) -> tuple[Value, list[Dim]]:
    """Apply negative padding by slices: engines support it in constant mode only."""
    dims, rest = list(g.dims(x)), list(pad)
    for i, axis in enumerate(axes):
        begin, end, size = rest[2 * i], rest[2 * i + 1], dims[axis]
        if not (_is_negative(begin) or _is_negative(end)):
            continue
        start, stop = (-begin if _is_negative(begin) else 0), size + (end if _is_negative(end) else 0)
        if isinstance(start, int) and isinstance(stop, int) and start >= stop:
            raise Unsupported("padding with the values of an axis that is cropped entirely")
        dims[axis] = stop - start
        x = g.shaped(g.slice(x, axis, start, stop), dims)
        rest[2 * i : 2 * i + 2] = [0 if _is_negative(side) else side for side in (begin, end)]
    return x, rest


def _is_negative(size: Dim) -> bool:
    return isinstance(size, int) and size < 0


@aten("pixel_shuffle")
def pixel_shuffle(g: Builder, x: Value, upscale_factor: int) -> Value:
    if g.rank(x) != 4:
        raise Unsupported("pixel_shuffle of other than four dimensions")
    return g.DepthToSpace(x, blocksize=upscale_factor, mode="CRD")


@aten("tril")
def tril(g: Builder, x: Value, diagonal: Dim = 0) -> Value:
    return _triangle(g, x, diagonal, upper=0)


@aten("triu")
def triu(g: Builder, x: Value, diagonal: Dim = 0) -> Value:
    return _triangle(g, x, diagonal, upper=1)


def _triangle(g: Builder, x: Value, diagonal: Dim, upper: int) -> Value:
    return g.Trilu(x, g.scalar(diagonal, torch.int64), upper=upper)


@aten("unfold")
def unfold(g: Builder, x: Value, dimension: int, size: Dim, step: Dim) -> Value:
    x = x if g.rank(x) else g.unsqueeze(x, [0])
    axis = g.axis(x, dimension)
    length = g.dims(x)[axis]
    rank = g.rank(x)
    if rank == 1 and length == size == 1 and g.like(g.out) == (1,):
        return x  # a scalar tensor
    count = g.like(g.out)[axis]
    starts = g.Mul(g.unsqueeze(positions(g, count), [1]), g.scalar(step, torch.int64))
    gathered = g.Gather(x, g.Add(starts, positions(g, size)), axis=axis)
    g.shaped(gathered, [*g.dims(x)[:axis], count, size, *g.dims(x)[axis + 1 :]])
    order = [i for i in range(rank + 1) if i != axis + 1] + [axis + 1]
    return g.transpose(gathered, order)
