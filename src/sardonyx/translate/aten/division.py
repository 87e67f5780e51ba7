"""Division: quotients rounded down or toward zero, and remainders, exact over the whole range of every dtype."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch

from sardonyx import dtypes
from sardonyx.translate.aten.pointwise import binary, operands
from sardonyx.translate.aten.signs import sign_factor
from sardonyx.translate.builder import Builder, Operand
from sardonyx.translate.table import aten

Value = ir.Value

_NARROW = (torch.int8, torch.uint8, torch.int16)


def _wide_operands(g: Builder, *xs: Operand) -> list[Value]:
    """The operands as torch divides them: half precision in single, and narrow integers where none overflows."""
    wide = torch.int32 if g.out.dtype in _NARROW else dtypes.accumulation_dtype(g.out.dtype)
    return [g.cast(x, wide) for x in operands(g, *xs)]


def _narrowed(g: Builder, x: Value) -> Value:
    return g.cast(x, g.out.dtype)


@aten("div.Tensor", "div.Scalar", "true_divide.Tensor")
def div(g: Builder, x: Operand, y: Operand) -> Value:
    return binary(g, "Div", x, y)


@aten("div.Tensor_mode", "div.Scalar_mode")
def div_mode(g: Builder, x: Operand, y: Operand, rounding_mode: str | None = None) -> Value:
    if rounding_mode is None:
        return div(g, x, y)
    if rounding_mode == "floor":
        return floor_divide(g, x, y)
    if g.out.dtype.is_floating_point:
        return truncated(g, div(g, x, y))
    return _narrowed(g, _truncated_quotient(g, *_wide_operands(g, x, y)))


@aten("floor_divide", "floor_divide.Scalar")
def floor_divide(g: Builder, x: Operand, y: Operand) -> Value:
    x, y = _wide_operands(g, x, y)
    return _narrowed(g, (_real_floor if g.out.dtype.is_floating_point else _integer_floor)(g, x, y))


def _real_floor(g: Builder, x: Value, y: Value) -> Value:
    """(x - fmod(x, y)) / y, less one where the remainder has the other sign: floor(x / y) alone differs by one ulp."""
    rest, ratio, zero = g.Mod(x, y, fmod=1), g.Div(x, y), _number(g, 0, x)
    quotient = g.Div(g.Sub(x, rest), y)
    quotient = g.Sub(quotient, g.cast(_has_other_sign(g, rest, y), g.dtype(x)))
    down = g.Floor(quotient)
    down = g.Add(down, g.cast(g.Greater(g.Sub(quotient, down), _number(g, 0.5, x)), g.dtype(x)))
    rounded = g.Where(g.Equal(quotient, zero), g.Mul(ratio, zero), down)  # a zero has the sign of the ratio
    return g.Where(g.Equal(y, zero), ratio, rounded)


def _integer_floor(g: Builder, x: Value, y: Value) -> Value:
    """The quotient toward zero, less one where the remainder has the other sign: nothing here overflows."""
    quotient = _truncated_quotient(g, x, y)
    if not g.dtype(x).is_signed:
        return quotient
    rest = g.Sub(x, g.Mul(quotient, y))
    return g.Sub(quotient, g.cast(_has_other_sign(g, rest, y), g.dtype(x)))


def _has_other_sign(g: Builder, rest: Value, y: Value) -> Value:
    """Where a remainder is not zero and its sign is not the divisor's."""
    zero = _number(g, 0, rest)
    known = _known(g, y)
    if known is not None and (known > 0).all():
        return g.Less(rest, zero)
    return g.And(g.Not(g.Equal(rest, zero)), g.Xor(g.Less(rest, zero), g.Less(y, zero)))


def _truncated_quotient(g: Builder, x: Value, y: Value) -> Value:
    """Of integers; by −1 as −x: there the processor traps for the smallest number of all."""
    if not _may_be_minus_one(g, y):
        return g.Div(x, y)
    minus_one = g.Equal(y, _number(g, -1, y))
    return g.Where(minus_one, g.Neg(x), g.Div(x, _one_for_minus_one(g, y)))


def _one_for_minus_one(g: Builder, y: Value) -> Value:
    if not _may_be_minus_one(g, y):
        return y
    return g.Where(g.Equal(y, _number(g, -1, y)), _number(g, 1, y), y)


def _may_be_minus_one(g: Builder, y: Value) -> bool:
    """Whether a division may be by −1 in a dtype that torch computes in."""
    known = _known(g, y)
    return g.dtype(y).is_signed and g.out.dtype not in _NARROW and (known is None or -1 in known)


def _known(g: Builder, x: Value) -> Any:
    """The elements of a constant; None where they are computed or given."""
    return x.const_value.numpy() if x.name in g.initializers and x.const_value is not None else None


def _number(g: Builder, number: float, like: Value) -> Value:
    return g.scalar(number, g.dtype(like))


@aten("remainder.Tensor", "remainder.Scalar", "remainder.Scalar_Tensor")
def remainder(g: Builder, x: Operand, y: Operand) -> Value:
    """Python's `%`: the result takes the divisor's sign."""
    x, y = _wide_operands(g, x, y)
    if not g.out.dtype.is_floating_point:
        return _narrowed(g, g.Mod(x, _one_for_minus_one(g, y)))  # of which nothing is left either way
    rest = g.Mod(x, y, fmod=1)
    return _narrowed(g, g.Where(_has_other_sign(g, rest, y), g.Add(rest, y), rest))


@aten("fmod.Tensor", "fmod.Scalar")
def fmod(g: Builder, x: Operand, y: Operand) -> Value:
    """C's `%`: ONNX Runtime's Mod computes it in double precision, which holds no 64-bit integer."""
    x, y = _wide_operands(g, x, y)
    if g.out.dtype.is_floating_point:
        return _narrowed(g, g.Mod(x, y, fmod=1))
    return _narrowed(g, g.Sub(x, g.Mul(_truncated_quotient(g, x, y), y)))


def truncated(g: Builder, x: Value) -> Value:
    """Rounded toward zero, of which a zero keeps the sign."""
    return g.Mul(g.Floor(g.Abs(x)), sign_factor(g, x))


@aten("trunc")
def trunc(g: Builder, x: Value) -> Value:
    return truncated(g, x) if g.dtype(x).is_floating_point else x


@aten("frac")
def frac(g: Builder, x: Value) -> Value:
    return g.Sub(x, trunc(g, x))
