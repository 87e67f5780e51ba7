"""Activations and softmax."""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir
import torch

from sardonyx import dtypes, opsets
from sardonyx.sizes import may_be_zero
from sardonyx.translate.builder import Builder, Operand
from sardonyx.translate.table import aten

Value = ir.Value


@aten("relu")
def relu(g: Builder, x: Value) -> Value:
    return g.Relu(x) if g.out.dtype.is_floating_point else g.Max(x, g.scalar(0, g.out.dtype))


@aten("gelu")
def gelu(g: Builder, x: Value, *, approximate: str = "none") -> Value:
    if g.opset >= opsets.GELU and (approximate == "none" or g.dtype(x) != torch.float64):
        return g.Gelu(x, approximate=approximate)
    dtype = dtypes.accumulation_dtype(g.dtype(x))
    x = g.cast(x, dtype)
    half, one = g.scalar(0.5, dtype), g.scalar(1.0, dtype)
    if approximate == "none":
        inner = g.Erf(g.Mul(x, g.scalar(math.sqrt(0.5), dtype)))
    else:
        cube = g.Mul(g.Mul(g.Mul(x, x), x), g.scalar(0.044715, dtype))
        inner = g.Tanh(g.Mul(g.Add(x, cube), g.scalar(math.sqrt(2 / math.pi), dtype)))
    return g.Mul(g.Mul(x, half), g.Add(inner, one))


@aten("silu")
def silu(g: Builder, x: Value) -> Value:
    return g.Mul(x, sigmoid(g, x))


@aten("mish")
def mish(g: Builder, x: Value) -> Value:
    return g.Mul(x, g.Tanh(softplus(g, x)))


@aten("softplus")
def softplus(g: Builder, x: Value, beta: float = 1, threshold: float = 20) -> Value:
    dtype = g.out.dtype
    scaled = x if beta == 1 else g.Mul(x, g.scalar(beta, dtype))
    # log(1 + exp(x)) as max(x, 0) + log1p(exp(-|x|)), which neither overflows nor cancels
    tail = log_one_plus(g, g.Exp(g.Neg(g.Abs(scaled))))
    soft = g.Add(g.Max(scaled, g.scalar(0, dtype)), tail)
    soft = soft if beta == 1 else g.Div(soft, g.scalar(beta, dtype))
    return g.Where(g.Greater(scaled, g.scalar(threshold, dtype)), x, soft)


@aten("log1p")
def log1p(g: Builder, x: Value) -> Value:
    return log_one_plus(g, g.cast(x, g.out.dtype))


def log_one_plus(g: Builder, x: Value) -> Value:
    """log(u) · x / (u - 1) with u = 1 + x, which is accurate to rounding where log(1 + x) loses all digits."""
    one = g.scalar(1, g.dtype(x))
    u = g.Add(one, x)
    exact = g.Mul(g.Log(u), g.Div(x, g.Sub(u, one)))
    return g.Where(g.Or(g.Equal(u, one), g.IsInf(u, detect_negative=0)), x, exact)


@aten("sigmoid")
def sigmoid(g: Builder, x: Value) -> Value:
    """In double precision composed: ONNX Runtime's Sigmoid is an approximation there, with three digits at -30."""
    x = g.cast(x, g.out.dtype)
    if g.out.dtype != torch.float64:
        return g.Sigmoid(x)
    one = g.scalar(1, torch.float64)
    return g.Div(one, g.Add(one, g.Exp(g.Neg(x))))


@aten("expm1")
def expm1(g: Builder, x: Value) -> Value:
    x = g.cast(x, g.out.dtype)
    if g.out.dtype == torch.float64:
        return _exp_minus_one(g, x)
    # expm1(x) = 2 · sinh(x/2) · exp(x/2), without the cancellation of exp(x) - 1.
    half = g.Mul(x, g.scalar(0.5, g.out.dtype))
    product = g.Mul(g.Mul(g.Sinh(half), g.scalar(2, g.out.dtype)), g.Exp(half))
    big = g.Greater(g.Abs(x), g.scalar(1, g.out.dtype))
    return g.Where(big, g.Sub(g.Exp(x), g.scalar(1, g.out.dtype)), product)


def _exp_minus_one(g: Builder, x: Value) -> Value:
    """(u - 1) · x / log(u) with u = exp(x), since there is no Sinh in double precision; u - 1 where that is exact."""
    one = g.scalar(1, torch.float64)
    u = g.Exp(x)
    less = g.Sub(u, one)
    plain = g.Greater(g.Abs(x), g.scalar(1, torch.float64))
    return g.Where(plain, less, g.Where(g.Equal(u, one), x, g.Div(g.Mul(less, x), g.Log(u))))


@aten("leaky_relu")
def leaky_relu(g: Builder, x: Value, negative_slope: float = 0.01) -> Value:
    if g.dtype(x) == torch.float64:
        zero, slope = (g.scalar(number, torch.float64) for number in (0, negative_slope))
        return g.Where(g.Greater(x, zero), x, g.Mul(x, slope))
    return g.LeakyRelu(x, alpha=float(negative_slope))


@aten("elu")
def elu(g: Builder, x: Value, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Value:
    dtype = g.out.dtype
    scaled = x if input_scale == 1 else g.Mul(x, g.scalar(input_scale, dtype))
    negative = g.Mul(expm1(g, scaled), g.scalar(alpha * scale, dtype))
    positive = x if scale == 1 else g.Mul(x, g.scalar(scale, dtype))
    return g.Where(g.Greater(x, g.scalar(0, dtype)), positive, negative)


@aten("hardtanh")
def hardtanh(g: Builder, x: Value, min_val: Operand = -1, max_val: Operand = 1) -> Value:
    return g.Min(g.Max(x, g.scalar(min_val, g.out.dtype)), g.scalar(max_val, g.out.dtype))


@aten("relu6")
def relu6(g: Builder, x: Value) -> Value:
    return hardtanh(g, x, 0, 6)


@aten("hardsigmoid")
def hardsigmoid(g: Builder, x: Value) -> Value:
    if g.dtype(x) == torch.float64:  # ONNX's attributes are single precision
        return g.Div(_clamped_ramp(g, x), g.scalar(6, torch.float64))
    return g.HardSigmoid(x, alpha=1 / 6, beta=0.5)


@aten("hardswish")
def hardswish(g: Builder, x: Value) -> Value:
    if g.dtype(x) == torch.float64:
        return g.Div(g.Mul(x, _clamped_ramp(g, x)), g.scalar(6, torch.float64))
    return g.HardSwish(x)


def _clamped_ramp(g: Builder, x: Value) -> Value:
    return relu6(g, g.Add(x, g.scalar(3, g.dtype(x))))


@aten("threshold")
def threshold(g: Builder, x: Value, threshold: Operand, value: Operand) -> Value:
    dtype = g.out.dtype
    return g.Where(g.LessOrEqual(x, g.scalar(threshold, dtype)), g.scalar(value, dtype), x)


@aten("prelu", "_prelu_kernel")
def prelu(g: Builder, x: Value, weight: Value) -> Value:
    if g.rank(weight) == 1 and g.rank(x) > 2:
        weight = g.reshape(weight, [*g.dims(weight), *[1] * (g.rank(x) - 2)])
    return g.Where(g.Greater(x, g.scalar(0, g.out.dtype)), x, g.Mul(x, weight))


@aten("log_sigmoid_forward")
def log_sigmoid_forward(g: Builder, x: Value) -> tuple[Value, Value]:
    zero = g.scalar(0, g.dtype(x))
    tail = g.Exp(g.Neg(g.Abs(x)))
    g_out = g.out
    g.out = g_out[0]
    result = g.Sub(g.Min(x, zero), log1p(g, tail))
    g.out = g_out
    return result, tail  # the second is empty on CPU in torch; only the backward reads it


@aten("glu")
def glu(g: Builder, x: Value, dim: int = -1) -> Value:
    left, right = (g.shaped(part, g.like(g.out)) for part in _halves(g, x, g.axis(x, dim)))
    return g.Mul(left, sigmoid(g, right))


def _halves(g: Builder, x: Value, axis: int) -> Sequence[Value]:
    """Split in two; ONNX Runtime splits an axis of size zero by the sizes of its parts, but not by their number."""
    size = g.like(g.out)[axis]
    if may_be_zero(size):
        return g.several("Split", 2, [x, g.shape_value([size, size])], axis=axis)
    return g.several("Split", 2, [x], axis=axis, num_outputs=2)


def _softmax(g: Builder, op_type: str, x: Value, dim: int, dtype: torch.dtype) -> Value:
    x = g.cast(x, dtype)
    if not g.rank(x):
        return g.squeeze(_softmax(g, op_type, g.unsqueeze(x, [0]), 0, dtype), [0])
    axis = g.axis(x, dim)
    if op_type == "LogSoftmax" and dtype == torch.float64 and g.dims(x)[axis] != 0:
        return _log_softmax_double(g, x, axis)
    return g.node(op_type, [x], axis=axis)


def _log_softmax_double(g: Builder, x: Value, axis: int) -> Value:
    """Decomposed: ONNX Runtime's kernel returns numbers for rows with NaN and infinities."""
    axes = g.ints([axis])
    shifted = g.Sub(x, g.ReduceMax(x, axes, keepdims=1))
    return g.Sub(shifted, g.Log(g.ReduceSum(g.Exp(shifted), axes, keepdims=1)))


@aten("_softmax")
def softmax(g: Builder, x: Value, dim: int, half_to_float: bool = False) -> Value:
    return _softmax(g, "Softmax", x, dim, g.out.dtype)


@aten("_log_softmax")
def log_softmax(g: Builder, x: Value, dim: int, half_to_float: bool = False) -> Value:
    return _softmax(g, "LogSoftmax", x, dim, g.out.dtype)


@aten("softmax.int")
def softmax_int(g: Builder, x: Value, dim: int, dtype: torch.dtype | None = None) -> Value:
    return _softmax(g, "Softmax", x, dim, g.out.dtype)


@aten("log_softmax.int")
def log_softmax_int(g: Builder, x: Value, dim: int, dtype: torch.dtype | None = None) -> Value:
    return _softmax(g, "LogSoftmax", x, dim, g.out.dtype)


@aten("_safe_softmax")
def safe_softmax(g: Builder, x: Value, dim: int, dtype: torch.dtype | None = None) -> Value:
    return softmax_or_zero(g, g.cast(x, g.out.dtype), dim)


def softmax_or_zero(g: Builder, x: Value, dim: int = -1) -> Value:
    """Softmax, and zero for rows that are −∞ throughout, which attend to nothing."""
    dtype = g.dtype(x)
    lowest, axes = g.scalar(-math.inf, dtype), g.ints([g.axis(x, dim)] if g.rank(x) else [])
    largest, total = (g.ReduceMax(x, axes, keepdims=1), g.ReduceSum(x, axes, keepdims=1)) if g.rank(x) else (x, x)
    empty = g.And(g.Equal(largest, lowest), g.Equal(total, lowest))  # the maximum alone ignores NaN
    return g.Where(empty, g.scalar(0, dtype), _softmax(g, "Softmax", x, dim, dtype))
