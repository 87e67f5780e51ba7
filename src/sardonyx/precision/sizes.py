"""Sizes of values, and which of them are weights."""

from __future__ import annotations

import onnx_ir as ir

from sardonyx.sizes import Dims
from sardonyx.translate.inference import set_dims
from sardonyx.translate.translator import WEIGHTS_LOCATION, external_weight


def dims(x: ir.Value) -> Dims:
    """Return the sizes of a value; none if they are unknown."""
    found: Dims | None = x.meta.get("dims", tuple(x.shape) if x.shape is not None else None)
    return () if found is None else found


def is_weight(x: ir.Value) -> bool:
    """Whether a value is an initializer with its data in a torch tensor."""
    data = x.const_value
    return x.is_initializer() and isinstance(data, ir.ExternalTensor) and data.location == WEIGHTS_LOCATION


def weight_value(name: str, dtype: ir.DataType, sizes: tuple[int, ...]) -> ir.Value:
    """Return a new weight, declared without its data."""
    value = ir.Value(name=name, type=ir.TensorType(dtype), const_value=external_weight(name, dtype, sizes))
    set_dims(value, sizes)
    return value


def float_value(name: str, sizes: Dims) -> ir.Value:
    """Return a new value of float32."""
    value = ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT))
    set_dims(value, sizes)
    return value
