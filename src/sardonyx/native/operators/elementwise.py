"""Operators that compute each element by itself."""

from __future__ import annotations

import onnx_ir as ir

from sardonyx.native.region import CannotLower, Lowering, dtype_of
from sardonyx.native.table import (
    BOOL,
    FLOATS,
    INTEGERS,
    NARROW,
    float_of,
    given,
    int_of,
    less,
    lowers,
    need_floats,
    negative,
    optional,
    plus,
    scaled,
    text_of,
    to_type,
    where,
    widened,
)
from sardonyx.native.values import Value, dim_of
from sardonyx.sizes import Dims


def _elementwise(name: str, operator: str, *, floats: bool = False, to: ir.DataType | None = None) -> None:
    @lowers(name)
    def entry(r: Lowering, node: ir.Node) -> None:
        args = [given(r, node, i) for i in range(len(node.inputs))]
        if floats:
            need_floats(args[0], node)
        r.give(node.outputs[0], r.apply(operator, *args, dtype=to))


for _name, _operator in {
    "Exp": "exp", "Log": "log", "Sqrt": "sqrt", "Erf": "erf", "Tanh": "tanh", "Sigmoid": "sigmoid", "Floor": "floor",
    "Ceil": "ceil", "Round": "round", "Sin": "sin", "Cos": "cos", "Tan": "tan", "Asin": "asin", "Acos": "acos",
    "Atan": "atan", "Sinh": "sinh", "Cosh": "cosh", "Asinh": "asinh", "Acosh": "acosh", "Atanh": "atanh",
}.items():  # fmt: skip
    _elementwise(_name, _operator, floats=True)
for _name, _operator in {
    "Add": "add", "Sub": "sub", "Mul": "mul", "Div": "div", "Neg": "neg", "Abs": "abs", "Sign": "sign", "Relu": "relu",
    "BitwiseAnd": "and", "BitwiseOr": "or", "BitwiseXor": "xor", "BitwiseNot": "not",
}.items():  # fmt: skip
    _elementwise(_name, _operator)
for _name, _operator in {
    "Less": "less", "LessOrEqual": "less_equal", "Equal": "equal", "And": "and", "Or": "or", "Xor": "xor", "Not": "not",
}.items():  # fmt: skip
    _elementwise(_name, _operator, to=BOOL)
_elementwise("IsNaN", "is_nan", floats=True, to=BOOL)


@lowers("Greater", "GreaterOrEqual")
def _greater(r: Lowering, node: ir.Node) -> None:
    operator = "less" if node.op_type == "Greater" else "less_equal"
    r.give(node.outputs[0], r.apply(operator, given(r, node, 1), given(r, node, 0), dtype=BOOL))


@lowers("IsInf")
def _is_inf(r: Lowering, node: ir.Node) -> None:
    x = given(r, node, 0)
    need_floats(x, node)
    below, above = int_of(node, "detect_negative", 1), int_of(node, "detect_positive", 1)
    if below and above:
        found = r.apply("is_inf", x, dtype=BOOL)
    elif below or above:
        top = r.number(float("inf") if above else float("-inf"), x)
        found = r.apply("equal", x, top, dtype=BOOL)
    else:
        found = r.apply("xor", r.apply("is_inf", x, dtype=BOOL), r.apply("is_inf", x, dtype=BOOL))
    r.give(node.outputs[0], found)


@lowers("Pow")
def _pow(r: Lowering, node: ir.Node) -> None:
    """In the base's type, or in double precision where base or exponent could not be told in it."""
    x, y = given(r, node, 0), given(r, node, 1)
    if x.dtype in FLOATS and (y.dtype == x.dtype or y.dtype in INTEGERS):
        result = r.apply("pow", x, to_type(r, y, x.dtype))
    else:
        wide = (to_type(r, value, ir.DataType.DOUBLE) for value in (x, y))
        result = to_type(r, r.apply("pow", *wide), x.dtype)
    r.give(node.outputs[0], result)


@lowers("Mod")
def _mod(r: Lowering, node: ir.Node) -> None:
    """The rest has the sign of the divisor, or, by `fmod`, of what is divided."""
    x, y = given(r, node, 0), given(r, node, 1)
    as_in_c = int_of(node, "fmod", 0)
    if not as_in_c and x.dtype in FLOATS:
        r.give(node.outputs[0], _real_modulo(r, x, y))
    else:
        r.give(node.outputs[0], r.apply("fmod" if as_in_c else "mod", x, y))


def _real_modulo(r: Lowering, x: Value, y: Value) -> Value:
    """The rest with the sign of the divisor, that of a zero included."""
    rest, zero = r.apply("fmod", x, y), r.number(0.0, x)
    below = negative(r, y)
    is_zero = r.apply("equal", rest, zero, dtype=BOOL)
    other_sign = r.apply("xor", negative(r, rest), below, dtype=BOOL)
    moved = where(r, other_sign, r.apply("add", rest, y), rest)
    return where(r, is_zero, where(r, below, r.apply("neg", zero), zero), moved)


@lowers("BitShift")
def _shift(r: Lowering, node: ir.Node) -> None:
    operator = "shift_left" if text_of(node, "direction", "") == "LEFT" else "shift_right"
    r.give(node.outputs[0], r.apply(operator, given(r, node, 0), given(r, node, 1)))


def _folded(r: Lowering, node: ir.Node, operator: str) -> Value:
    result = given(r, node, 0)
    for index in range(1, len(node.inputs)):
        result = r.apply(operator, result, given(r, node, index))
    return result


@lowers("Min", "Max", "Sum")
def _several(r: Lowering, node: ir.Node) -> None:
    r.give(node.outputs[0], _folded(r, node, {"Min": "min", "Max": "max", "Sum": "add"}[node.op_type]))


@lowers("Mean")
def _mean(r: Lowering, node: ir.Node) -> None:
    r.give(node.outputs[0], scaled(r, _folded(r, node, "add"), 1 / len(node.inputs)))


@lowers("Where")
def _where(r: Lowering, node: ir.Node) -> None:
    r.give(node.outputs[0], where(r, *(given(r, node, i) for i in range(3))))


@lowers("Cast", "CastLike")
def _cast(r: Lowering, node: ir.Node) -> None:
    r.give(node.outputs[0], to_type(r, given(r, node, 0), dtype_of(node.outputs[0])))


@lowers("Reciprocal")
def _reciprocal(r: Lowering, node: ir.Node) -> None:
    x = given(r, node, 0)
    r.give(node.outputs[0], r.apply("div", r.number(1.0, x), x))


@lowers("Clip")
def _clip(r: Lowering, node: ir.Node) -> None:
    x, low, high = given(r, node, 0), optional(r, node, 1), optional(r, node, 2)
    if low is not None:
        x = r.apply("max", x, low)
    if high is not None:
        x = r.apply("min", x, high)
    r.give(node.outputs[0], x)


@lowers("Shrink")
def _shrink(r: Lowering, node: ir.Node) -> None:
    x = given(r, node, 0)
    need_floats(x, node)
    bias, edge = float_of(node, "bias", 0.0), float_of(node, "lambd", 0.5)
    above = where(r, less(r, r.number(edge, x), x), plus(r, x, -bias), r.number(0.0, x))
    r.give(node.outputs[0], where(r, less(r, x, r.number(-edge, x)), plus(r, x, bias), above))


# Quantised numbers


def _along(r: Lowering, node: ir.Node, index: int, dims: Dims) -> Value | None:
    """One number, or one for each place along an axis, or one for each block of places there."""
    x, block = optional(r, node, index), int_of(node, "block_size", 0)
    if x is None or not x.dims:
        return x
    axis = int_of(node, "axis", 1) % len(dims)
    if block:
        size, blocks = dims[axis], x.dims[axis]
        if size != dim_of(blocks * block):
            raise CannotLower(f"{size} numbers quantised in {blocks} blocks of {block}")
        apart = (*x.dims[: axis + 1], block, *x.dims[axis + 1 :])
        return r.seen(r.expand(r.unsqueeze(x, [axis + 1]), apart), dims)
    return x if len(dims) == 1 else r.unsqueeze(x, [a for a in range(len(dims)) if a != axis])


@lowers("DequantizeLinear")
def _dequantize(r: Lowering, node: ir.Node) -> None:
    x = given(r, node, 0)
    scale, zero = (_along(r, node, i, x.dims) for i in (1, 2))
    assert scale is not None
    x = to_type(r, x, ir.DataType.INT32)
    if zero is not None:
        x = r.apply("sub", x, to_type(r, zero, ir.DataType.INT32))
    wide = widened(r, scale)
    r.give(node.outputs[0], to_type(r, r.apply("mul", to_type(r, x, wide.dtype), wide), dtype_of(node.outputs[0])))


_RANGES = {
    ir.DataType.INT8: (-128, 127),
    ir.DataType.UINT8: (0, 255),
    ir.DataType.INT16: (-32768, 32767),
    ir.DataType.UINT16: (0, 65535),
}


@lowers("QuantizeLinear")
def _quantize(r: Lowering, node: ir.Node) -> None:
    x, dtype = given(r, node, 0), dtype_of(node.outputs[0])
    if x.dtype not in FLOATS - NARROW or dtype not in _RANGES:
        raise CannotLower(f"QuantizeLinear from {x.dtype} to {dtype}")
    scale, zero = (_along(r, node, i, x.dims) for i in (1, 2))
    assert scale is not None
    steps = r.apply("round", r.apply("div", x, scale))
    if zero is not None:
        steps = r.apply("add", steps, to_type(r, zero, x.dtype))
    low, high = (r.number(float(edge), x) for edge in _RANGES[dtype])
    r.give(node.outputs[0], to_type(r, r.apply("min", r.apply("max", steps, low), high), dtype))
