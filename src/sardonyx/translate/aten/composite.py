"""Operators that torch usually decomposes before translation, but keeps in graphs of torch.export."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch

from sardonyx.errors import Unsupported
from sardonyx.translate import table
from sardonyx.translate.aten.norm import batch_norm_inference
from sardonyx.translate.builder import Builder
from sardonyx.translate.table import aten

Value = ir.Value


@aten("to.dtype")
def to_dtype(g: Builder, x: Value, dtype: torch.dtype, *ignored: Any, **also_ignored: Any) -> Value:
    return g.cast(x, dtype)


@aten("to.dtype_layout")
def to_dtype_layout(g: Builder, x: Value, *, dtype: torch.dtype | None = None, **ignored: Any) -> Value:
    return g.cast(x, dtype or g.dtype(x))


@aten("to.device")
def to_device(g: Builder, x: Value, device: torch.device, dtype: torch.dtype, *ignored: Any, **also: Any) -> Value:
    return g.cast(x, dtype)


@aten("to.other", "type_as")
def to_other(g: Builder, x: Value, other: Value, *ignored: Any, **also_ignored: Any) -> Value:
    return g.cast(x, g.dtype(other))


@aten("expand_as")
def expand_as(g: Builder, x: Value, other: Value) -> Value:
    return g.expand(x, g.dims(other))


@aten("view_as", "reshape_as")
def reshape_as(g: Builder, x: Value, other: Value) -> Value:
    return g.reshape(x, g.dims(other))


@aten("dropout", "feature_dropout")
def dropout(g: Builder, x: Value, p: float, train: bool) -> Value:
    if train and p:
        raise Unsupported("dropout in training mode")
    return x


@aten("batch_norm")
def batch_norm(
    g: Builder,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value | None,
    running_var: Value | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Value:
    if training or running_mean is None or running_var is None:
        raise Unsupported("batch norm in training mode")
    return batch_norm_inference(g, x, weight, bias, running_mean, running_var, momentum, eps)[0]


def _register_python_operator(name: str, overload: str) -> None:
    """`x & y` in Python is a separate operator in torch, with the meaning of `bitwise_and`."""

    @aten(f"__{name}__.{overload}")
    def translate(g: Builder, x: Any, y: Any) -> Any:
        bitwise: Callable[..., Any] = table.lookup(f"aten::bitwise_{name}.{overload}")
        return bitwise(g, x, y)


for _name in ("and", "or", "xor"):
    for _overload in ("Tensor", "Scalar"):
        _register_python_operator(_name, _overload)
