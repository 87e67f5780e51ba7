"""One call as one node: what it is given and what it wants, and the ONNX model of it alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import onnx
import torch

from sardonyx import dtypes
from sardonyx.dtypes import fits_attribute
from sardonyx.errors import EngineError, Unsupported
from sardonyx.onnx_ops.schemas import MICROSOFT, NAMESPACE, OUTPUTS, Operator, opset
from sardonyx.opsets import IR_VERSION

Dim: TypeAlias = "int | str | None"
_FEW = 8
"""As many dimensions as tensors have."""


@dataclass(frozen=True)
class Described:
    """A tensor as a model describes an input: sizes are numbers, names, or not said."""

    dtype: int
    dims: tuple[Dim, ...]


@dataclass(frozen=True)
class Call:
    """What a model is made for: it says of tensors what they are like, and of the rest what it is."""

    operator: Operator
    inputs: tuple[Described | None, ...]
    attributes: tuple[tuple[str, Any], ...]
    outputs: tuple[int, ...]
    """Which outputs are wanted, by their indices."""


def refused(operator: Operator, why: str) -> EngineError:
    """The error of a call that cannot be."""
    return EngineError(f"{NAMESPACE}::{operator.name}: {why}", hint=f"it is called as {operator.schema()}")


# Arguments


def bound(operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by their names; those that the call leaves out are not there."""
    return dict(zip((t.name for t in operator.inputs), args, strict=False)) | dict(kwargs)


def inputs_of(operator: Operator, given: Mapping[str, Any]) -> list[Any]:
    """What is given for a node's inputs, in their order, None for those that are absent between others."""
    found: list[Any] = []
    for tensor in operator.inputs:
        found += given[tensor.name] if tensor.kind == "variadic" else [given.get(tensor.name)]
    while found and found[-1] is None:
        found.pop()
    return found


def attributes_of(operator: Operator, given: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes that a node has: what is not said, or is the default, needs none."""
    found = {}
    for attribute in operator.attributes:
        value = given.get(attribute.name)
        if value is None or value == attribute.default:
            continue
        several = isinstance(value, (list, tuple))
        numbers = value if several else [value]
        if attribute.type.startswith("float") and not all(map(fits_attribute, numbers)):
            raise refused(operator, f"{attribute.name} is {value}, more than an attribute, a float32, can hold")
        found[attribute.name] = tuple(value) if several else value
    return found


def outputs_of(operator: Operator, given: Mapping[str, Any]) -> tuple[int, ...]:
    """The outputs that a call wants."""
    wanted = given.get(OUTPUTS, operator.usual)
    chosen = tuple(range(wanted)) if isinstance(wanted, int) else tuple(wanted)
    most = len(operator.outputs) if operator.outputs[-1].kind != "variadic" else math.inf
    if not chosen or len(set(chosen)) != len(chosen) or not all(0 <= i < most for i in chosen):
        names = ", ".join(f"{i}: {t.name}" for i, t in enumerate(operator.outputs))
        raise refused(operator, f"its outputs are wanted as {wanted}, and are {names}")
    return chosen


def computed(operator: Operator, wanted: Sequence[int]) -> list[bool]:
    """Which of its outputs a node has for some to be wanted: those, and such as every node has."""
    required = [i for i, t in enumerate(operator.outputs) if t.kind == "required"]
    return [i in wanted or i in required for i in range(max(*wanted, *required, 0) + 1)]


def described(operator: Operator, given: Mapping[str, Any], dims: Callable[[torch.Tensor], tuple[Dim, ...]]) -> Call:
    """A call of tensors whose sizes are told so."""
    inputs = [x if x is None else Described(_onnx_type(operator, x), dims(x)) for x in inputs_of(operator, given)]
    if not any(inputs):
        raise refused(operator, "it is given no tensor")
    attributes = tuple(attributes_of(operator, given).items())
    return Call(operator, tuple(inputs), attributes, outputs_of(operator, given))


def may_be_sizes(tensor: torch.Tensor) -> bool:
    """Whether it is a few integers in a row, sizes or axes: inference asks how many they are."""
    if tensor.dim() != 1 or tensor.dtype != torch.int64:
        return False
    count = tensor.shape[0]
    if isinstance(count, torch.SymInt) and not count.node.has_hint():
        return False
    return bool(count <= _FEW)


def _onnx_type(operator: Operator, tensor: torch.Tensor) -> int:
    if tensor.dtype.is_complex:
        raise refused(operator, f"ONNX has no tensors of dtype {tensor.dtype}")
    try:
        return int(dtypes.to_onnx(tensor.dtype))
    except Unsupported as error:
        raise refused(operator, str(error)) from error


# The model


def input_names(call: Call) -> tuple[str, ...]:
    """The names of the inputs that are there."""
    return tuple(f"x{i}" for i, x in enumerate(call.inputs) if x is not None)


def output_names(call: Call) -> tuple[str, ...]:
    """The names of the outputs that are wanted."""
    return tuple(f"y{i}" for i in call.outputs)


def node_of(call: Call) -> onnx.NodeProto:
    """The node."""
    inputs = [f"x{i}" if x is not None else "" for i, x in enumerate(call.inputs)]
    operator = call.operator
    outputs = [f"y{i}" if has else "" for i, has in enumerate(computed(operator, call.outputs))]
    node = onnx.helper.make_node(operator.op_type, inputs, outputs, name=operator.op_type, domain=operator.domain)
    node.attribute.extend(protos(operator, call.attributes))
    return node


def protos(operator: Operator, attributes: Iterable[tuple[str, Any]]) -> list[onnx.AttributeProto]:
    """Attributes as ONNX writes them, in the types that the schema says."""
    types = {a.name: _TYPES[a.type] for a in operator.attributes}
    return [onnx.helper.make_attribute(name, value, attr_type=types[name]) for name, value in attributes]


_TYPES = {
    "int": onnx.AttributeProto.INT,
    "float": onnx.AttributeProto.FLOAT,
    "str": onnx.AttributeProto.STRING,
    "int[]": onnx.AttributeProto.INTS,
    "float[]": onnx.AttributeProto.FLOATS,
    "str[]": onnx.AttributeProto.STRINGS,
}


def model_of(call: Call, more: Sequence[onnx.NodeProto] = ()) -> bytes:
    """The model: the node, and nodes that look at its outputs."""
    inputs = [
        onnx.helper.make_tensor_value_info(f"x{i}", x.dtype, list(x.dims))
        for i, x in enumerate(call.inputs)
        if x is not None
    ]
    names = [*output_names(call), *(name for node in more for name in node.output)]
    graph = onnx.helper.make_graph(
        [node_of(call), *more], call.operator.name, inputs, [onnx.ValueInfoProto(name=name) for name in names]
    )
    opsets = [onnx.helper.make_opsetid("", opset()), onnx.helper.make_opsetid(MICROSOFT, 1)]
    made = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)
    return bytes(made.SerializeToString())
