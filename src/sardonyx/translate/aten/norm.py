"""Normalisation."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
import torch

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
    mean = g.ReduceMean(x, g.ints(axes), keepdims=1)
    centred = g.Sub(x, mean)
    variance = g.ReduceMean(g.Mul(centred, centred), g.ints(axes), keepdims=1)
    rstd = g.Reciprocal(g.Sqrt(g.Add(variance, g.scalar(eps, g.dtype(x)))))
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


@aten("_native_batch_norm_legit_no_training", "cudnn_batch_norm_inference")
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


@aten("native_batch_norm", "_native_batch_norm_legit")
def native_batch_norm(
    g: Builder,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value,
    running_var: Value,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Value, Value, Value]:
    if training:
        raise Unsupported("batch norm in training mode")
    return batch_norm_inference(g, x, weight, bias, running_mean, running_var, momentum, eps)


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
    if g.reads_output(1) or g.reads_output(2):
        raise Unsupported(_STATISTICS_USED)
    dtype = g.dtype(x)
    if g.dims(x)[0] == 0:
        return x, x, x
    ones = g.constant_vector(1, groups, dtype)
    zeros = g.constant_vector(0, groups, dtype)
    grouped = g.reshape(x, [n, groups, (channels // groups) * inner])
    y = g.reshape(g.InstanceNormalization(grouped, ones, zeros, epsilon=eps), g.dims(x))
    tail = [channels] + [1] * (g.rank(x) - 2)
    if weight is not None:
        y = g.Mul(y, g.reshape(weight, tail))
    if bias is not None:
        y = g.Add(y, g.reshape(bias, tail))
    return y, y, y
