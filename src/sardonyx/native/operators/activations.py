"""Activations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from sardonyx.native.region import CannotLower, Lowering, constant_of
from sardonyx.native.table import (
    BOOL,
    define_optional,
    float_of,
    less,
    lowers,
    need_floats,
    negative,
    operand,
    optional,
    plus,
    scaled,
    text_of,
    where,
)
from sardonyx.native.values import Number, Value

Activation = Callable[[Lowering, ir.Node, Value], Value]


def _activation(name: str, domain: str = "") -> Callable[[Activation], Activation]:
    def enter(function: Activation) -> Activation:
        @lowers(name, domain=domain)
        def entry(r: Lowering, node: ir.Node) -> None:
            x = operand(r, node, 0)
            need_floats(x, node)
            r.define(node.outputs[0], function(r, node, x))

        return function

    return enter


def _half_times_one_plus(r: Lowering, x: Value, y: Value) -> Value:
    """Return x / 2 · (1 + y)."""
    return r.apply("mul", scaled(r, x, 0.5), plus(r, y, 1.0))


def _tanh_gelu(r: Lowering, x: Value) -> Value:
    cube = r.apply("mul", r.apply("mul", x, x), x)
    inside = scaled(r, r.apply("add", x, scaled(r, cube, 0.044715)), math.sqrt(2 / math.pi))
    return _half_times_one_plus(r, x, r.apply("tanh", inside))


def _add_bias(r: Lowering, node: ir.Node, x: Value) -> Value:
    bias = optional(r, node, 1)
    return x if bias is None else r.apply("add", x, bias)


@_activation("Gelu")
@_activation("Gelu", "com.microsoft")
def _gelu(r: Lowering, node: ir.Node, x: Value) -> Value:
    if text_of(node, "approximate", "none") == "tanh":
        return _tanh_gelu(r, x)
    return _half_times_one_plus(r, x, r.apply("erf", scaled(r, x, math.sqrt(0.5))))


@_activation("BiasGelu", "com.microsoft")
def _bias_gelu(r: Lowering, node: ir.Node, x: Value) -> Value:
    x = _add_bias(r, node, x)
    return _half_times_one_plus(r, x, r.apply("erf", scaled(r, x, math.sqrt(0.5))))


@_activation("FastGelu", "com.microsoft")
def _fast_gelu(r: Lowering, node: ir.Node, x: Value) -> Value:
    return _tanh_gelu(r, _add_bias(r, node, x))


@_activation("QuickGelu", "com.microsoft")
def _quick_gelu(r: Lowering, node: ir.Node, x: Value) -> Value:
    return r.apply("mul", x, r.apply("sigmoid", scaled(r, x, float_of(node, "alpha", 1.702))))


@_activation("Swish")
def _swish(r: Lowering, node: ir.Node, x: Value) -> Value:
    return r.apply("mul", x, r.apply("sigmoid", scaled(r, x, float_of(node, "alpha", 1.0))))


@_activation("LeakyRelu")
def _leaky_relu(r: Lowering, node: ir.Node, x: Value) -> Value:
    return where(r, negative(r, x), scaled(r, x, float_of(node, "alpha", 0.01)), x)


def _elu_like(r: Lowering, x: Value, alpha: float) -> Value:
    """Return x, or alpha · (eˣ − 1) where it is negative."""
    return where(r, negative(r, x), scaled(r, plus(r, r.apply("exp", x), -1.0), alpha), x)


@_activation("Elu")
def _elu(r: Lowering, node: ir.Node, x: Value) -> Value:
    return _elu_like(r, x, float_of(node, "alpha", 1.0))


@_activation("Selu")
def _selu(r: Lowering, node: ir.Node, x: Value) -> Value:
    elu = _elu_like(r, x, float_of(node, "alpha", 1.6732632423543772))
    return scaled(r, elu, float_of(node, "gamma", 1.0507009873554805))


@_activation("Celu")
def _celu(r: Lowering, node: ir.Node, x: Value) -> Value:
    alpha = float_of(node, "alpha", 1.0)
    elu = scaled(r, plus(r, r.apply("exp", scaled(r, x, 1 / alpha)), -1.0), alpha)
    return where(r, negative(r, x), elu, x)


def _clamp_to_one(r: Lowering, x: Value) -> Value:
    return r.apply("min", r.apply("max", x, r.number(0.0, x)), r.number(1.0, x))


@_activation("HardSigmoid")
def _hard_sigmoid(r: Lowering, node: ir.Node, x: Value) -> Value:
    line = plus(r, scaled(r, x, float_of(node, "alpha", 0.2)), float_of(node, "beta", 0.5))
    return _clamp_to_one(r, line)


@_activation("HardSwish")
def _hard_swish(r: Lowering, node: ir.Node, x: Value) -> Value:
    return r.apply("mul", x, _clamp_to_one(r, plus(r, scaled(r, x, 1 / 6), 0.5)))


def _softplus(r: Lowering, x: Value) -> Value:
    """Return log(1 + eˣ) = max(x, 0) + log(1 + e⁻ˣ), which does not overflow."""
    exponential = r.apply("exp", r.apply("neg", r.apply("abs", x)))
    return r.apply("add", r.apply("relu", x), r.apply("log1p", exponential))


@_activation("Softplus")
def _softplus_node(r: Lowering, node: ir.Node, x: Value) -> Value:
    return _softplus(r, x)


@_activation("Mish")
def _mish(r: Lowering, node: ir.Node, x: Value) -> Value:
    return r.apply("mul", x, r.apply("tanh", _softplus(r, x)))


@_activation("Softsign")
def _softsign(r: Lowering, node: ir.Node, x: Value) -> Value:
    return r.apply("div", x, plus(r, r.apply("abs", x), 1.0))


@_activation("ThresholdedRelu")
def _thresholded_relu(r: Lowering, node: ir.Node, x: Value) -> Value:
    return where(r, less(r, r.number(float_of(node, "alpha", 1.0), x), x), x, r.number(0.0, x))


@lowers("PRelu")
def _prelu(r: Lowering, node: ir.Node) -> None:
    x = operand(r, node, 0)
    r.define(node.outputs[0], where(r, negative(r, x), r.apply("mul", x, operand(r, node, 1)), x))


@lowers("Dropout")
def _dropout(r: Lowering, node: ir.Node) -> None:
    """Dropout outside of training, or with ratio 0, is the identity."""
    ratio, training = (_constant_operand(node, index) for index in (1, 2))
    if (training is None or training) and (ratio is None or ratio):
        raise CannotLower("Dropout in training mode")
    x = operand(r, node, 0)
    r.define(node.outputs[0], x)
    define_optional(r, node, 1, r.expand(Number(True, (), BOOL), x.dims))


def _constant_operand(node: ir.Node, index: int) -> Any:
    """Return the constant of an operand, None if it may change; absent ones have the defaults 0.5 and False."""
    value = node.inputs[index] if index < len(node.inputs) else None
    return constant_of(value) if value is not None else (None, 0.5, False)[index]
