"""ONNX operators as loops: one entry an operator."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import onnx_ir as ir
import sympy

from sardonyx.native.nests import How
from sardonyx.native.region import CannotLower, Lowering, dims_of, dtype_of
from sardonyx.native.values import Number, Value
from sardonyx.optimize.pattern import array_of
from sardonyx.translate.sizes import Dim, dim_of

Lower: TypeAlias = Callable[[Lowering, ir.Node], None]
TABLE: dict[tuple[str, str], Lower] = {}
"""How an operator of a domain is lowered."""

BOOL = ir.DataType.BOOL
FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
INTEGERS = frozenset(
    {
        *(ir.DataType.INT8, ir.DataType.INT16, ir.DataType.INT32, ir.DataType.INT64),
        *(ir.DataType.UINT8, ir.DataType.UINT16, ir.DataType.UINT32, ir.DataType.UINT64),
    }
)
TYPES = FLOATS | INTEGERS | {BOOL}
LAYOUT = frozenset(
    {"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Expand", "Identity", "Slice", "Concat", "Split"}
)
"""Operators that move elements about and compute nothing."""


def lowers(*names: str, domain: str = "") -> Callable[[Lower], Lower]:
    """Enter a lowering into the table."""

    def enter(function: Lower) -> Lower:
        for name in names:
            TABLE[domain, name] = function
        return function

    return enter


def lower(region: Lowering, node: ir.Node) -> None:
    """Lower one node; `CannotLower` says why not."""
    for value in (*node.inputs, *node.outputs):
        if value is not None and value.dtype not in TYPES and (value.dtype is not None or value.uses()):
            raise CannotLower(f"{value.name} has the type {value.dtype}")
    entry = TABLE.get((node.domain, node.op_type))
    if entry is None:
        raise CannotLower(f"{node.op_type} has no lowering")
    entry(region, node)


# Operands


def _given(r: Lowering, node: ir.Node, index: int) -> Value:
    value = node.inputs[index]
    assert value is not None
    return r.value(value)


def _optional(r: Lowering, node: ir.Node, index: int) -> Value | None:
    value = node.inputs[index] if index < len(node.inputs) else None
    return None if value is None else r.value(value)


def _float(node: ir.Node, name: str, default: float) -> float:
    return node.attributes[name].as_float() if name in node.attributes else default


def _int(node: ir.Node, name: str, default: int) -> int:
    return node.attributes[name].as_int() if name in node.attributes else default


def _text(node: ir.Node, name: str, default: str) -> str:
    return node.attributes[name].as_string() if name in node.attributes else default


def _constants(node: ir.Node, index: int, attribute: str = "") -> list[int] | None:
    """Integers that an input or an attribute holds; None if not given."""
    if attribute in node.attributes:
        return list(node.attributes[attribute].as_ints())
    value = node.inputs[index] if index < len(node.inputs) else None
    if value is None:
        return None
    array = array_of(value)
    if array is None:
        raise CannotLower(f"{value.name} of {node.op_type} is no constant")
    return [int(x) for x in array.reshape(-1)]


def _need_floats(value: Value, node: ir.Node) -> None:
    if value.dtype not in FLOATS:
        raise CannotLower(f"{node.op_type} of {value.dtype}")


# Elementwise


def _elementwise(name: str, operator: str, *, floats: bool = True, to: ir.DataType | None = None) -> None:
    @lowers(name)
    def entry(r: Lowering, node: ir.Node) -> None:
        args = [_given(r, node, i) for i in range(len(node.inputs))]
        if floats:
            _need_floats(args[0], node)
        r.give(node.outputs[0], r.apply(operator, *args, dtype=to))


for _name, _operator in {
    "Exp": "exp", "Log": "log", "Sqrt": "sqrt", "Erf": "erf", "Tanh": "tanh", "Sigmoid": "sigmoid", "Floor": "floor",
    "Ceil": "ceil", "Round": "round", "Sin": "sin", "Cos": "cos", "Tan": "tan", "Asin": "asin", "Acos": "acos",
    "Atan": "atan", "Sinh": "sinh", "Cosh": "cosh", "Asinh": "asinh", "Acosh": "acosh", "Atanh": "atanh",
}.items():  # fmt: skip
    _elementwise(_name, _operator)
for _name, _operator in {"Add": "add", "Sub": "sub", "Mul": "mul", "Neg": "neg", "Abs": "abs", "Sign": "sign"}.items():
    _elementwise(_name, _operator, floats=False)
for _name, _operator in {"Div": "div", "Pow": "pow"}.items():
    _elementwise(_name, _operator)
for _name, _operator in {"Less": "less", "LessOrEqual": "less_equal", "Equal": "equal", "IsNaN": "is_nan"}.items():
    _elementwise(_name, _operator, floats=False, to=BOOL)
for _name, _operator in {"And": "and", "Or": "or", "Xor": "xor", "Not": "not"}.items():
    _elementwise(_name, _operator, floats=False, to=BOOL)
_elementwise("Relu", "relu", floats=False)


@lowers("Greater", "GreaterOrEqual")
def _greater(r: Lowering, node: ir.Node) -> None:
    operator = "less" if node.op_type == "Greater" else "less_equal"
    r.give(node.outputs[0], r.apply(operator, _given(r, node, 1), _given(r, node, 0), dtype=BOOL))


@lowers("IsInf")
def _is_inf(r: Lowering, node: ir.Node) -> None:
    if not (_int(node, "detect_negative", 1) and _int(node, "detect_positive", 1)):
        raise CannotLower("IsInf of one sign")
    x = _given(r, node, 0)
    _need_floats(x, node)
    r.give(node.outputs[0], r.apply("is_inf", x, dtype=BOOL))


@lowers("Min", "Max")
def _extreme(r: Lowering, node: ir.Node) -> None:
    operator = "min" if node.op_type == "Min" else "max"
    result = _given(r, node, 0)
    for index in range(1, len(node.inputs)):
        result = r.apply(operator, result, _given(r, node, index))
    r.give(node.outputs[0], result)


@lowers("Sum")
def _sum(r: Lowering, node: ir.Node) -> None:
    result = _given(r, node, 0)
    for index in range(1, len(node.inputs)):
        result = r.apply("add", result, _given(r, node, index))
    r.give(node.outputs[0], result)


@lowers("Where")
def _where(r: Lowering, node: ir.Node) -> None:
    condition, yes, no = (_given(r, node, i) for i in range(3))
    r.give(node.outputs[0], r.apply("select", condition, yes, no, dtype=yes.dtype))


@lowers("Cast")
def _cast(r: Lowering, node: ir.Node) -> None:
    r.give(node.outputs[0], _to(r, _given(r, node, 0), dtype_of(node.outputs[0])))


def _to(r: Lowering, x: Value, dtype: ir.DataType) -> Value:
    if x.dtype == dtype:
        return x
    if x.dtype in FLOATS and dtype in INTEGERS:
        raise CannotLower("what a float too large for an integer becomes is not the same everywhere")
    return r.apply("cast", x, dtype=dtype)


@lowers("Reciprocal")
def _reciprocal(r: Lowering, node: ir.Node) -> None:
    x = _given(r, node, 0)
    r.give(node.outputs[0], r.apply("div", r.number(1.0, x), x))


@lowers("Clip")
def _clip(r: Lowering, node: ir.Node) -> None:
    x, low, high = _given(r, node, 0), _optional(r, node, 1), _optional(r, node, 2)
    if low is not None:
        x = r.apply("max", x, low)
    if high is not None:
        x = r.apply("min", x, high)
    r.give(node.outputs[0], x)


# Activations


def _activation(name: str, domain: str = "") -> Callable[[Callable[[Lowering, ir.Node, Value], Value]], None]:
    def enter(function: Callable[[Lowering, ir.Node, Value], Value]) -> None:
        @lowers(name, domain=domain)
        def entry(r: Lowering, node: ir.Node) -> None:
            x = _given(r, node, 0)
            _need_floats(x, node)
            r.give(node.outputs[0], function(r, node, x))

    return enter


def _scaled(r: Lowering, x: Value, factor: float) -> Value:
    return x if factor == 1.0 else r.apply("mul", x, r.number(factor, x))


def _plus(r: Lowering, x: Value, term: float) -> Value:
    return r.apply("add", x, r.number(term, x))


def _positive(r: Lowering, x: Value, yes: Value, no: Value) -> Value:
    return r.apply("select", r.apply("less", r.number(0.0, x), x, dtype=BOOL), yes, no, dtype=x.dtype)


def _gelu(r: Lowering, node: ir.Node, x: Value) -> Value:
    if _text(node, "approximate", "none") == "tanh":
        cube = r.apply("mul", r.apply("mul", x, x), x)
        inside = _scaled(r, r.apply("add", x, _scaled(r, cube, 0.044715)), math.sqrt(2 / math.pi))
        bend = r.apply("tanh", inside)
    else:
        bend = r.apply("erf", _scaled(r, x, math.sqrt(0.5)))
    return r.apply("mul", _scaled(r, x, 0.5), _plus(r, bend, 1.0))


_activation("Gelu")(_gelu)
_activation("Gelu", "com.microsoft")(_gelu)


@_activation("QuickGelu", "com.microsoft")
def _quick_gelu(r: Lowering, node: ir.Node, x: Value) -> Value:
    return r.apply("mul", x, r.apply("sigmoid", _scaled(r, x, _float(node, "alpha", 1.702))))


@_activation("LeakyRelu")
def _leaky_relu(r: Lowering, node: ir.Node, x: Value) -> Value:
    return r.apply("select", _negative(r, x), _scaled(r, x, _float(node, "alpha", 0.01)), x, dtype=x.dtype)


def _negative(r: Lowering, x: Value) -> Value:
    return r.apply("less", x, r.number(0.0, x), dtype=BOOL)


@_activation("Elu")
def _elu(r: Lowering, node: ir.Node, x: Value) -> Value:
    bent = _scaled(r, _plus(r, r.apply("exp", x), -1.0), _float(node, "alpha", 1.0))
    return r.apply("select", _negative(r, x), bent, x, dtype=x.dtype)


@_activation("Selu")
def _selu(r: Lowering, node: ir.Node, x: Value) -> Value:
    bent = _scaled(r, _plus(r, r.apply("exp", x), -1.0), _float(node, "alpha", 1.6732632423543772))
    return _scaled(
        r, r.apply("select", _negative(r, x), bent, x, dtype=x.dtype), _float(node, "gamma", 1.0507009873554805)
    )


@_activation("HardSigmoid")
def _hard_sigmoid(r: Lowering, node: ir.Node, x: Value) -> Value:
    line = _plus(r, _scaled(r, x, _float(node, "alpha", 0.2)), _float(node, "beta", 0.5))
    return r.apply("min", r.apply("max", line, r.number(0.0, x)), r.number(1.0, x))


@_activation("HardSwish")
def _hard_swish(r: Lowering, node: ir.Node, x: Value) -> Value:
    line = _plus(r, _scaled(r, x, 1 / 6), 0.5)
    return r.apply("mul", x, r.apply("min", r.apply("max", line, r.number(0.0, x)), r.number(1.0, x)))


def _softplus(r: Lowering, x: Value) -> Value:
    """log(1 + eˣ) = max(x, 0) + log(1 + e⁻ˣ), where nothing overflows."""
    far = r.apply("exp", r.apply("neg", r.apply("abs", x)))
    return r.apply("add", r.apply("relu", x), r.apply("log", _plus(r, far, 1.0)))


@_activation("Softplus")
def _softplus_node(r: Lowering, node: ir.Node, x: Value) -> Value:
    return _softplus(r, x)


@_activation("Mish")
def _mish(r: Lowering, node: ir.Node, x: Value) -> Value:
    return r.apply("mul", x, r.apply("tanh", _softplus(r, x)))


@_activation("Softsign")
def _softsign(r: Lowering, node: ir.Node, x: Value) -> Value:
    return r.apply("div", x, _plus(r, r.apply("abs", x), 1.0))


@_activation("ThresholdedRelu")
def _thresholded_relu(r: Lowering, node: ir.Node, x: Value) -> Value:
    above = r.apply("less", r.number(_float(node, "alpha", 1.0), x), x, dtype=BOOL)
    return r.apply("select", above, x, r.number(0.0, x), dtype=x.dtype)


@_activation("PRelu")
def _prelu(r: Lowering, node: ir.Node, x: Value) -> Value:
    return r.apply("select", _negative(r, x), r.apply("mul", x, _given(r, node, 1)), x, dtype=x.dtype)


# Reductions


def _axes(node: ir.Node, rank: int) -> list[int]:
    axes = _constants(node, 1, "axes")
    if not axes:
        return [] if _int(node, "noop_with_empty_axes", 0) else list(range(rank))
    return [axis % rank for axis in axes]


@lowers("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSumSquare", "ReduceL1", "ReduceL2")
def _reduce(r: Lowering, node: ir.Node) -> None:
    x = _given(r, node, 0)
    kind = node.op_type.removeprefix("Reduce")
    if kind in ("Mean", "L2") or x.dtype == BOOL:
        _need_floats(x, node)
    axes = _axes(node, len(x.dims))
    if any(x.dims[axis] == 0 for axis in axes):
        raise CannotLower("a reduction of nothing")
    if kind in ("SumSquare", "L2"):
        x = r.apply("mul", x, x)
    elif kind == "L1":
        x = r.apply("abs", x)
    if kind == "Mean":
        result = r.mean(x, axes)
    else:
        hows: dict[str, How] = {"Max": "Largest", "Min": "Smallest", "Prod": "Product"}
        result = r.reduce(hows.get(kind, "Sum"), x, axes)
    if kind == "L2":
        result = r.apply("sqrt", result)
    r.give(node.outputs[0], result if _int(node, "keepdims", 1) else r.squeeze(result, axes))


@lowers("Softmax", "LogSoftmax")
def _softmax(r: Lowering, node: ir.Node) -> None:
    x = r.settled(_given(r, node, 0))
    _need_floats(x, node)
    axes = [_int(node, "axis", -1) % len(x.dims)]
    shifted = r.apply("sub", x, r.reduce("Largest", x, axes))
    if node.op_type == "LogSoftmax":
        total = r.reduce("Sum", r.apply("exp", shifted), axes)
        r.give(node.outputs[0], r.apply("sub", shifted, r.apply("log", total)))
        return
    powers = r.stored(r.apply("exp", shifted))
    share = r.apply("div", r.number(1.0, x), r.reduce("Sum", powers, axes))
    r.give(node.outputs[0], r.apply("mul", powers, r.stored(share)))


# Normalisations: two passes, the mean before the variance


def _moments(r: Lowering, x: Value, axes: Sequence[int], epsilon: float) -> tuple[Value, Value, Value]:
    """The centred value, the mean and the inverse deviation over these axes."""
    x = r.settled(x)
    mean = r.stored(r.mean(x, axes))
    centred = r.apply("sub", x, mean)
    variance = r.mean(r.apply("mul", centred, centred), axes)
    return centred, mean, _inverse_root(r, variance, epsilon)


def _inverse_root(r: Lowering, variance: Value, epsilon: float) -> Value:
    return r.stored(r.apply("div", r.number(1.0, variance), r.apply("sqrt", _plus(r, variance, epsilon))))


def _give_optional(r: Lowering, node: ir.Node, index: int, value: Value | None) -> None:
    """A further result, where anybody asks for it."""
    if index < len(node.outputs) and node.outputs[index].name and node.outputs[index].shape is not None:
        if value is None:
            raise CannotLower(f"{node.op_type} with {len(node.outputs)} results")
        r.give(node.outputs[index], value)


def _scaled_and_moved(r: Lowering, x: Value, scale: Value | None, bias: Value | None) -> Value:
    x = x if scale is None else r.apply("mul", x, scale)
    return x if bias is None else r.apply("add", x, bias)


@lowers("LayerNormalization")
def _layer_norm(r: Lowering, node: ir.Node) -> None:
    x = _given(r, node, 0)
    _need_floats(x, node)
    axes = range(_int(node, "axis", -1) % len(x.dims), len(x.dims))
    centred, mean, inverse = _moments(r, x, axes, _float(node, "epsilon", 1e-5))
    y = _scaled_and_moved(r, r.apply("mul", centred, inverse), _given(r, node, 1), _optional(r, node, 2))
    r.give(node.outputs[0], y)
    _give_optional(r, node, 1, mean)
    _give_optional(r, node, 2, inverse)


@lowers("RMSNormalization", "SimplifiedLayerNormalization")
def _rms_norm(r: Lowering, node: ir.Node) -> None:
    x = _given(r, node, 0)
    _need_floats(x, node)
    axes = range(_int(node, "axis", -1) % len(x.dims), len(x.dims))
    inverse = _inverse_root(r, r.mean(r.apply("mul", x, x), axes), _float(node, "epsilon", 1e-5))
    r.give(node.outputs[0], r.apply("mul", r.apply("mul", x, inverse), _given(r, node, 1)))
    _give_optional(r, node, 1, inverse)


@lowers("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", domain="com.microsoft")
def _skip_layer_norm(r: Lowering, node: ir.Node) -> None:
    simple = node.op_type == "SkipSimplifiedLayerNormalization"
    x = r.apply("add", _given(r, node, 0), _given(r, node, 1))
    _need_floats(x, node)
    bias = _optional(r, node, 3 if simple else 4)
    x = r.stored(x if bias is None else r.apply("add", x, bias))
    axes, epsilon = [len(x.dims) - 1], _float(node, "epsilon", 1e-12)
    if simple:
        y: Value = r.apply("mul", x, _inverse_root(r, r.mean(r.apply("mul", x, x), axes), epsilon))
    else:
        centred, _, inverse = _moments(r, x, axes, epsilon)
        y = r.apply("mul", centred, inverse)
    r.give(node.outputs[0], _scaled_and_moved(r, y, _given(r, node, 2), None if simple else _optional(r, node, 3)))
    for index in (1, 2):
        _give_optional(r, node, index, None)
    _give_optional(r, node, 3, x)


def _per_channel(r: Lowering, given: Value, rank: int) -> Value:
    return r.unsqueeze(given, [0, *range(2, rank)])


@lowers("BatchNormalization")
def _batch_norm(r: Lowering, node: ir.Node) -> None:
    if _int(node, "training_mode", 0):
        raise CannotLower("BatchNormalization that trains")
    x = _given(r, node, 0)
    _need_floats(x, node)
    scale, bias, mean, variance = (_given(r, node, i) for i in range(1, 5))
    rank = len(x.dims)
    factor = r.stored(r.apply("mul", scale, _inverse_root(r, variance, _float(node, "epsilon", 1e-5))))
    centred = r.apply("sub", x, _per_channel(r, mean, rank))
    r.give(
        node.outputs[0],
        r.apply("add", r.apply("mul", centred, _per_channel(r, factor, rank)), _per_channel(r, bias, rank)),
    )


@lowers("InstanceNormalization")
def _instance_norm(r: Lowering, node: ir.Node) -> None:
    x = _given(r, node, 0)
    _need_floats(x, node)
    rank = len(x.dims)
    centred, _, inverse = _moments(r, x, range(2, rank), _float(node, "epsilon", 1e-5))
    scale, bias = (_per_channel(r, _given(r, node, i), rank) for i in (1, 2))
    r.give(node.outputs[0], _scaled_and_moved(r, r.apply("mul", centred, inverse), scale, bias))


# Layout


@lowers("Identity")
def _identity(r: Lowering, node: ir.Node) -> None:
    r.give(node.outputs[0], _given(r, node, 0))


@lowers("Reshape", "Flatten")
def _reshape(r: Lowering, node: ir.Node) -> None:
    source = node.inputs[0]
    assert source is not None
    r.give(node.outputs[0], r.reshape(r.unread(source), dims_of(node.outputs[0])))


@lowers("Squeeze")
def _squeeze(r: Lowering, node: ir.Node) -> None:
    x = _given(r, node, 0)
    axes = _constants(node, 1, "axes")
    chosen = [axis % len(x.dims) for axis in axes] if axes is not None else [i for i, d in enumerate(x.dims) if d == 1]
    r.give(node.outputs[0], r.squeeze(x, chosen))


@lowers("Unsqueeze")
def _unsqueeze(r: Lowering, node: ir.Node) -> None:
    x = _given(r, node, 0)
    axes = _constants(node, 1, "axes") or []
    rank = len(x.dims) + len(axes)
    r.give(node.outputs[0], r.unsqueeze(x, [axis % rank for axis in axes]))


@lowers("Expand")
def _expand(r: Lowering, node: ir.Node) -> None:
    r.give(node.outputs[0], r.expand(_given(r, node, 0), dims_of(node.outputs[0])))


@lowers("Transpose")
def _transpose(r: Lowering, node: ir.Node) -> None:
    x = _given(r, node, 0)
    order = node.attributes["perm"].as_ints() if "perm" in node.attributes else range(len(x.dims))[::-1]
    r.give(node.outputs[0], r.permute(x, order))


@lowers("Concat")
def _concat(r: Lowering, node: ir.Node) -> None:
    pieces = [r.unread(x) for x in node.inputs if x is not None]
    dims = dims_of(node.outputs[0])
    r.give(node.outputs[0], r.joined(pieces, _int(node, "axis", 0) % len(dims), dims))


@lowers("Split")
def _split(r: Lowering, node: ir.Node) -> None:
    x = _given(r, node, 0)
    axis = _int(node, "axis", 0) % len(x.dims)
    start = 0
    for output in node.outputs:
        size = dims_of(output)[axis]
        r.give(output, r.cut(x, axis, start, 1, size))
        start = dim_of(start + size)


@lowers("Slice")
def _slice(r: Lowering, node: ir.Node) -> None:
    x = _given(r, node, 0)
    starts, ends = _constants(node, 1), _constants(node, 2)
    assert starts is not None
    assert ends is not None
    axes = _constants(node, 3) or list(range(len(starts)))
    steps = _constants(node, 4) or [1] * len(starts)
    dims = dims_of(node.outputs[0])
    for start, step, axis in zip(starts, steps, axes, strict=True):
        axis %= len(x.dims)
        size = x.dims[axis]
        if step < 1 or (start < 0 and not isinstance(size, int)):
            raise CannotLower("Slice backwards, or from the end of a symbolic size")
        begin = start if start >= 0 else max(0, int(size) + start)
        x = r.cut(x, axis, begin, step, dims[axis])
    r.give(node.outputs[0], x)


@lowers("Pad")
def _pad(r: Lowering, node: ir.Node) -> None:
    if _text(node, "mode", "constant") != "constant":
        raise CannotLower(f"Pad by {_text(node, 'mode', '')}")
    x = _given(r, node, 0)
    fill = _optional(r, node, 2)
    if fill is not None and not isinstance(fill, Number):
        raise CannotLower("Pad with a number that is no constant")
    number = 0 if fill is None else fill.value
    assert not isinstance(number, sympy.Expr)
    amounts = _constants(node, 1)
    axes = _constants(node, 3) or list(range(len(x.dims)))
    assert amounts is not None
    for axis, before, after in zip(axes, amounts[: len(axes)], amounts[len(axes) :], strict=True):
        axis %= len(x.dims)
        if before or after:
            x = r.pad(x, axis, before, dim_of(x.dims[axis] + before + after), number)
    r.give(node.outputs[0], x)


@lowers("MaxPool")
def _max_pool(r: Lowering, node: ir.Node) -> None:
    """The largest of each window, and its place in the input, the first of equal ones."""
    x = _given(r, node, 0)
    _need_floats(x, node)
    kernel = list(node.attributes["kernel_shape"].as_ints())
    ones = [1] * len(kernel)
    strides, dilations, pads = (
        list(node.attributes[name].as_ints()) if name in node.attributes else default
        for name, default in (("strides", ones), ("dilations", ones), ("pads", [0, 0] * len(kernel)))
    )
    if any(pads) or _text(node, "auto_pad", "NOTSET") != "NOTSET" or _int(node, "storage_order", 0):
        raise CannotLower("MaxPool with padding")
    if math.prod(kernel) > _LARGEST_WINDOW:
        raise CannotLower("MaxPool over a large window")
    sizes = dims_of(node.outputs[0])[2:]
    windows = [
        [(2 + axis, offset * dilations[axis], strides[axis], sizes[axis]) for axis, offset in enumerate(offsets)]
        for offsets in itertools.product(*map(range, kernel))
    ]
    best, place = _seen_by(r, x, windows[0]), _seen_by(r, r.places(x.dims), windows[0])
    for window in windows[1:]:
        value = _seen_by(r, x, window)
        larger, nan = r.apply("less", best, value, dtype=BOOL), r.apply("is_nan", value, dtype=BOOL)
        better = r.apply("or", larger, nan, dtype=BOOL)
        place = r.apply("select", better, _seen_by(r, r.places(x.dims), window), place, dtype=place.dtype)
        best = r.apply("select", better, value, best, dtype=x.dtype)
    r.give(node.outputs[0], best)
    _give_optional(r, node, 1, place)


def _seen_by(r: Lowering, x: Value, window: Sequence[tuple[int, int, int, Dim]]) -> Value:
    """What a place of the kernel meets, for each place of the result."""
    for axis, start, step, size in window:
        x = r.cut(x, axis, start, step, size)
    return x


_LARGEST_WINDOW = 16
"""Windows of more places are left to a loop of the engine's."""
