"""One call as one node: its spec, and the ONNX model of that node alone."""

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
_MAX_RANK = 8
"""The largest rank of a tensor, and so the longest list of sizes or axes."""


@dataclass(frozen=True)
class TensorSpec:
    """Dtype and dims of an input; a dim is a number, a name, or unknown."""

    dtype: int
    dims: tuple[Dim, ...]


@dataclass(frozen=True)
class NodeSpec:
    """What a model is built for: the specs of its tensors, and its attributes."""

    operator: Operator
    inputs: tuple[TensorSpec | None, ...]
    attributes: tuple[tuple[str, Any], ...]
    outputs: tuple[int, ...]
    """Indices of the requested outputs."""


def call_error(operator: Operator, reason: str) -> EngineError:
    """Return the error for an invalid call of an operator."""
    return EngineError(f"{NAMESPACE}::{operator.name}: {reason}", hint=f"the signature is {operator.schema()}")


# Arguments


def bind_arguments(operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments by name, without those the call omits."""
    return dict(zip((t.name for t in operator.inputs), args, strict=False)) | dict(kwargs)


def inputs_of(operator: Operator, arguments: Mapping[str, Any]) -> list[Any]:
    """Return a node's inputs in order, with None for absent ones before the last."""
    inputs: list[Any] = []
    for tensor in operator.inputs:
        inputs += arguments[tensor.name] if tensor.kind == "variadic" else [arguments.get(tensor.name)]
    while inputs and inputs[-1] is None:
        inputs.pop()
    return inputs


def attributes_of(operator: Operator, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a node, without those that are None or equal their default."""
    attributes = {}
    for attribute in operator.attributes:
        value = arguments.get(attribute.name)
        if value is None or value == attribute.default:
            continue
        is_list = isinstance(value, (list, tuple))
        numbers = value if is_list else [value]
        if attribute.type.startswith("float") and not all(map(fits_attribute, numbers)):
            raise call_error(operator, f"{attribute.name} is {value}, which overflows a float32 attribute")
        attributes[attribute.name] = tuple(value) if is_list else value
    return attributes


def requested_outputs(operator: Operator, arguments: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the indices of the outputs that a call requests."""
    requested = arguments.get(OUTPUTS, operator.default_outputs)
    indices = tuple(range(requested)) if isinstance(requested, int) else tuple(requested)
    count = len(operator.outputs) if operator.outputs[-1].kind != "variadic" else math.inf
    if not indices or len(set(indices)) != len(indices) or not all(0 <= i < count for i in indices):
        names = ", ".join(f"{i}: {t.name}" for i, t in enumerate(operator.outputs))
        raise call_error(operator, f"outputs is {requested}, and must be indices of {names}")
    return indices


def computed_outputs(operator: Operator, requested: Sequence[int]) -> list[bool]:
    """Return for each output whether the node has it: the requested ones, and the required ones."""
    required = [i for i, t in enumerate(operator.outputs) if t.kind == "required"]
    return [i in requested or i in required for i in range(max(*requested, *required, 0) + 1)]


def node_spec(
    operator: Operator, arguments: Mapping[str, Any], dims: Callable[[torch.Tensor], tuple[Dim, ...]]
) -> NodeSpec:
    """Return the spec of a call; `dims` returns the dims of a tensor."""
    inputs = [x if x is None else TensorSpec(_onnx_type(operator, x), dims(x)) for x in inputs_of(operator, arguments)]
    if not any(inputs):
        raise call_error(operator, "it has no tensor arguments")
    attributes = tuple(attributes_of(operator, arguments).items())
    return NodeSpec(operator, tuple(inputs), attributes, requested_outputs(operator, arguments))


def may_be_sizes(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a short 1-D int64 tensor, as of sizes or axes: inference needs its length."""
    if tensor.dim() != 1 or tensor.dtype != torch.int64:
        return False
    count = tensor.shape[0]
    if isinstance(count, torch.SymInt) and not count.node.has_hint():
        return False
    return bool(count <= _MAX_RANK)


def _onnx_type(operator: Operator, tensor: torch.Tensor) -> int:
    if tensor.dtype.is_complex:
        raise call_error(operator, f"ONNX has no tensors of dtype {tensor.dtype}")
    try:
        return int(dtypes.to_onnx(tensor.dtype))
    except Unsupported as error:
        raise call_error(operator, str(error)) from error


# The model


def input_names(spec: NodeSpec) -> tuple[str, ...]:
    """Return the names of the inputs that are present."""
    return tuple(f"x{i}" for i, x in enumerate(spec.inputs) if x is not None)


def output_names(spec: NodeSpec) -> tuple[str, ...]:
    """Return the names of the requested outputs."""
    return tuple(f"y{i}" for i in spec.outputs)


def make_node(spec: NodeSpec) -> onnx.NodeProto:
    """Return the node."""
    inputs = [f"x{i}" if x is not None else "" for i, x in enumerate(spec.inputs)]
    operator = spec.operator
    outputs = [f"y{i}" if has else "" for i, has in enumerate(computed_outputs(operator, spec.outputs))]
    node = onnx.helper.make_node(operator.op_type, inputs, outputs, name=operator.op_type, domain=operator.domain)
    node.attribute.extend(attribute_protos(operator, spec.attributes))
    return node


def attribute_protos(operator: Operator, attributes: Iterable[tuple[str, Any]]) -> list[onnx.AttributeProto]:
    """Return attributes as protos, with the types of the schema."""
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


def make_model(spec: NodeSpec, extra_nodes: Sequence[onnx.NodeProto] = ()) -> bytes:
    """Return the serialized model of the node, and of extra nodes that read its outputs."""
    inputs = [
        onnx.helper.make_tensor_value_info(f"x{i}", x.dtype, list(x.dims))
        for i, x in enumerate(spec.inputs)
        if x is not None
    ]
    names = [*output_names(spec), *(name for node in extra_nodes for name in node.output)]
    graph = onnx.helper.make_graph(
        [make_node(spec), *extra_nodes], spec.operator.name, inputs, [onnx.ValueInfoProto(name=name) for name in names]
    )
    opsets = [onnx.helper.make_opsetid("", opset()), onnx.helper.make_opsetid(MICROSOFT, 1)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)
    return bytes(model.SerializeToString())
