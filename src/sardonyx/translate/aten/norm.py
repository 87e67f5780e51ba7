"""Normalisation."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
import torch

from sardonyx.translate import dtypes
from sardonyx.translate.builder import Builder
from sardonyx.translate.errors import Unsupported
from sardonyx.translate.sizes import Dim
from sardonyx.translate.table import aten

Value = ir.Value
_STATISTICS_USED = "its statistics are used, as in training"


@aten("native_layer_norm")
def native_layer_norm(
    g: Builder, x: Value, shape: Sequence[Dim], weight: Value | None, bias: Value | None, eps: float
) -> tuple[Value, Value, Value]:
    axis = -len(shape)
    if weight is None:
        weight = g.expand(g.scalar(1, g.dtype(x)), list(shape))
    if g.reads_output(1) or g.reads_output(2):
        return _layer_norm_with_statistics(g, x, len(shape), weight, bias, eps)
    y = g.LayerNormalization(x, weight, bias, axis=axis, epsilon=eps)
    return y, y, y


def _layer_norm_with_statistics(
    g: Builder, x: Value, count: int, weight: Value, bias: Value | None, eps: float
) -> tuple[Value, Value, Value]:
    axes = list(range(g.rank(x) - count, g.rank(x)))
    dtype = dtypes.summing(g.dtype(x))
    x, weight, bias = g.cast(x, dtype), g.cast(weight, dtype), None if bias is None else g.cast(bias, dtype)
    mean = g.ReduceMean(x, g.ints(axes), keepdims=1)
    centred = g.Sub(x, mean)
    variance = g.ReduceMean(g.Mul(centred, centred), g.ints(axes), keepdims=1)
    rstd = g.Reciprocal(g.Sqrt(g.Add(variance, g.scalar(eps, dtype))))
    y = g.Mul(g.Mul(centred, rstd), weight)
    return (y if bias is None else g.Add(y, bias)), mean, rstd


@aten("layer_norm")
def layer_norm(
    g: Builder,
    x: Value,
    shape: Sequence[Dim],
    weight: Value | None = None,
    bias: Value | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Value:
    if weight is None:
        weight = g.expand(g.scalar(1, g.dtype(x)), list(shape))
    return g.LayerNormalization(x, weight, bias, axis=-len(shape), epsilon=eps)


@aten("_fused_rms_norm")
def fused_rms_norm(
    g: Builder, x: Value, shape: Sequence[Dim], weight: Value | None, eps: float | None
) -> tuple[Value, Value]:
    if g.reads_output(1):
        raise Unsupported(_STATISTICS_USED)
    y = rms_norm(g, x, shape, weight, eps)
    return y, y


@aten("rms_norm")
def rms_norm(
    g: Builder, x: Value, shape: Sequence[Dim], weight: Value | None = None, eps: float | None = None
) -> Value:
    eps = torch.finfo(g.dtype(x)).eps if eps is None else eps
    if weight is None:
        weight = g.expand(g.scalar(1, g.dtype(x)), list(shape))
    if g.opset >= 23:
        return g.RMSNormalization(x, weight, axis=-len(shape), epsilon=eps)
    axes = g.ints(list(range(-len(shape), 0)))
    mean = g.ReduceMean(g.Mul(x, x), axes, keepdims=1)
    return g.Mul(g.Div(x, g.Sqrt(g.Add(mean, g.scalar(eps, g.dtype(x))))), weight)


@aten("_native_batch_norm_legit_no_training")
def batch_norm_inference(
    g: Builder,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value,
    running_var: Value,
    momentum: float,
    eps: float,
) -> tuple[Value, Value, Value]:
    channels = g.dims(x)[1]
    dtype = g.dtype(running_mean)
    weight = weight if weight is not None else g.expand(g.scalar(1, dtype), [channels])
    bias = bias if bias is not None else g.expand(g.scalar(0, dtype), [channels])
    y = g.BatchNormalization(x, weight, bias, running_mean, running_var, epsilon=eps, momentum=1 - momentum)
    return y, running_mean, running_var


def _per_channel(g: Builder, x: Value, values: Value) -> Value:
    """One value for each channel, so that it broadcasts over `x`."""
    return g.reshape(values, [g.dims(x)[1], *[1] * (g.rank(x) - 2)])


def _batch_norm_training(
    g: Builder, x: Value, weight: Value | None, bias: Value | None, eps: float
) -> tuple[Value, Value, Value, Value]:
    """The result, then mean, reciprocal deviation and variance of each channel."""
    dtype = dtypes.summing(g.out[1].dtype)
    wide, channels = g.cast(x, dtype), g.dims(x)[1]
    axes = g.ints([axis for axis in range(g.rank(x)) if axis != 1])
    mean = g.shaped(g.ReduceMean(wide, axes, keepdims=0), [channels])
    centred = g.Sub(wide, _per_channel(g, x, mean))
    variance = g.shaped(g.ReduceMean(g.Mul(centred, centred), axes, keepdims=0), [channels])
    rstd = g.Reciprocal(g.Sqrt(g.Add(variance, g.scalar(eps, dtype))))
    y = g.Mul(centred, _per_channel(g, x, rstd))
    if weight is not None:
        y = g.Mul(y, _per_channel(g, x, g.cast(weight, dtype)))
    if bias is not None:
        y = g.Add(y, _per_channel(g, x, g.cast(bias, dtype)))
    return y, mean, rstd, variance


def _moved(g: Builder, running: Value, current: Value, momentum: float) -> Value:
    dtype = g.dtype(running)
    kept = g.Mul(running, g.scalar(1 - momentum, dtype))
    return g.Add(kept, g.Mul(g.cast(current, dtype), g.scalar(momentum, dtype)))


def _unbiased(g: Builder, x: Value, variance: Value) -> Value:
    count: Dim = 1
    for axis, size in enumerate(g.dims(x)):
        count = count if axis == 1 else count * size
    dtype = g.dtype(variance)
    n = g.scalar(count, dtype)
    return g.Mul(variance, g.Div(n, g.Sub(n, g.scalar(1, dtype))))


@aten("native_batch_norm")
def native_batch_norm(
    g: Builder,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value | None,
    running_var: Value | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Value, Value, Value]:
    if training:
        raise Unsupported("batch norm in training mode, which changes its running statistics in place")
    if running_mean is None or running_var is None:
        raise Unsupported("batch norm without statistics")
    return batch_norm_inference(g, x, weight, bias, running_mean, running_var, momentum, eps)


@aten("_native_batch_norm_legit.no_stats")
def batch_norm_without_statistics(
    g: Builder, x: Value, weight: Value | None, bias: Value | None, training: bool, momentum: float, eps: float
) -> tuple[Value, Value, Value]:
    return _batch_norm_training(g, x, weight, bias, eps)[:3]


@aten("_native_batch_norm_legit_functional")
def batch_norm_functional(
    g: Builder,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value,
    running_var: Value,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Value, ...]:
    if not training:
        same = batch_norm_inference(g, x, weight, bias, running_mean, running_var, momentum, eps)
        return (*same, running_mean, running_var)
    y, mean, rstd, variance = _batch_norm_training(g, x, weight, bias, eps)
    new_mean = _moved(g, running_mean, mean, momentum)
    new_var = _moved(g, running_var, _unbiased(g, x, variance), momentum)
    return y, mean, rstd, new_mean, new_var


@aten("_batch_norm_with_update_functional")
def batch_norm_with_update(
    g: Builder,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value,
    running_var: Value,
    momentum: float,
    eps: float,
) -> tuple[Value, ...]:
    y, mean, rstd, *moved = batch_norm_functional(g, x, weight, bias, running_mean, running_var, True, momentum, eps)
    return y, mean, rstd, mean, *moved  # the fourth is empty on a CPU


@aten("native_group_norm")
def native_group_norm(
    g: Builder,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    n: Dim,
    channels: Dim,
    inner: Dim,
    groups: int,
    eps: float,
) -> tuple[Value, Value, Value]:
    dtype = g.dtype(x)
    grouped = g.reshape(x, [n, groups, (channels // groups) * inner])
    mean = rstd = x
    if g.reads_output(1) or g.reads_output(2):
        one = g.constant_vector(1, 1, dtype)
        y, mean, rstd = (g.cast(v, dtype) for v in _layer_norm_with_statistics(g, grouped, 1, one, None, eps))
        mean, rstd = (g.reshape(g.shaped(v, [n, groups, 1]), [n, groups]) for v in (mean, rstd))
    else:
        ones, zeros = (g.constant_vector(value, groups, dtype) for value in (1, 0))
        y = g.InstanceNormalization(grouped, ones, zeros, epsilon=eps)
    y = g.reshape(y, g.dims(x))
    tail = [channels] + [1] * (g.rank(x) - 2)
    if weight is not None:
        y = g.Mul(y, g.reshape(weight, tail))
    if bias is not None:
        y = g.Add(y, g.reshape(bias, tail))
    return y, mean, rstd
