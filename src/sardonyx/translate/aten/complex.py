"""Complex tensors: conversion from and to real tensors, views, and arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from sardonyx.errors import Unsupported
from sardonyx.sizes import Dim
from sardonyx.translate import complex_as_real, table
from sardonyx.translate.aten import indexing, linear, pointwise, reduction, shape, signs
from sardonyx.translate.builder import Builder, Operand
from sardonyx.translate.complex_as_real import aten_complex, join, parts, split
from sardonyx.translate.table import aten

Value = ir.Value


def _operands(g: Builder, *xs: Any) -> list[Value]:
    return [g.cast(x, g.out.dtype) for x in xs]


def _rank(g: Builder, x: Value) -> int:
    """Return the number of dimensions in torch."""
    return g.rank(x) - complex_as_real.is_complex(x)


# Between real and complex


@aten("complex")
@aten_complex("complex")
def complex_(g: Builder, real: Value, imag: Value) -> Value:
    dims = complex_as_real.dims_of(g.out)[:-1]
    return join(g, *(g.unsqueeze(g.expand(part, dims), [-1]) for part in (real, imag)))


@aten("polar")
@aten_complex("polar")
def polar(g: Builder, length: Value, angle: Value) -> Value:
    return complex_(g, g.Mul(length, g.Cos(angle)), g.Mul(length, g.Sin(angle)))


@aten("view_as_complex", "view_as_real")
@aten_complex("view_as_complex", "view_as_real")
def same_memory(g: Builder, x: Value) -> Value:
    """Return a new value, since only one of the two is marked as complex."""
    return g.shaped(g.Identity(x), g.dims(x))


@aten("_conj", "_conj_physical", "conj_physical")
@aten_complex("_conj", "_conj_physical", "conj_physical")
def conj(g: Builder, x: Value) -> Value:
    if not complex_as_real.is_complex(x):
        return x
    flipped = g.constant(torch.tensor([1, -1], dtype=g.dtype(x).to_real()).numpy())
    return complex_as_real.mark(g.Mul(x, flipped))


@aten("_neg_view")
def neg_view(g: Builder, x: Value) -> Value:
    """torch's view of the imaginary part of a conjugate."""
    return g.Neg(x)


@aten_complex("abs")
def abs_(g: Builder, x: Value) -> Value:
    return pointwise.hypot(g, *parts(g, x))


@aten_complex("angle")
def angle(g: Builder, x: Value) -> Value:
    real, imaginary = parts(g, x)
    return signs.atan2(g, imaginary, real)


@aten_complex("isnan")
def isnan(g: Builder, x: Value) -> Value:
    return g.Or(*map(g.IsNaN, parts(g, x)))


@aten_complex("isinf")
def isinf(g: Builder, x: Value) -> Value:
    return g.Or(*map(g.IsInf, parts(g, x)))


@aten_complex("eq.Tensor", "eq.Scalar")
def eq(g: Builder, x: Operand, y: Operand) -> Value:
    x, y = g.promote(x, y)
    return g.And(*(g.Equal(a, b) for a, b in zip(parts(g, x), parts(g, y), strict=True)))


@aten_complex("ne.Tensor", "ne.Scalar")
def ne(g: Builder, x: Operand, y: Operand) -> Value:
    return g.Not(eq(g, x, y))


# Arithmetic


@aten_complex("add.Tensor", "add.Scalar")
def add(g: Builder, x: Operand, y: Operand, alpha: Operand = 1) -> Value:
    return g.Add(*_with_alpha(g, x, y, alpha))


@aten_complex("sub.Tensor", "sub.Scalar")
def sub(g: Builder, x: Operand, y: Operand, alpha: Operand = 1) -> Value:
    return g.Sub(*_with_alpha(g, x, y, alpha))


@aten_complex("rsub.Tensor", "rsub.Scalar")
def rsub(g: Builder, x: Operand, y: Operand, alpha: Operand = 1) -> Value:
    return sub(g, y, x, alpha)


def _with_alpha(g: Builder, x: Operand, y: Operand, alpha: Operand) -> list[Value]:
    x, y = _operands(g, x, y)
    return [x, _scaled(g, y, alpha)]


@aten_complex("mul.Tensor", "mul.Scalar")
def mul(g: Builder, x: Operand, y: Operand) -> Value:
    return product(g, *_operands(g, x, y))


def product(g: Builder, x: Value, y: Value) -> Value:
    """(a + bi)(c + di) = (a + bi)c + (−b + ai)d."""
    (a, b), (c, d) = split(g, x), split(g, y)
    return g.Add(g.Mul(x, c), g.Mul(join(g, g.Neg(b), a), d))


@aten_complex("square")
def square(g: Builder, x: Value) -> Value:
    return product(g, x, x)


@aten_complex("pow.Tensor_Scalar")
def power(g: Builder, x: Value, exponent: Operand) -> Value:
    x = g.cast(x, g.out.dtype)
    if exponent == 2:
        return square(g, x)
    if exponent == 3:
        return product(g, complex_as_real.mark(square(g, x)), x)
    raise Unsupported("a complex power other than the square and the cube")


@aten_complex("div.Tensor", "div.Scalar", "true_divide.Tensor")
def div(g: Builder, x: Operand, y: Operand) -> Value:
    return _quotient(g, *_operands(g, x, y))


def _quotient(g: Builder, x: Value, y: Value) -> Value:
    """Divide by Smith's method, as torch: (a + bi)/(c + di) = (a + br + (b − ar)i) / (c + dr), r = d/c, if |c| ≥ |d|.

    Else swap the parts of each, and the sign of the imaginary part.
    """
    c, d = split(g, y)
    upright = g.GreaterOrEqual(g.Abs(c), g.Abs(d))
    a, b = split(g, _swap_parts_unless(g, upright, x))
    c, d = split(g, _swap_parts_unless(g, upright, y))
    r = g.Div(d, c)
    scale = g.Reciprocal(g.Add(c, g.Mul(d, r)))
    real, imaginary = g.Mul(g.Add(a, g.Mul(b, r)), scale), g.Mul(g.Sub(b, g.Mul(a, r)), scale)
    quotient = join(g, real, g.Where(upright, imaginary, g.Neg(imaginary)))
    size = g.Add(g.Abs(c), g.Abs(d))
    return g.Where(g.Equal(size, g.scalar(0, g.dtype(c))), g.Div(x, size), quotient)


def _swap_parts_unless(g: Builder, upright: Value, x: Value) -> Value:
    real, imaginary = split(g, x)
    return g.Where(upright, x, join(g, imaginary, real))


@aten_complex("reciprocal")
def reciprocal(g: Builder, x: Value) -> Value:
    return _quotient(g, *_operands(g, 1, x))


@aten_complex("neg")
def neg(g: Builder, x: Value) -> Value:
    return g.Neg(x)


@aten_complex("sgn")
def sgn(g: Builder, x: Value) -> Value:
    """x / |x|, and zero for zero; first scaled by its larger part, so that the squares do not overflow."""
    scale = g.Max(*map(g.Abs, split(g, x)))
    scaled = g.Div(x, scale)
    squares = g.Add(*(g.Mul(part, part) for part in split(g, scaled)))
    zero = g.scalar(0, g.out.dtype.to_real())
    turn = g.Where(g.IsInf(scale), scaled, g.Div(scaled, g.Sqrt(squares)))
    return g.Where(g.Equal(scale, zero), zero, turn)


@aten_complex("exp")
def exp(g: Builder, x: Value) -> Value:
    """eᵃ·(cos b + i·sin b); real numbers remain real, and for infinite a the result is 0 or ∞ where b has no cosine."""
    a, b = split(g, x)
    size, cos, zero = g.Exp(a), g.Cos(b), g.scalar(0, g.dtype(a))
    beyond = g.And(g.IsInf(a), g.IsNaN(cos))
    is_real = g.Or(g.Equal(b, zero), g.And(beyond, g.Equal(size, zero)))
    return join(g, g.Where(beyond, size, g.Mul(size, cos)), g.Where(is_real, zero, g.Mul(size, g.Sin(b))))


@aten_complex("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar")
def where(g: Builder, condition: Value, x: Operand, y: Operand) -> Value:
    return g.Where(g.unsqueeze(g.cast(condition, torch.bool), [-1]), *_operands(g, x, y))


@aten_complex("masked_fill.Scalar", "masked_fill.Tensor")
def masked_fill(g: Builder, x: Value, mask: Value, value: Operand) -> Value:
    return where(g, mask, value, x)


@aten_complex("index_fill.int_Scalar", "index_fill.int_Tensor")
def index_fill(g: Builder, x: Value, dim: int, index: Value, value: Operand) -> Value:
    return where(g, indexing.mask_along(g, g.dims(x)[:-1], dim, index), value, x)


# Sums and matrix products


@aten_complex("sum", "sum.dim_IntList")
def sum_(g: Builder, x: Value, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Value:
    x = g.cast(x, g.out.dtype)
    axes = _axes(dim or range(_rank(g, x)), _rank(g, x))
    return reduction.sum_(g, x, axes, keepdim) if axes else x


@aten_complex("mean", "mean.dim")
def mean(g: Builder, x: Value, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Value:
    x = g.cast(x, g.out.dtype)
    axes = _axes(dim or range(_rank(g, x)), _rank(g, x))
    return reduction.mean(g, x, axes, keepdim) if axes else x


@aten_complex("mm", "bmm", "mv", "dot")
def matmul(g: Builder, x: Value, y: Value) -> Value:
    (a, b), (c, d) = parts(g, x), parts(g, y)
    real = g.Sub(linear.matmul(g, a, c), linear.matmul(g, b, d))
    imaginary = g.Add(linear.matmul(g, a, d), linear.matmul(g, b, c))
    dims = complex_as_real.dims_of(g.out)[:-1]
    return join(g, *(g.unsqueeze(g.shaped(part, dims), [-1]) for part in (real, imaginary)))


@aten_complex("addmm", "baddbmm", "addmv")
def addmm(g: Builder, bias: Value, x: Value, y: Value, *, beta: Operand = 1, alpha: Operand = 1) -> Value:
    scaled = _scaled(g, matmul(g, x, y), alpha)
    return scaled if beta == 0 else g.Add(scaled, _scaled(g, bias, beta))


def _scaled(g: Builder, x: Value, factor: Operand) -> Value:
    return x if factor == 1 else product(g, x, g.cast(factor, g.out.dtype))


# Views, copies, constants. Axes counted from the front are the same, so most translations of real tensors apply.

_FROM_THE_FRONT = (
    *("squeeze.dim", "squeeze.dims", "transpose.int", "slice.Tensor", "select.int", "narrow", "flip", "index_select"),
    *("split.Tensor", "split_with_sizes", "unbind.int", "cumsum", "slice_scatter", "select_scatter"),
)
_INTO_THE_RESULT = ("unsqueeze", "stack")
"""Operators whose dimensions are those of the result, which has one more."""
_AS_THEY_ARE = (
    *("view", "_unsafe_view", "reshape", "expand", "squeeze", "clone", "alias", "detach", "lift_fresh_copy"),
    *("lift_fresh", "_to_copy", "copy", "full", "full_like", "new_full", "zeros", "zeros_like", "new_zeros", "ones"),
    *("ones_like", "new_ones", "empty.memory_format", "empty_like", "new_empty", "scalar_tensor", "fill.Scalar"),
    *("fill.Tensor", "index.Tensor", "_unsafe_index.Tensor", "slice_backward", "select_backward"),
)


def _axes(dims: Sequence[int], rank: int) -> list[int]:
    return [dim % rank for dim in dims] if rank else []


def _target(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def _real_translation(name: str) -> table.Translation:
    translation = table.find(_target(name))
    assert translation is not None, name
    return translation


def _register_axes(name: str) -> None:
    arguments = _target(name)._schema.arguments
    indices = [i for i, argument in enumerate(arguments) if argument.name in ("dim", "dims", "dim0", "dim1")]

    @aten_complex(name)
    def along_axes(g: Builder, x: Any, *args: Any, **kwargs: Any) -> Any:
        rank = g.out.dim() if name in _INTO_THE_RESULT else _rank(g, x)
        if not rank:
            raise Unsupported("a dimension of a complex scalar tensor")
        values: list[Any] = [x, *args]
        for i in indices:
            if i < len(values):
                dim = values[i]
                values[i] = dim % rank if isinstance(dim, int) else _axes(dim, rank)
        return _real_translation(name)(g, *values, **kwargs)


def _register_same(name: str) -> None:
    @aten_complex(name)
    def same(g: Builder, *args: Any, **kwargs: Any) -> Any:
        return _real_translation(name)(g, *args, **kwargs)


for _name in (*_FROM_THE_FRONT, *_INTO_THE_RESULT):
    _register_axes(_name)
for _name in _AS_THEY_ARE:
    _register_same(_name)


@aten_complex("permute")
def permute(g: Builder, x: Value, dims: Sequence[int]) -> Value:
    rank = _rank(g, x)
    return g.transpose(x, [*_axes(dims, rank), rank])


@aten_complex("t")
def t(g: Builder, x: Value) -> Value:
    return g.transpose(x, [1, 0, 2]) if _rank(g, x) == 2 else x


@aten_complex("cat")
def cat(g: Builder, tensors: Sequence[Value], dim: int = 0) -> Value:
    # torch skips one-dimensional empty tensors whatever the rank of the others.
    return g.Concat(*_operands(g, *(x for x in tensors if 0 not in g.dims(x))), axis=dim % g.out.dim())


@aten_complex("repeat")
def repeat(g: Builder, x: Value, repeats: Sequence[Dim]) -> Value:
    return shape.repeat(g, x, [*repeats, 1])


@aten_complex("roll")
def roll(g: Builder, x: Value, shifts: Sequence[Dim], dims: Sequence[int] = ()) -> Value:
    if dims:
        return shape.roll(g, x, shifts, _axes(dims, _rank(g, x)))
    flat = g.reshape(x, [math.prod(g.dims(x)[:-1]), 2])
    return g.reshape(shape.roll(g, flat, shifts, [0]), g.dims(x))


@aten_complex("gather")
def gather(g: Builder, x: Value, dim: int, index: Value, *, sparse_grad: bool = False) -> Value:
    if not (_rank(g, x) and g.rank(index)):
        raise Unsupported("a dimension of a complex scalar tensor")
    both = g.expand(g.unsqueeze(index, [-1]), (*g.dims(index), 2))
    return indexing.gather(g, x, dim % _rank(g, x), both)


@aten_complex("constant_pad_nd")
def constant_pad_nd(g: Builder, x: Value, pad: Sequence[Dim], value: Operand = 0) -> Value:
    if value != 0:
        raise Unsupported("padding a complex tensor with a nonzero value")
    axes = [_rank(g, x) - 1 - i for i in range(len(pad) // 2)]
    return g.Pad(x, g.shape_value([*pad[0::2], *pad[1::2]]), None, g.ints(axes), mode="constant")


@aten_complex("unfold")
def unfold(g: Builder, x: Value, dimension: int, size: int, step: int) -> Value:
    if not _rank(g, x):
        raise Unsupported("a dimension of a complex scalar tensor")
    windows = shape.unfold(g, x, dimension % _rank(g, x), size, step)
    last = g.rank(windows) - 1
    return g.transpose(windows, [*range(last - 1), last, last - 1])
