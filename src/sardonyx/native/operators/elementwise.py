"""Elementwise operators."""

from __future__ import annotations

import onnx_ir as ir

from sardonyx.native.region import CannotLower, Lowering, dtype_of
from sardonyx.native.table import (
    BOOL,
    FLOATS,
    INTEGERS,
    NARROW,
    float_of,
    int_of,
    less,
    lowers,
    need_floats,
    negative,
    operand,
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
        args = [operand(r, node, i) for i in range(len(node.inputs))]
        if floats:
            need_floats(args[0], node)
        r.define(node.outputs[0], r.apply(operator, *args, dtype=to))


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
    r.define(node.outputs[0], r.apply(operator, operand(r, node, 1), operand(r, node, 0), dtype=BOOL))


@lowers("IsInf")
def _is_inf(r: Lowering, node: ir.Node) -> None:
    x = operand(r, node, 0)
    need_floats(x, node)
    below, above = int_of(node, "detect_negative", 1), int_of(node, "detect_positive", 1)
    if below and above:
        result = r.apply("is_inf", x, dtype=BOOL)
    elif below or above:
        top = r.number(float("inf") if above else float("-inf"), x)
        result = r.apply("equal", x, top, dtype=BOOL)
    else:
        result = r.apply("xor", r.apply("is_inf", x, dtype=BOOL), r.apply("is_inf", x, dtype=BOOL))
    r.define(node.outputs[0], result)


@lowers("Pow")
def _pow(r: Lowering, node: ir.Node) -> None:
    """Compute in the base's type, or in double precision if it cannot represent base or exponent."""
    x, y = operand(r, node, 0), operand(r, node, 1)
    if x.dtype in FLOATS and (y.dtype == x.dtype or y.dtype in INTEGERS):
        result = r.apply("pow", x, to_type(r, y, x.dtype))
    else:
        wide = (to_type(r, value, ir.DataType.DOUBLE) for value in (x, y))
        result = to_type(r, r.apply("pow", *wide), x.dtype)
    r.define(node.outputs[0], result)


@lowers("Mod")
def _mod(r: Lowering, node: ir.Node) -> None:
    """The remainder has the sign of the divisor, or with `fmod` of the dividend."""
    x, y = operand(r, node, 0), operand(r, node, 1)
    as_in_c = int_of(node, "fmod", 0)
    if not as_in_c and x.dtype in FLOATS:
        r.define(node.outputs[0], _float_modulo(r, x, y))
    else:
        r.define(node.outputs[0], r.apply("fmod" if as_in_c else "mod", x, y))


def _float_modulo(r: Lowering, x: Value, y: Value) -> Value:
    """Return the remainder with the sign of the divisor, also for zero."""
    remainder, zero = r.apply("fmod", x, y), r.number(0.0, x)
    below = negative(r, y)
    is_zero = r.apply("equal", remainder, zero, dtype=BOOL)
    other_sign = r.apply("xor", negative(r, remainder), below, dtype=BOOL)
    moved = where(r, other_sign, r.apply("add", remainder, y), remainder)
    return where(r, is_zero, where(r, below, r.apply("neg", zero), zero), moved)


@lowers("BitShift")
def _shift(r: Lowering, node: ir.Node) -> None:
    operator = "shift_left" if text_of(node, "direction", "") == "LEFT" else "shift_right"
    r.define(node.outputs[0], r.apply(operator, operand(r, node, 0), operand(r, node, 1)))


def _reduce_operands(r: Lowering, node: ir.Node, operator: str) -> Value:
    result = operand(r, node, 0)
    for index in range(1, len(node.inputs)):
        result = r.apply(operator, result, operand(r, node, index))
    return result


@lowers("Min", "Max", "Sum")
def _variadic(r: Lowering, node: ir.Node) -> None:
    r.define(node.outputs[0], _reduce_operands(r, node, {"Min": "min", "Max": "max", "Sum": "add"}[node.op_type]))


@lowers("Mean")
def _mean(r: Lowering, node: ir.Node) -> None:
    r.define(node.outputs[0], scaled(r, _reduce_operands(r, node, "add"), 1 / len(node.inputs)))


@lowers("Where")
def _where(r: Lowering, node: ir.Node) -> None:
    r.define(node.outputs[0], where(r, *(operand(r, node, i) for i in range(3))))


@lowers("Cast", "CastLike")
def _cast(r: Lowering, node: ir.Node) -> None:
    r.define(node.outputs[0], to_type(r, operand(r, node, 0), dtype_of(node.outputs[0])))


@lowers("Reciprocal")
def _reciprocal(r: Lowering, node: ir.Node) -> None:
    x = operand(r, node, 0)
    r.define(node.outputs[0], r.apply("div", r.number(1.0, x), x))


@lowers("Clip")
def _clip(r: Lowering, node: ir.Node) -> None:
    x, low, high = operand(r, node, 0), optional(r, node, 1), optional(r, node, 2)
    if low is not None:
        x = r.apply("max", x, low)
    if high is not None:
        x = r.apply("min", x, high)
    r.define(node.outputs[0], x)


@lowers("Shrink")
def _shrink(r: Lowering, node: ir.Node) -> None:
    x = operand(r, node, 0)
    need_floats(x, node)
    bias, edge = float_of(node, "bias", 0.0), float_of(node, "lambd", 0.5)
    above = where(r, less(r, r.number(edge, x), x), plus(r, x, -bias), r.number(0.0, x))
    r.define(node.outputs[0], where(r, less(r, x, r.number(-edge, x)), plus(r, x, bias), above))


# Quantization


def _quantization_parameter(r: Lowering, node: ir.Node, index: int, dims: Dims) -> Value | None:
    """Return a scale or zero point: per tensor, per axis, or per block."""
    x, block = optional(r, node, index), int_of(node, "block_size", 0)
    if x is None or not x.dims:
        return x
    axis = int_of(node, "axis", 1) % len(dims)
    if block:
        size, blocks = dims[axis], x.dims[axis]
        if size != dim_of(blocks * block):
            raise CannotLower(f"an axis of size {size} quantized in {blocks} blocks of {block}")
        blocked = (*x.dims[: axis + 1], block, *x.dims[axis + 1 :])
        return r.view_as(r.expand(r.unsqueeze(x, [axis + 1]), blocked), dims)
    return x if len(dims) == 1 else r.unsqueeze(x, [a for a in range(len(dims)) if a != axis])


@lowers("DequantizeLinear")
def _dequantize(r: Lowering, node: ir.Node) -> None:
    x = operand(r, node, 0)
    scale, zero = (_quantization_parameter(r, node, i, x.dims) for i in (1, 2))
    assert scale is not None
    x = to_type(r, x, ir.DataType.INT32)
    if zero is not None:
        x = r.apply("sub", x, to_type(r, zero, ir.DataType.INT32))
    wide = widened(r, scale)
    r.define(node.outputs[0], to_type(r, r.apply("mul", to_type(r, x, wide.dtype), wide), dtype_of(node.outputs[0])))


_RANGES = {
    ir.DataType.INT8: (-128, 127),
    ir.DataType.UINT8: (0, 255),
    ir.DataType.INT16: (-32768, 32767),
    ir.DataType.UINT16: (0, 65535),
}


@lowers("QuantizeLinear")
def _quantize(r: Lowering, node: ir.Node) -> None:
    x, dtype = operand(r, node, 0), dtype_of(node.outputs[0])
    if x.dtype not in FLOATS - NARROW or dtype not in _RANGES:
        raise CannotLower(f"QuantizeLinear from {x.dtype} to {dtype}")
    scale, zero = (_quantization_parameter(r, node, i, x.dims) for i in (1, 2))
    assert scale is not None
    steps = r.apply("round", r.apply("div", x, scale))
    if zero is not None:
        steps = r.apply("add", steps, to_type(r, zero, x.dtype))
    low, high = (r.number(float(edge), x) for edge in _RANGES[dtype])
    r.define(node.outputs[0], to_type(r, r.apply("min", r.apply("max", steps, low), high), dtype))
