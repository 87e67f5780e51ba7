"""Losses that torch's own decompositions compute differently from its kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx_ir as ir
import torch

from sardonyx import dtypes
from sardonyx.translate.builder import Builder
from sardonyx.translate.table import aten

Value = ir.Value
_EACH, _MEAN, _SUM = range(3)


@dataclass(frozen=True)
class _Margins:
    """For each sample, label and class: 1 − x[label] + x[class], and whether it counts."""

    labels: Value
    """The labels before the first negative one; the others are 0."""
    margin: Value
    counts: Value
    is_label: Value


def _margins(g: Builder, x: Value, target: Value) -> _Margins:
    dtype, dims = g.dtype(x), g.dims(x)
    ended = g.CumSum(g.cast(g.Less(target, g.scalar(0, torch.int64)), torch.int64), g.scalar(1, torch.int64))
    valid = g.Equal(ended, g.scalar(0, torch.int64))
    labels = g.Where(valid, target, g.scalar(0, torch.int64))
    none = g.expand(g.scalar(0, torch.int32), dims)
    marks = g.ScatterElements(none, labels, g.cast(valid, torch.int32), axis=1, reduction="max")
    is_label = g.cast(g.shaped(marks, dims), torch.bool)
    of_label = g.unsqueeze(g.shaped(g.GatherElements(x, labels, axis=1), dims), [2])
    margin = g.Add(g.Sub(g.scalar(1, dtype), of_label), g.unsqueeze(x, [1]))
    counts = g.And(g.unsqueeze(valid, [2]), g.Not(g.unsqueeze(is_label, [1])))
    return _Margins(labels, margin, counts, is_label)


@aten("multilabel_margin_loss_forward")
def multilabel_margin_loss(g: Builder, x: Value, target: Value, reduction: int) -> tuple[Value, Value]:
    dtype, shape = g.dtype(x), g.dims(x)
    rows = [1] * (2 - len(shape)) + list(shape)
    margins = _margins(g, g.reshape(x, rows), g.reshape(target, rows))
    zero = g.scalar(0, dtype)
    losses = g.Where(margins.counts, g.Max(margins.margin, zero), zero)
    total = g.Div(g.ReduceSum(losses, g.ints([1, 2]), keepdims=0), g.scalar(rows[1], dtype))
    if reduction != _EACH:
        total = g.node("ReduceMean" if reduction == _MEAN else "ReduceSum", [total], keepdims=0)
    return g.reshape(total, g.like(g.out[0])), g.reshape(g.cast(margins.is_label, dtype), shape)


@aten("multilabel_margin_loss_backward")
def multilabel_margin_loss_backward(
    g: Builder, grad: Value, x: Value, target: Value, reduction: int, is_target: Value
) -> Value:
    """Each positive margin decreases its class and increases its label."""
    dtype, shape = g.dtype(x), g.dims(x)
    rows = [1] * (2 - len(shape)) + list(shape)
    margins = _margins(g, g.reshape(x, rows), g.reshape(target, rows))
    active = g.cast(g.And(margins.counts, g.Greater(margins.margin, g.scalar(0, dtype))), dtype)
    classes, labels = (g.ReduceSum(active, g.ints([axis]), keepdims=0) for axis in (1, 2))
    pulled = g.ScatterElements(g.shaped(classes, rows), margins.labels, g.Neg(labels), axis=1, reduction="add")
    divisor = rows[1] * rows[0] if reduction == _MEAN else rows[1]
    share = g.Div(grad, g.scalar(divisor, dtype))
    share = g.unsqueeze(share, [1]) if reduction == _EACH and len(shape) == 2 else g.reshape(share, [1, 1])
    return g.reshape(g.Mul(g.shaped(pulled, rows), share), shape)


@aten("smooth_l1_loss_backward")
def smooth_l1_loss_backward(g: Builder, grad: Value, x: Value, target: Value, reduction: int, beta: float) -> Value:
    """NaN where the difference is NaN; torch's decomposition takes the sign of NaN, which is 0."""
    dtype = dtypes.accumulation_dtype(g.out.dtype)
    grad, x, target = (g.cast(value, dtype) for value in (grad, x, target))
    difference = g.Sub(x, target)
    is_linear = g.GreaterOrEqual(g.Abs(difference), g.scalar(beta, dtype))
    slope = g.Where(is_linear, g.Sign(difference), g.Div(difference, g.scalar(beta, dtype)))
    share = g.Div(grad, g.scalar(math.prod(g.dims(difference)), dtype)) if reduction == _MEAN else grad
    return g.Mul(slope, share)
