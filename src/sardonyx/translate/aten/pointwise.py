"""Elementwise arithmetic, functions, comparison and logic, with torch's type promotion."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch

from sardonyx import dtypes
from sardonyx.errors import Unsupported
from sardonyx.translate import declared as nodes
from sardonyx.translate.builder import Builder, Operand
from sardonyx.translate.table import aten, prims

Value = ir.Value


def operands(g: Builder, *xs: Operand) -> list[Value]:
    """Return the operands in the dtype of the result."""
    return [g.cast(x, g.out.dtype) for x in xs]


def accumulation_operands(g: Builder, *xs: Operand) -> list[Value]:
    """Return the operands in the dtype in which torch's kernels compute the result."""
    return [g.cast(x, dtypes.accumulation_dtype(g.out.dtype)) for x in xs]


@aten("add.Tensor", "add.Scalar")
def add(g: Builder, x: Operand, y: Operand, alpha: Operand = 1) -> Value:
    if _is(alpha, 1):
        return binary(g, "Or" if g.out.dtype == torch.bool else "Add", x, y)
    x, y = operands(g, x, y)
    y = _times(g, y, alpha)
    return g.Or(x, y) if g.out.dtype == torch.bool else g.Add(x, y)


def binary(g: Builder, op_type: str, x: Operand, y: Operand) -> Value:
    """Append a binary operator in the dtype of the result; in single precision if torch does not round a number."""
    # In half precision, torch's CPU kernels round numbers before they add them, its CUDA kernels do not.
    exact = op_type in ("Mul", "Div") or (op_type in ("Add", "Sub") and g.out.device.type == "cuda")
    if not exact or not (_is_out_of_range(g, op_type, x, y) or has_unrounded_number(g)):
        return g.node(op_type, operands(g, x, y))
    return g.cast(g.node(op_type, accumulation_operands(g, x, y)), g.out.dtype)


def _is_out_of_range(g: Builder, op_type: str, *xs: Operand) -> bool:
    """Whether half precision has not the magnitude of a number: it would be infinite, or a factor lose digits."""
    if g.out.dtype not in (torch.float16, torch.bfloat16):
        return False
    limits = torch.finfo(g.out.dtype)
    numbers = [abs(x) for x in xs if isinstance(x, (int, float)) and math.isfinite(x)]
    return any(x > limits.max or (op_type in ("Mul", "Div") and 0 < x < limits.tiny) for x in numbers)


def has_unrounded_number(g: Builder) -> bool:
    """Whether torch uses the exact value of an operand with a result in half precision.

    It does so for numbers, here symbolic ones, and for tensors without dimensions on the CPU.
    """
    out = g.out.dtype
    return out in (torch.float16, torch.bfloat16) and any(_is_unrounded(x, out) for x in g.operand_metadata())


def _is_unrounded(val: Any, dtype: torch.dtype) -> bool:
    if isinstance(val, torch.Tensor):
        return not val.dim() and val.device.type == "cpu" and val.dtype != dtype
    return isinstance(val, (torch.SymInt, torch.SymFloat))


@aten("sub.Tensor", "sub.Scalar")
def sub(g: Builder, x: Operand, y: Operand, alpha: Operand = 1) -> Value:
    if _is(alpha, 1):
        return binary(g, "Sub", x, y)
    x, y = operands(g, x, y)
    return g.Sub(x, _times(g, y, alpha))


@aten("rsub.Tensor", "rsub.Scalar")
def rsub(g: Builder, x: Operand, y: Operand, alpha: Operand = 1) -> Value:
    return sub(g, y, x, alpha)


@aten("mul.Tensor", "mul.Scalar")
def mul(g: Builder, x: Operand, y: Operand) -> Value:
    return binary(g, "And" if g.out.dtype == torch.bool else "Mul", x, y)


def _times(g: Builder, x: Value, factor: Operand) -> Value:
    if g.out.dtype == torch.bool:
        return g.And(x, g.scalar(factor, torch.bool))
    return g.Mul(x, g.scalar(factor, g.out.dtype))


def _is(x: Operand, number: float) -> bool:
    return not isinstance(x, Value) and x == number


@aten("pow.Tensor_Tensor", "pow.Tensor_Scalar", "pow.Scalar")
def pow_(g: Builder, x: Operand, y: Operand) -> Value:
    if isinstance(y, (int, float)) and not isinstance(y, bool) and isinstance(x, Value):
        simple = _POWERS.get(float(y))
        roots = g.out.dtype == torch.float16 and abs(y) == 0.5  # there torch's roots are powers: −0, −inf differ
        if simple is not None and not roots and (g.out.dtype.is_floating_point or y in (1, 2, 3)):
            return simple(g, g.cast(x, g.out.dtype))
    if g.out.dtype.is_floating_point:
        return g.Pow(*operands(g, x, y))
    raise Unsupported("integer powers differ from torch's for negative exponents and overflow")


_POWERS: dict[float, Callable[[Builder, Value], Value]] = {
    0.5: lambda g, x: g.Sqrt(x),
    1.0: lambda g, x: x,
    2.0: lambda g, x: g.Mul(x, x),
    3.0: lambda g, x: g.Mul(g.Mul(x, x), x),
    -1.0: lambda g, x: g.Reciprocal(x),
    -0.5: lambda g, x: g.Reciprocal(g.Sqrt(x)),
}


@aten("square")
def square(g: Builder, x: Value) -> Value:
    return g.Mul(x, x)


@aten("addcmul")
def addcmul(g: Builder, x: Value, a: Value, b: Value, *, value: Operand = 1) -> Value:
    x, a, b = accumulation_operands(g, x, a, b)
    return _plus_times(g, x, g.Mul(a, b), value)


@prims("fma")
def fma(g: Builder, a: Value, b: Operand, c: Operand) -> Value:
    a, b, c = operands(g, a, b, c)
    return g.Add(g.Mul(a, b), c)


@aten("addcdiv")
def addcdiv(g: Builder, x: Value, a: Value, b: Value, *, value: Operand = 1) -> Value:
    x, a, b = accumulation_operands(g, x, a, b)
    return _plus_times(g, x, g.Div(a, b), value)


def _plus_times(g: Builder, x: Value, y: Value, factor: Operand) -> Value:
    """x + factor·y, rounded once to the dtype of the result."""
    scaled = y if _is(factor, 1) else g.Mul(y, g.scalar(factor, g.dtype(x)))
    return g.cast(g.Add(x, scaled), g.out.dtype)


@aten("lerp.Scalar", "lerp.Tensor")
def lerp(g: Builder, x: Value, y: Value, weight: Operand) -> Value:
    dtype = dtypes.accumulation_dtype(g.out.dtype)
    x, y, w = accumulation_operands(g, x, y, weight)
    near, far = g.Mul(w, g.Sub(y, x)), g.Mul(g.Sub(g.scalar(1, dtype), w), g.Sub(y, x))
    small = g.Less(g.Abs(w), g.scalar(0.5, dtype))
    return g.cast(g.Where(small, g.Add(x, near), g.Sub(y, far)), g.out.dtype)


@aten("maximum")
def maximum(g: Builder, x: Operand, y: Operand) -> Value:
    x, y = operands(g, x, y)
    return g.Or(x, y) if g.out.dtype == torch.bool else g.Max(x, y)


@aten("minimum")
def minimum(g: Builder, x: Operand, y: Operand) -> Value:
    x, y = operands(g, x, y)
    return g.And(x, y) if g.out.dtype == torch.bool else g.Min(x, y)


def _ignoring_nan(g: Builder, x: Value, y: Value, pick: str) -> Value:
    if not g.out.dtype.is_floating_point:
        return (maximum if pick == "Max" else minimum)(g, x, y)
    x, y = operands(g, x, y)
    return g.Where(g.IsNaN(x), y, g.Where(g.IsNaN(y), x, g.node(pick, [x, y])))


@aten("fmax")
def fmax(g: Builder, x: Value, y: Value) -> Value:
    return _ignoring_nan(g, x, y, "Max")


@aten("fmin")
def fmin(g: Builder, x: Value, y: Value) -> Value:
    return _ignoring_nan(g, x, y, "Min")


@aten("clamp", "clamp.Tensor", "clamp_min", "clamp_min.Tensor")
def clamp(g: Builder, x: Value, min: Operand | None = None, max: Operand | None = None) -> Value:
    x = g.cast(x, g.out.dtype)
    if min is not None:
        x = g.Max(x, g.cast(min, g.out.dtype))
    return x if max is None else g.Min(x, g.cast(max, g.out.dtype))


@aten("clamp_max", "clamp_max.Tensor")
def clamp_max(g: Builder, x: Value, max: Operand) -> Value:
    return clamp(g, x, None, max)


# Unary functions. Integers are first converted to floating point where torch does so.

nodes.declare(
    {
        "aten::_add_relu.Tensor": nodes.Relu(nodes.Add("self", nodes.Mul("other", "alpha"))),
        "aten::abs": nodes.Abs("self"),
        "aten::acos": nodes.Acos("self"),
        "aten::acosh": nodes.Acosh("self"),
        "aten::asin": nodes.Asin("self"),
        "aten::asinh": nodes.Asinh("self"),
        "aten::atan": nodes.Atan("self"),
        "aten::atanh": nodes.Atanh("self"),
        "aten::cos": nodes.Cos("self"),
        "aten::cosh": nodes.Cosh("self"),
        "aten::erf": nodes.Erf("self"),
        "aten::exp": nodes.Exp("self"),
        "aten::log": nodes.Log("self"),
        "aten::neg": nodes.Neg("self"),
        "aten::reciprocal": nodes.Reciprocal("self"),
        "aten::sin": nodes.Sin("self"),
        "aten::sinh": nodes.Sinh("self"),
        "aten::sqrt": nodes.Sqrt("self"),
        "aten::tan": nodes.Tan("self"),
        "aten::tanh": nodes.Tanh("self"),
    }
)


def _register_rounding(name: str, op_type: str) -> None:
    @aten(name)
    def rounding(g: Builder, x: Value) -> Value:
        return g.node(op_type, [x]) if g.out.dtype.is_floating_point else x


for _name in ("floor", "ceil", "round"):
    _register_rounding(_name, _name.capitalize())


@aten("rsqrt")
def rsqrt(g: Builder, x: Value) -> Value:
    return g.Reciprocal(g.Sqrt(*operands(g, x)))


@aten("log2")
def log2(g: Builder, x: Value) -> Value:
    return g.Mul(g.Log(*operands(g, x)), g.scalar(1 / math.log(2), g.out.dtype))


@aten("log10")
def log10(g: Builder, x: Value) -> Value:
    return g.Mul(g.Log(*operands(g, x)), g.scalar(1 / math.log(10), g.out.dtype))


@aten("exp2")
def exp2(g: Builder, x: Value) -> Value:
    return g.Pow(g.scalar(2, g.out.dtype), *operands(g, x))


@aten("hypot")
def hypot(g: Builder, x: Operand, y: Operand) -> Value:
    x, y = (g.Abs(operand) for operand in operands(g, x, y))
    # max · √(1 + (min/max)²), since squares of large numbers would overflow.
    large, small = g.Max(x, y), g.Min(x, y)
    zero, one = g.scalar(0, g.out.dtype), g.scalar(1, g.out.dtype)
    ratio = g.Div(small, g.Where(g.Equal(large, zero), one, large))
    length = g.Mul(large, g.Sqrt(g.Add(one, g.Mul(ratio, ratio))))
    return g.Where(g.Or(g.IsInf(x), g.IsInf(y)), g.scalar(math.inf, g.out.dtype), length)


@aten("ldexp.Tensor")
def ldexp(g: Builder, x: Value, exponent: Value) -> Value:
    x, exponent = operands(g, x, exponent)
    return g.Mul(x, g.Pow(g.scalar(2, g.out.dtype), exponent))


@aten("round.decimals")
def round_decimals(g: Builder, x: Value, *, decimals: int) -> Value:
    if not g.out.dtype.is_floating_point:
        if decimals < 0:
            raise Unsupported("rounding integers to negative decimals")
        return x
    dtype = dtypes.accumulation_dtype(g.out.dtype)
    x, scale = g.cast(x, dtype), g.scalar(10.0 ** abs(decimals), dtype)
    scaled, back = ("Div", "Mul") if decimals < 0 else ("Mul", "Div")
    return g.cast(g.node(back, [g.Round(g.node(scaled, [x, scale])), scale]), g.out.dtype)


_ERFC = (0.17087277, -0.82215223, 1.48851587, -1.13520398, 0.27886807, -0.18628806, 0.09678418, 0.37409196, 1.00002368)


@aten("erfc")
def erfc(g: Builder, x: Value) -> Value:
    """1 − erf(x) would lose all digits of the tail: t·exp(−x² − 1.27 + P(t)), t = 1/(1 + |x|/2), keeps seven."""
    dtype = g.out.dtype
    if dtype == torch.float64:
        raise Unsupported("the complementary error function in double precision")
    x = g.cast(x, dtype)
    size = g.Abs(x)
    t = g.Reciprocal(g.Add(g.scalar(1, dtype), g.Mul(size, g.scalar(0.5, dtype))))
    poly = g.scalar(_ERFC[0], dtype)
    for coefficient in (*_ERFC[1:], -1.26551223):
        poly = g.Add(g.Mul(poly, t), g.scalar(coefficient, dtype))
    tail = g.Mul(t, g.Exp(g.Sub(poly, g.Mul(size, size))))
    return g.Where(g.Less(x, g.scalar(0, dtype)), g.Sub(g.scalar(2, dtype), tail), tail)


@aten("isnan")
def isnan(g: Builder, x: Value) -> Value:
    return g.IsNaN(x) if g.dtype(x).is_floating_point else _filled_bool(g, x, False)


@aten("isinf")
def isinf(g: Builder, x: Value) -> Value:
    return g.IsInf(x) if g.dtype(x).is_floating_point else _filled_bool(g, x, False)


def _filled_bool(g: Builder, x: Value, answer: bool) -> Value:
    return g.expand(g.scalar(answer, torch.bool), g.dims(x))


@aten("nan_to_num")
def nan_to_num(
    g: Builder, x: Value, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Value:
    dtype = g.dtype(x)
    if not dtype.is_floating_point:
        return x
    limits = torch.finfo(dtype)
    filled = g.Where(g.IsNaN(x), g.scalar(nan or 0.0, dtype), x)
    above, below = g.IsInf(x, detect_negative=0), g.IsInf(x, detect_positive=0)
    filled = g.Where(above, g.scalar(limits.max if posinf is None else posinf, dtype), filled)
    return g.Where(below, g.scalar(limits.min if neginf is None else neginf, dtype), filled)


# Comparison and logic

_COMPARISONS = {"eq": "Equal", "gt": "Greater", "ge": "GreaterOrEqual", "lt": "Less", "le": "LessOrEqual"}


def _compare(g: Builder, op_type: str, x: Operand, y: Operand) -> Value:
    x, y = g.promote(x, y)
    if g.dtype(x) == torch.bool and op_type != "Equal":
        x, y = (g.Cast(value, dtype=ir.DataType.INT32) for value in (x, y))
    return g.node(op_type, [x, y])


def _register_comparison(name: str, op_type: str) -> None:
    @aten(f"{name}.Tensor", f"{name}.Scalar")
    def comparison(g: Builder, x: Operand, y: Operand) -> Value:
        return _compare(g, op_type, x, y)


for _name, _op_type in _COMPARISONS.items():
    _register_comparison(_name, _op_type)


@aten("ne.Tensor", "ne.Scalar")
def ne(g: Builder, x: Operand, y: Operand) -> Value:
    return g.Not(_compare(g, "Equal", x, y))


def _as_bool(g: Builder, x: Operand) -> Value:
    return g.cast(x, torch.bool)


@aten("logical_and")
def logical_and(g: Builder, x: Value, y: Value) -> Value:
    return g.And(_as_bool(g, x), _as_bool(g, y))


@aten("logical_or")
def logical_or(g: Builder, x: Value, y: Value) -> Value:
    return g.Or(_as_bool(g, x), _as_bool(g, y))


@aten("logical_xor")
def logical_xor(g: Builder, x: Value, y: Value) -> Value:
    return g.Xor(_as_bool(g, x), _as_bool(g, y))


@aten("logical_not")
def logical_not(g: Builder, x: Value) -> Value:
    return g.Not(_as_bool(g, x))


def _register_bitwise(name: str, logical: str, bitwise: str) -> None:
    @aten(f"{name}.Tensor", f"{name}.Scalar", f"{name}.Scalar_Tensor")
    def bitwise_op(g: Builder, x: Operand, y: Operand) -> Value:
        return g.node(logical if g.out.dtype == torch.bool else bitwise, operands(g, x, y))


for _name, _logical, _bitwise in (
    ("bitwise_and", "And", "BitwiseAnd"),
    ("bitwise_or", "Or", "BitwiseOr"),
    ("bitwise_xor", "Xor", "BitwiseXor"),
):
    _register_bitwise(_name, _logical, _bitwise)


@aten("bitwise_not")
def bitwise_not(g: Builder, x: Value) -> Value:
    return g.Not(x) if g.out.dtype == torch.bool else g.BitwiseNot(x)


@aten("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar")
def where(g: Builder, condition: Value, x: Operand, y: Operand) -> Value:
    return g.Where(_as_bool(g, condition), *operands(g, x, y))


@aten("masked_fill.Scalar", "masked_fill.Tensor")
def masked_fill(g: Builder, x: Value, mask: Value, value: Operand) -> Value:
    return g.Where(mask, g.cast(value, g.out.dtype), x)


# Casts and copies


@aten("_to_copy")
def to_copy(g: Builder, x: Value, *, dtype: torch.dtype | None = None, **ignored: Any) -> Value:
    return g.cast(x, dtype or g.dtype(x))


@prims("convert_element_type")
def convert_element_type(g: Builder, x: Value, dtype: torch.dtype) -> Value:
    return g.cast(x, dtype)


@aten("clone", "contiguous", "alias", "detach", "lift_fresh_copy", "lift_fresh")
def same(g: Builder, x: Value, **ignored: Any) -> Value:
    return x


@aten("copy")
def copy(g: Builder, x: Value, source: Value, non_blocking: bool = False) -> Value:
    return g.expand(g.cast(source, g.out.dtype), g.dims(x))
