"""Nodes in the style of torch.onnx's symbolic functions: `g.op("mydomain::norm", x, epsilon_f=1e-5)`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir
import torch

from sardonyx import dtypes
from sardonyx.dtypes import fits_attribute
from sardonyx.errors import Unsupported

if TYPE_CHECKING:
    from sardonyx.translate.builder import Builder


_ONE: Mapping[str, Callable[[str, Any], ir.Attr]] = {
    "f": lambda name, value: ir.AttrFloat32(name, _real(name, value)),
    "i": lambda name, value: ir.AttrInt64(name, int(value)),
    "s": lambda name, value: ir.AttrString(name, str(value)),
    "t": lambda name, value: ir.AttrTensor(name, _tensor(value)),
}
_SEVERAL: Mapping[str, Callable[[str, Sequence[Any]], ir.Attr]] = {
    "f": lambda name, values: ir.AttrFloat32s(name, [_real(name, x) for x in values]),
    "i": lambda name, values: ir.AttrInt64s(name, [int(x) for x in values]),
    "s": lambda name, values: ir.AttrStrings(name, [str(x) for x in values]),
    "t": lambda name, values: ir.AttrTensors(name, [_tensor(x) for x in values]),
}
"""Attribute types by name suffix: float, int, string and tensor; a list has several of one type."""


def append(g: Builder, name: str, inputs: Sequence[Any], outputs: int, attributes: Mapping[str, Any]) -> Any:
    """Append a node; `name` is an ONNX operator, or qualified by a domain, as `"mydomain::norm"`."""
    domain, _, op_type = name.rpartition("::")
    domain = "" if domain == "onnx" else domain
    dtype = next((x.dtype for x in inputs if isinstance(x, ir.Value)), None)
    values = [_input(g, x, dtype) for x in inputs]
    attrs = [_attribute(key, value) for key, value in attributes.items() if value is not None]
    if domain:
        results = g.custom_node(domain, op_type, values, attrs, [None] * outputs, _version(domain, op_type))
    else:
        results = g.several(op_type, outputs, values, **{a.name: a for a in attrs})
    return results[0] if outputs == 1 else results


def _version(domain: str, op_type: str) -> int:
    """Return the version of a domain that introduced an operator, if onnx knows it."""
    return int(onnx.defs.get_schema(op_type, domain).since_version) if onnx.defs.has(op_type, domain) else 1


def _input(g: Builder, operand: Any, dtype: ir.DataType | None) -> ir.Value | None:
    """Convert an operand: torch tensors become constants, and so do numbers, with the dtype of the first operand."""
    if operand is None or isinstance(operand, ir.Value):
        return operand
    number = isinstance(operand, (int, float)) and not isinstance(operand, bool) and dtype is not None
    tensor = torch.as_tensor(operand, dtype=dtypes.to_torch(dtype) if number and dtype is not None else None)
    return g.constant(dtypes.to_array(tensor), dtypes.to_onnx(tensor.dtype))


def _attribute(key: str, value: Any) -> ir.Attr:
    match = re.fullmatch(r"(.+)_([fist])", key)
    if match is None:
        raise ValueError(f"the attribute {key!r} of g.op has no type suffix: use {key}_f, {key}_i, _s or _t")
    name, kind = match[1], match[2]
    value = _constant(name, value)
    if kind != "t" and isinstance(value, (torch.Tensor, np.ndarray)):
        value = value.item() if math.prod(value.shape) == 1 else value.tolist()
    if isinstance(value, (list, tuple)):
        return _SEVERAL[kind](name, [_constant(name, x) for x in value])
    return _ONE[kind](name, value)


def _real(name: str, value: Any) -> float:
    number = float(value)
    if not fits_attribute(number):
        raise Unsupported(f"its {name}, {number}, overflows an ONNX attribute, which is a float32")
    return number


def _constant(name: str, value: Any) -> Any:
    """Return the value of a constant tensor, which old symbolic functions pass as an attribute."""
    if not isinstance(value, ir.Value):
        return value
    known = value.meta.get("constant")
    if known is None and isinstance(value.const_value, ir.Tensor):
        known = value.const_value.numpy()
    if known is None:
        raise Unsupported(f"its {name} depends on the inputs, but is a constant attribute in ONNX")
    return known


def _tensor(value: Any) -> ir.TensorProtocol:
    tensor = value if isinstance(value, torch.Tensor) else torch.as_tensor(np.asarray(value))
    return ir.tensor(dtypes.to_array(tensor), dtype=dtypes.to_onnx(tensor.dtype))
