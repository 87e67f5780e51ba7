"""Division with rounding down or toward zero, and remainders, exact over the whole range of every dtype."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch

from sardonyx import dtypes
from sardonyx.translate.aten.pointwise import accumulation_operands, binary, has_unrounded_number, operands
from sardonyx.translate.aten.signs import sign_factor
from sardonyx.translate.builder import Builder, Operand
from sardonyx.translate.table import aten

Value = ir.Value

_NARROW = (torch.int8, torch.uint8, torch.int16)


def _wide_operands(g: Builder, *xs: Operand) -> list[Value]:
    """Return the operands in torch's dtype for dividing: half precision in single, narrow integers in int32."""
    wide = torch.int32 if g.out.dtype in _NARROW else dtypes.accumulation_dtype(g.out.dtype)
    return [g.cast(x, wide) for x in operands(g, *xs)]


def _divides_by_number(g: Builder, x: Operand, y: Operand) -> bool:
    """Whether torch divides in floating point without rounding a number, or the quotient, to half precision."""
    number = has_unrounded_number(g) or not (isinstance(x, Value) and isinstance(y, Value))
    return number and g.out.dtype.is_floating_point


def _narrow(g: Builder, x: Value) -> Value:
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
    if _divides_by_number(g, x, y):
        return _narrow(g, truncate(g, g.Div(*accumulation_operands(g, x, y))))
    if g.out.dtype.is_floating_point:
        return truncate(g, div(g, x, y))
    return _narrow(g, _truncate_quotient(g, *_wide_operands(g, x, y)))


@aten("floor_divide", "floor_divide.Scalar")
def floor_divide(g: Builder, x: Operand, y: Operand) -> Value:
    x, y = (accumulation_operands if _divides_by_number(g, x, y) else _wide_operands)(g, x, y)
    return _narrow(g, (_real_floor if g.out.dtype.is_floating_point else _integer_floor)(g, x, y))


def _real_floor(g: Builder, x: Value, y: Value) -> Value:
    """(x - fmod(x, y)) / y, minus one where the remainder has the other sign: floor(x / y) can differ by one ulp."""
    rest, ratio, zero = g.Mod(x, y, fmod=1), g.Div(x, y), _number(g, 0, x)
    quotient = g.Div(g.Sub(x, rest), y)
    quotient = g.Sub(quotient, g.cast(_has_other_sign(g, rest, y), g.dtype(x)))
    down = g.Floor(quotient)
    down = g.Add(down, g.cast(g.Greater(g.Sub(quotient, down), _number(g, 0.5, x)), g.dtype(x)))
    rounded = g.Where(g.Equal(quotient, zero), g.Mul(ratio, zero), down)  # a zero keeps the sign of the ratio
    return g.Where(g.Equal(y, zero), ratio, rounded)


def _integer_floor(g: Builder, x: Value, y: Value) -> Value:
    """Return the quotient toward zero, minus one where the remainder has the other sign: nothing here overflows."""
    quotient = _truncate_quotient(g, x, y)
    if not g.dtype(x).is_signed:
        return quotient
    rest = g.Sub(x, g.Mul(quotient, y))
    return g.Sub(quotient, g.cast(_has_other_sign(g, rest, y), g.dtype(x)))


def _has_other_sign(g: Builder, rest: Value, y: Value) -> Value:
    """Return where a remainder is nonzero and its sign differs from the divisor's."""
    zero = _number(g, 0, rest)
    known = _constant_elements(g, y)
    if known is not None and (known > 0).all():
        return g.Less(rest, zero)
    return g.And(g.Not(g.Equal(rest, zero)), g.Xor(g.Less(rest, zero), g.Less(y, zero)))


def _truncate_quotient(g: Builder, x: Value, y: Value) -> Value:
    """Divide integers; division by −1 is −x, since the processor traps for the smallest integer."""
    if not _may_be_minus_one(g, y):
        return g.Div(x, y)
    minus_one = g.Equal(y, _number(g, -1, y))
    return g.Where(minus_one, g.Neg(x), g.Div(x, _one_for_minus_one(g, y)))


def _one_for_minus_one(g: Builder, y: Value) -> Value:
    if not _may_be_minus_one(g, y):
        return y
    return g.Where(g.Equal(y, _number(g, -1, y)), _number(g, 1, y), y)


def _may_be_minus_one(g: Builder, y: Value) -> bool:
    """Whether a divisor may be −1 in a dtype that torch computes in."""
    known = _constant_elements(g, y)
    return g.dtype(y).is_signed and g.out.dtype not in _NARROW and (known is None or -1 in known)


def _constant_elements(g: Builder, x: Value) -> Any:
    """Return the elements of a constant; None if they are not constant."""
    return x.const_value.numpy() if x.name in g.initializers and x.const_value is not None else None


def _number(g: Builder, number: float, like: Value) -> Value:
    return g.scalar(number, g.dtype(like))


@aten("remainder.Tensor", "remainder.Scalar", "remainder.Scalar_Tensor")
def remainder(g: Builder, x: Operand, y: Operand) -> Value:
    """Python's `%`: the result has the divisor's sign."""
    x, y = _wide_operands(g, x, y)
    if not g.out.dtype.is_floating_point:
        return _narrow(g, g.Mod(x, _one_for_minus_one(g, y)))  # the remainder by ±1 is zero
    rest = g.Mod(x, y, fmod=1)
    return _narrow(g, g.Where(_has_other_sign(g, rest, y), g.Add(rest, y), rest))


@aten("fmod.Tensor", "fmod.Scalar")
def fmod(g: Builder, x: Operand, y: Operand) -> Value:
    """C's `%`: ONNX Runtime's Mod computes in double precision, which cannot represent every int64."""
    x, y = _wide_operands(g, x, y)
    if g.out.dtype.is_floating_point:
        return _narrow(g, g.Mod(x, y, fmod=1))
    return _narrow(g, g.Sub(x, g.Mul(_truncate_quotient(g, x, y), y)))


def truncate(g: Builder, x: Value) -> Value:
    """Round toward zero, keeping the sign of zero."""
    return g.Mul(g.Floor(g.Abs(x)), sign_factor(g, x))


@aten("trunc")
def trunc(g: Builder, x: Value) -> Value:
    return truncate(g, x) if g.dtype(x).is_floating_point else x


@aten("frac")
def frac(g: Builder, x: Value) -> Value:
    return g.Sub(x, trunc(g, x))
