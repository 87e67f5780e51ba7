"""Infer types and shapes of operators that onnx has no inference for, with ONNX Runtime.

A session of the model returns all of them at once. If it cannot be created, for instance for an operator without a
kernel for a type, each node is queried by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

from sardonyx.errors import MissingDependency
from sardonyx.native.session import onnxruntime
from sardonyx.opsets import IR_VERSION

log = logging.getLogger(__name__)

_MAX_CONSTANT = 1024
"""Larger constants are inputs of the session: their values do not affect inference."""
_MAX_ROUNDS = 8
_SUBSTITUTE_TYPES = {
    ir.DataType.BFLOAT16: ir.DataType.FLOAT16,
    ir.DataType.FLOAT16: ir.DataType.FLOAT,
    ir.DataType.DOUBLE: ir.DataType.FLOAT,
}
"""Types to try instead of one that an operator has no kernel for."""


def infer(model: ir.Model) -> None:
    """Set the types and shapes of values, inferred by onnx, and by ONNX Runtime for other domains."""
    _infer_by_onnx(model)
    for _ in range(_MAX_ROUNDS):
        unknown = [node for node in model.graph if _has_unknown_outputs(node) and not unknown_operator(node)]
        if not unknown or not _infer_by_onnxruntime(model, unknown):
            return
        _infer_by_onnx(model)


def unknown_operator(node: ir.Node) -> str | None:
    """Return the operator of a node if ONNX Runtime does not know it without its library, else None."""
    if not node.domain or (node.domain, node.op_type) in _schemas():
        return None
    return f"{node.domain}::{node.op_type}"


def why_unknown(value: ir.Value) -> str:
    """Return why nothing is known of a value: the unknown operator that it depends on."""
    seen: set[ir.Node] = set()
    pending = [value]
    while pending:
        node = pending.pop().producer()
        if node is None or node in seen:
            continue
        seen.add(node)
        origin = unknown_operator(node)
        if origin is not None:
            return f": it depends on {origin}, which onnxruntime does not know without its library"
        pending += [x for x in node.inputs if x is not None and (x.type is None or x.shape is None)]
    return ""


def _infer_by_onnx(model: ir.Model) -> None:
    ShapeInferencePass(check_type=False, strict_mode=False, data_prop=True)(model)


@cache
def _schemas() -> frozenset[tuple[str, str]]:
    try:
        from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema
    except ImportError:
        return frozenset()
    return frozenset((schema.domain, schema.name) for schema in get_all_operator_schema())


def _has_unknown_outputs(node: ir.Node) -> bool:
    return any(_is_unknown(x) for x in node.outputs if x.uses() or x.is_graph_output())


def _is_unknown(value: ir.Value) -> bool:
    return value.type is None or value.dtype is None or value.shape is None


def _infer_by_onnxruntime(model: ir.Model, unknown: Sequence[ir.Node]) -> bool:
    """Infer with ONNX Runtime; return whether anything changed."""
    try:
        onnxruntime()
    except MissingDependency:
        return False
    if not any(map(unknown_operator, model.graph)):
        inferred = _query_session(list(model.graph), model)
        if inferred is not None:
            return _assign(unknown, inferred)
    changed = [_infer_alone(node, model) for node in unknown]
    return any(changed)


def _infer_alone(node: ir.Node, model: ir.Model) -> bool:
    """Query one node; if it has no kernel, with another precision."""
    inputs = [x for x in node.inputs if x is not None]
    if any(map(_is_unknown, inputs)) or any(a.type == ir.AttributeType.GRAPH for a in node.attributes.values()):
        return False
    kinds = {x.dtype for x in inputs if x.dtype is not None}
    substitutes: dict[ir.DataType, ir.DataType] = {}
    while True:
        inferred = _query_session([node], model, substitutes)
        substitutable = kinds.intersection(_SUBSTITUTE_TYPES)
        if inferred is not None:
            originals = {new: old for old, new in substitutes.items()}
            return _assign([node], {name: (originals.get(kind, kind), dims) for name, (kind, dims) in inferred.items()})
        if len(substitutable) != 1 or kinds & {_SUBSTITUTE_TYPES[x] for x in substitutable}:
            return False
        (old,) = substitutable
        kinds = kinds - substitutable | {_SUBSTITUTE_TYPES[old]}
        first = next(iter(substitutes), old)
        substitutes = {first: _SUBSTITUTE_TYPES[old]}


_Inferred = Mapping[str, tuple[ir.DataType, Sequence[int | str | None]]]


def _query_session(
    nodes: Sequence[ir.Node], model: ir.Model, substitutes: Mapping[ir.DataType, ir.DataType] | None = None
) -> _Inferred | None:
    """Return the types and shapes of all outputs of some nodes from a session; None if it cannot be created."""
    proto = _proto(nodes, model, substitutes or {})
    ort = onnxruntime()
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        log.debug("onnxruntime infers nothing of %s: %s", nodes[-1].name, error)
        return None
    return {x.name: (_TYPES[x.type], x.shape) for x in session.get_outputs() if x.type in _TYPES}


_TYPES: Mapping[str, ir.DataType] = {
    f"tensor({name})": kind
    for name, kind in {
        "float": ir.DataType.FLOAT,
        "double": ir.DataType.DOUBLE,
        "float16": ir.DataType.FLOAT16,
        "bfloat16": ir.DataType.BFLOAT16,
        "bool": ir.DataType.BOOL,
        **{f"int{bits}": ir.DataType[f"INT{bits}"] for bits in (8, 16, 32, 64)},
        **{f"uint{bits}": ir.DataType[f"UINT{bits}"] for bits in (8, 16, 32, 64)},
    }.items()
}


def _proto(
    nodes: Sequence[ir.Node], model: ir.Model, substitutes: Mapping[ir.DataType, ir.DataType]
) -> onnx.ModelProto:
    """Return nodes as a model that outputs all their results. Large constants become inputs."""
    protos = [ir.to_proto(node) for node in nodes]
    produced = {x.name for node in nodes for x in node.outputs}
    read = {x.name: x for node in nodes for x in _values_read(node) if x.name not in produced}
    constants = [x for x in read.values() if _is_small(x) and x.dtype not in substitutes]
    inputs = [x for x in read.values() if x not in constants]
    outputs = [onnx.ValueInfoProto(name=x.name) for node in nodes for x in node.outputs if x.name]
    opsets = [onnx.helper.make_opsetid(domain, version) for domain, version in model.opset_imports.items()]
    graph = onnx.helper.make_graph(
        protos,
        "inference",
        [_info(x, substitutes) for x in inputs],
        outputs,
        [ir.to_proto(x.const_value) for x in constants if x.const_value is not None],
    )
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=min(model.ir_version, IR_VERSION))


def _values_read(node: ir.Node) -> Iterable[ir.Value]:
    """Yield the values that a node reads, also inside its subgraphs."""
    yield from (x for x in node.inputs if x is not None)
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            inner = list(attribute.as_graph().all_nodes())
            own = {id(x) for body in inner for x in body.outputs} | {id(x) for x in attribute.as_graph().inputs}
            yield from (x for body in inner for x in body.inputs if x is not None and id(x) not in own)


def _is_small(value: ir.Value) -> bool:
    return value.const_value is not None and value.const_value.size <= _MAX_CONSTANT and not value.is_graph_input()


def _info(value: ir.Value, substitutes: Mapping[ir.DataType, ir.DataType]) -> onnx.ValueInfoProto:
    kind = value.dtype if value.dtype is not None else ir.DataType.UNDEFINED
    dims = None if value.shape is None else [_dim_value(dim) for dim in value.shape]
    return onnx.helper.make_tensor_value_info(str(value.name), int(substitutes.get(kind, kind)), dims)


def _dim_value(dim: Any) -> int | str | None:
    return dim if isinstance(dim, int) else dim.value


def _assign(nodes: Sequence[ir.Node], inferred: _Inferred) -> bool:
    """Set unknown types and shapes from what was inferred; return whether anything changed.

    A session reports no dims both for scalars and for unknown ranks, so an empty shape is ignored.
    """
    changed = False
    for value in (x for node in nodes for x in node.outputs):
        kind, dims = inferred.get(str(value.name), (None, ()))
        if kind is not None and value.dtype is None:
            value.type, changed = ir.TensorType(kind), True
        if dims and value.shape is None:
            value.shape, changed = ir.Shape(dims), True
    return changed
