"""Nodes as torch.onnx's symbolic functions write them: `g.op("mydomain::norm", x, epsilon_f=1e-5)`."""

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
"""The types of attributes, by the suffixes of their names: float, int, string and tensor; a list has many of them."""


def append(g: Builder, name: str, inputs: Sequence[Any], outputs: int, attributes: Mapping[str, Any]) -> Any:
    """Append a node; `name` is an operator of ONNX, or has a domain before it, `"mydomain::norm"`."""
    domain, _, op_type = name.rpartition("::")
    domain = "" if domain == "onnx" else domain
    dtype = next((x.dtype for x in inputs if isinstance(x, ir.Value)), None)
    values = [_input(g, x, dtype) for x in inputs]
    attrs = [_attribute(key, value) for key, value in attributes.items() if value is not None]
    if domain:
        made = g.foreign(domain, op_type, values, attrs, [None] * outputs, _version(domain, op_type))
    else:
        made = g.several(op_type, outputs, values, **{a.name: a for a in attrs})
    return made[0] if outputs == 1 else made


def _version(domain: str, op_type: str) -> int:
    """The version of a domain from which on it has an operator, if onnx knows that."""
    return int(onnx.defs.get_schema(op_type, domain).since_version) if onnx.defs.has(op_type, domain) else 1


def _input(g: Builder, operand: Any, dtype: ir.DataType | None) -> ir.Value | None:
    """A tensor of torch's is a constant, and so is a number, of the first operand's type."""
    if operand is None or isinstance(operand, ir.Value):
        return operand
    number = isinstance(operand, (int, float)) and not isinstance(operand, bool) and dtype is not None
    made = torch.as_tensor(operand, dtype=dtypes.to_torch(dtype) if number and dtype is not None else None)
    return g.constant(dtypes.to_array(made), dtypes.to_onnx(made.dtype))


def _attribute(key: str, value: Any) -> ir.Attr:
    found = re.fullmatch(r"(.+)_([fist])", key)
    if found is None:
        raise ValueError(f"g.op has the attribute {key!r}: its type comes after its name, {key}_f, {key}_i, _s or _t")
    name, kind = found[1], found[2]
    value = _constant(name, value)
    if kind != "t" and isinstance(value, (torch.Tensor, np.ndarray)):
        value = value.item() if math.prod(value.shape) == 1 else value.tolist()
    if isinstance(value, (list, tuple)):
        return _SEVERAL[kind](name, [_constant(name, x) for x in value])
    return _ONE[kind](name, value)


def _real(name: str, value: Any) -> float:
    number = float(value)
    if not fits_attribute(number):
        raise Unsupported(f"its {name}, {number}, is more than an attribute of ONNX, a float32, can hold")
    return number


def _constant(name: str, value: Any) -> Any:
    """The value of a tensor that is a constant, which old symbolic functions hand on as they got it."""
    if not isinstance(value, ir.Value):
        return value
    known = value.meta.get("constant")
    if known is None and isinstance(value.const_value, ir.Tensor):
        known = value.const_value.numpy()
    if known is None:
        raise Unsupported(f"its {name} depends on the inputs, and in ONNX it is an attribute, a constant")
    return known


def _tensor(value: Any) -> ir.TensorProtocol:
    made = value if isinstance(value, torch.Tensor) else torch.as_tensor(np.asarray(value))
    return ir.tensor(dtypes.to_array(made), dtype=dtypes.to_onnx(made.dtype))
