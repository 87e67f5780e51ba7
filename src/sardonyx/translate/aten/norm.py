"""Normalisation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir
import torch

from sardonyx import dtypes, opsets
from sardonyx.errors import Unsupported
from sardonyx.sizes import Dim
from sardonyx.translate.aten.indexing import element_count
from sardonyx.translate.builder import Builder
from sardonyx.translate.table import aten

Value = ir.Value
_STATISTICS_USED = "its statistics are used, as in training"


@aten("native_layer_norm")
def native_layer_norm(
    g: Builder, x: Value, shape: Sequence[Dim], weight: Value | None, bias: Value | None, eps: float
) -> tuple[Value, Value, Value]:
    axis = -len(shape)
    if 0 in shape:  # engines refuse it; torch returns a mean of zero and a deviation of NaN
        statistics_dims = [*g.dims(x)[:axis], *[1] * len(shape)]
        mean, rstd = (g.expand(g.scalar(number, g.dtype(x)), statistics_dims) for number in (0, math.nan))
        return x, mean, rstd
    if weight is None:
        weight = g.expand(g.scalar(1, g.dtype(x)), list(shape))
    if not (g.reads_output(1) or g.reads_output(2)):
        y = g.LayerNormalization(x, weight, bias, axis=axis, epsilon=eps)
        return y, y, y
    if g.dtype(x) == torch.float32:  # for other dtypes ONNX's statistics are single precision, torch's are not
        y, mean, rstd = g.several("LayerNormalization", 3, [x, weight, bias], axis=axis, epsilon=eps)
        return y, mean, rstd
    return _layer_norm_with_statistics(g, x, len(shape), weight, bias, eps)


def _layer_norm_with_statistics(
    g: Builder, x: Value, count: int, weight: Value, bias: Value | None, eps: float
) -> tuple[Value, Value, Value]:
    axes = list(range(g.rank(x) - count, g.rank(x)))
    dtype = dtypes.accumulation_dtype(g.dtype(x))
    x, weight, bias = g.cast(x, dtype), g.cast(weight, dtype), None if bias is None else g.cast(bias, dtype)
    mean = g.ReduceMean(x, g.ints(axes), keepdims=1)
    centred = g.Sub(x, mean)
    variance = g.ReduceMean(g.Mul(centred, centred), g.ints(axes), keepdims=1)
    rstd = g.Reciprocal(g.Sqrt(g.Add(variance, g.scalar(eps, dtype))))
    y = g.Mul(g.Mul(centred, rstd), weight)
    return (y if bias is None else g.Add(y, bias)), mean, rstd


@aten("native_layer_norm_backward")
def native_layer_norm_backward(
    g: Builder,
    grad: Value,
    x: Value,
    shape: Sequence[Dim],
    mean: Value,
    rstd: Value,
    weight: Value | None,
    bias: Value | None,
    output_mask: Sequence[bool],
) -> tuple[Value | None, Value | None, Value | None]:
    """With n = (x − mean)·rstd and w·grad = h: rstd · (h − mean(h) − n·mean(h·n)), and sums of grad·n and grad."""
    dtype, rank = dtypes.accumulation_dtype(g.dtype(x)), g.rank(x)
    outer, inner = (g.ints(list(axes)) for axes in (range(rank - len(shape)), range(rank - len(shape), rank)))
    wide, mean, rstd = (g.cast(v, dtype) for v in (x, mean, rstd))
    grad = g.cast(grad, dtype)
    normal = g.Mul(g.Sub(wide, mean), rstd)
    along = g.Mul(grad, normal)
    of_x = None
    if output_mask[0]:
        weighted, weighted_along = grad, along
        if weight is not None:
            weighted, weighted_along = (g.Mul(v, g.cast(weight, dtype)) for v in (grad, along))
        level = g.ReduceMean(weighted, inner, keepdims=1)
        slope = g.ReduceMean(weighted_along, inner, keepdims=1)
        of_x = g.Mul(g.Sub(g.Sub(weighted, level), g.Mul(normal, slope)), rstd)

    def summed(v: Value) -> Value:
        return g.shaped(g.ReduceSum(v, outer, keepdims=0), shape) if rank > len(shape) else v

    return of_x, summed(along) if output_mask[1] else None, summed(grad) if output_mask[2] else None


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
    dtype = dtypes.accumulation_dtype(g.dtype(x))
    eps = torch.finfo(dtype).eps if eps is None else eps
    if weight is None:
        weight = g.expand(g.scalar(1, g.dtype(x)), list(shape))
    if g.opset >= opsets.ATTENTION:
        return g.RMSNormalization(x, g.cast(weight, g.dtype(x)), axis=-len(shape), epsilon=eps)
    wide = g.cast(x, dtype)
    mean = g.ReduceMean(g.Mul(wide, wide), g.ints(list(range(-len(shape), 0))), keepdims=1)
    normalized = g.Div(wide, g.Sqrt(g.Add(mean, g.scalar(eps, dtype))))
    return g.cast(g.Mul(normalized, g.cast(weight, dtype)), g.dtype(x))


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
    if not isinstance(g.out, (tuple, list)) or g.out[1].device.type != "cuda":
        return y, running_mean, running_var  # not used: without statistics among the results, or empty ones
    mean, rstd = g.out[1:3]
    wide = g.cast(running_var, rstd.dtype)
    deviation = g.Sqrt(g.Add(wide, g.scalar(eps, rstd.dtype)))
    return y, g.cast(running_mean, mean.dtype), g.Reciprocal(deviation)


def _per_channel(g: Builder, x: Value, values: Value) -> Value:
    """Reshape one value per channel so that it broadcasts over `x`."""
    return g.reshape(values, [g.dims(x)[1], *[1] * (g.rank(x) - 2)])


def _batch_norm_training(
    g: Builder, x: Value, weight: Value | None, bias: Value | None, eps: float
) -> tuple[Value, Value, Value, Value]:
    """Return the result, then mean, reciprocal deviation and variance of each channel."""
    dtype = dtypes.accumulation_dtype(g.out[1].dtype)
    wide, channels = g.cast(x, dtype), g.dims(x)[1]
    axes = g.ints([axis for axis in range(g.rank(x)) if axis != 1])
    mean = g.shaped(g.ReduceMean(wide, axes, keepdims=0), [channels])
    centred = g.Sub(wide, _per_channel(g, x, mean))
    variance = g.shaped(g.ReduceMean(g.Mul(centred, centred), axes, keepdims=0), [channels])
    rstd = g.Reciprocal(g.Sqrt(g.Add(variance, g.scalar(eps, dtype))))
    scale = rstd if weight is None else g.Mul(rstd, g.cast(weight, dtype))
    y = g.Mul(centred, _per_channel(g, x, scale))
    if bias is not None:
        y = g.Add(y, _per_channel(g, x, g.cast(bias, dtype)))
    return y, mean, rstd, variance


@aten("native_batch_norm_backward")
def native_batch_norm_backward(
    g: Builder,
    grad: Value,
    x: Value,
    weight: Value | None,
    running_mean: Value | None,
    running_var: Value | None,
    mean: Value | None,
    rstd: Value | None,
    training: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> tuple[Value | None, Value | None, Value | None]:
    """With s = w·rstd: s·grad − (x − mean)·(s·rstd²·mean(grad·(x − mean))) − s·mean(grad); in evaluation s·grad."""
    dtype = dtypes.accumulation_dtype(g.dtype(x))
    grad, wide = g.cast(grad, dtype), g.cast(x, dtype)
    if not training:
        if running_mean is None or running_var is None:
            raise Unsupported("batch norm without statistics")
        mean = running_mean
        variance = g.cast(running_var, dtype)
        rstd = g.Reciprocal(g.Sqrt(g.Add(variance, g.scalar(eps, dtype))))
    assert mean is not None
    assert rstd is not None
    mean, rstd = g.cast(mean, dtype), g.cast(rstd, dtype)
    axes = g.ints([axis for axis in range(g.rank(x)) if axis != 1])

    def summed(v: Value) -> Value:
        return g.shaped(g.ReduceSum(v, axes, keepdims=0), [g.dims(x)[1]])

    centred = g.Sub(wide, _per_channel(g, x, mean))
    along, total = summed(g.Mul(grad, centred)), summed(grad)
    scale = rstd if weight is None else g.Mul(rstd, g.cast(weight, dtype))
    of_x = None
    if output_mask[0]:
        of_x = g.Mul(grad, _per_channel(g, x, scale))
    if output_mask[0] and training:
        share = g.Div(scale, g.scalar(_count(g, x), dtype))
        slope = g.Mul(g.Mul(share, g.Mul(rstd, rstd)), along)
        of_x = g.Sub(of_x, g.Mul(centred, _per_channel(g, x, slope)))
        of_x = g.Sub(of_x, _per_channel(g, x, g.Mul(share, total)))
    return of_x, g.Mul(along, rstd) if output_mask[1] else None, total if output_mask[2] else None


def _updated_statistics(g: Builder, running: Value, current: Value, momentum: float) -> Value:
    dtype = g.dtype(running)
    previous = g.Mul(running, g.scalar(1 - momentum, dtype))
    return g.Add(previous, g.Mul(g.cast(current, dtype), g.scalar(momentum, dtype)))


def _count(g: Builder, x: Value) -> Dim:
    n, _, *sizes = g.dims(x)
    return element_count([n, *sizes])


def _unbiased_variance(g: Builder, x: Value, variance: Value) -> Value:
    dtype = g.dtype(variance)
    n = g.scalar(_count(g, x), dtype)
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
    if training and running_mean is None and running_var is None:  # instance norm in graphs of torch.export
        return batch_norm_without_statistics(g, x, weight, bias, training, momentum, eps)
    if training:
        raise Unsupported("batch norm in training mode, which updates its running statistics in place")
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
    new_mean = _updated_statistics(g, running_mean, mean, momentum)
    new_var = _updated_statistics(g, running_var, _unbiased_variance(g, x, variance), momentum)
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


@aten("_weight_norm_interface_backward")
def weight_norm_backward(
    g: Builder, grad: Value, direction: Value, length: Value, norms: Value, dim: int
) -> tuple[Value, Value]:
    """For w = l·v/‖v‖: the part of the gradient along v is that of the norm l, the rest that of v."""
    axes = g.ints([axis for axis in range(g.rank(direction)) if axis != g.axis(direction, dim)])
    along = g.ReduceSum(g.Mul(grad, direction), axes, keepdims=1)
    shared = g.Div(along, norms)
    across = g.Sub(grad, g.Mul(g.Div(direction, norms), shared))
    return g.Mul(g.Div(length, norms), across), shared
