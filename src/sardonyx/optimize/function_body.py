"""The function body by which ONNX defines an operator; an engine runs it if it has no kernel for the operator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir

from sardonyx.translate.schemas import Signature


def function_body(node: ir.Node, opset: int, formal: Signature, types: Mapping[str, ir.DataType]) -> Sequence[ir.Node]:
    """Return the typed body of the node's function for these dtypes by constraint; empty if it has none."""
    schema = onnx.defs.get_schema(node.op_type, opset)
    proto = ir.to_proto(node)
    inputs = [types[formal.of_input(i)] if x is not None else None for i, x in enumerate(node.inputs)]
    body = _function(schema, proto, inputs)
    if body is None:
        return ()
    named = {name: dtype for name, dtype in zip(body.input, inputs, strict=False) if dtype is not None}
    return tuple(_infer(body, proto, schema, named).graph)


def _function(schema: Any, node: onnx.NodeProto, inputs: Sequence[ir.DataType | None]) -> onnx.FunctionProto | None:
    if schema.has_function:
        version = max(schema.function_opset_versions)
        return _parse(schema.get_function_with_opset_version(version))
    if not schema.has_context_dependent_function:
        return None
    types = [onnx.helper.make_tensor_type_proto(int(dtype or 0), None).SerializeToString() for dtype in inputs]
    return _parse(schema.get_context_dependent_function(node.SerializeToString(), types))


def _parse(body: bytes) -> onnx.FunctionProto | None:
    function = onnx.FunctionProto()
    function.ParseFromString(body)
    return function if function.node else None


def _infer(body: onnx.FunctionProto, call: onnx.NodeProto, schema: Any, inputs: Mapping[str, ir.DataType]) -> ir.Model:
    """Return the body as a graph with inferred types."""
    graph = onnx.helper.make_graph(
        [_bind_attributes(node, call, schema) for node in body.node],
        schema.name,
        [onnx.helper.make_tensor_value_info(name, int(dtype), None) for name, dtype in inputs.items()],
        [onnx.ValueInfoProto(name=name) for name in body.output],
    )
    model = onnx.helper.make_model(graph, opset_imports=body.opset_import)
    return ir.from_proto(onnx.shape_inference.infer_shapes(model))


def _bind_attributes(node: onnx.NodeProto, call: onnx.NodeProto, schema: Any) -> onnx.NodeProto:
    """Return a node of the body with references to attributes replaced by the call's values or the defaults."""
    values = {attribute.name: attribute for attribute in call.attribute}
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    del copy.attribute[:]
    for attribute in node.attribute:
        name = attribute.ref_attr_name
        value = (values.get(name) or schema.attributes[name].default_value) if name else attribute
        if value.type:
            copy.attribute.add().CopyFrom(value)
            copy.attribute[-1].name = attribute.name
    return copy
