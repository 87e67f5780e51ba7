"""Types and sizes of what operators give that onnx has no inference for: ONNX Runtime infers them.

A session of the model tells all of them at once. Where there is none, as of an operator without a kernel for a type,
each node is asked for by itself.
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

_MOST_ELEMENTS = 1024
"""Constants of more are not looked at for a type or a size: a session has inputs in their places."""
_MOST_ROUNDS = 8
_STAND_INS = {
    ir.DataType.BFLOAT16: ir.DataType.FLOAT16,
    ir.DataType.FLOAT16: ir.DataType.FLOAT,
    ir.DataType.DOUBLE: ir.DataType.FLOAT,
}
"""What is asked for in the place of a type that an operator has no kernel for."""


def infer(model: ir.Model) -> None:
    """Give values of the main graph the types and sizes that onnx, and for other domains ONNX Runtime, infer."""
    _infer_by_onnx(model)
    for _ in range(_MOST_ROUNDS):
        unknown = [node for node in model.graph if _lacks(node) and not origin_unknown(node)]
        if not unknown or not _infer_by_onnxruntime(model, unknown):
            return
        _infer_by_onnx(model)


def origin_unknown(node: ir.Node) -> str | None:
    """Which operator ONNX Runtime does not know without the library it is in; None if it knows a node's."""
    if not node.domain or (node.domain, node.op_type) in _schemas():
        return None
    return f"{node.domain}::{node.op_type}"


def why_unknown(value: ir.Value) -> str:
    """Why nothing is known of a value: the operator, of those it depends on, that nobody knows."""
    seen: set[ir.Node] = set()
    ends = [value]
    while ends:
        node = ends.pop().producer()
        if node is None or node in seen:
            continue
        seen.add(node)
        origin = origin_unknown(node)
        if origin is not None:
            return f": it depends on {origin}, which onnxruntime does not know without its library"
        ends += [x for x in node.inputs if x is not None and (x.type is None or x.shape is None)]
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


def _lacks(node: ir.Node) -> bool:
    """Whether something is unknown of what a node gives."""
    return any(_is_unknown(x) for x in node.outputs if x.uses() or x.is_graph_output())


def _is_unknown(value: ir.Value) -> bool:
    return value.type is None or value.dtype is None or value.shape is None


def _infer_by_onnxruntime(model: ir.Model, unknown: Sequence[ir.Node]) -> bool:
    """Whether anything became known."""
    try:
        onnxruntime()
    except MissingDependency:
        return False
    if not any(map(origin_unknown, model.graph)):
        told = _asked(list(model.graph), model)
        if told is not None:
            return _learn(unknown, told)
    learnt = [_infer_alone(node, model) for node in unknown]
    return any(learnt)


def _infer_alone(node: ir.Node, model: ir.Model) -> bool:
    """Ask for one node; where it has no kernel, for the same with numbers of another precision."""
    read = [x for x in node.inputs if x is not None]
    if any(map(_is_unknown, read)) or any(a.type == ir.AttributeType.GRAPH for a in node.attributes.values()):
        return False
    kinds = {x.dtype for x in read if x.dtype is not None}
    stand_ins: dict[ir.DataType, ir.DataType] = {}
    while True:
        told = _asked([node], model, stand_ins)
        found = kinds.intersection(_STAND_INS)
        if told is not None:
            back = {new: old for old, new in stand_ins.items()}
            return _learn([node], {name: (back.get(kind, kind), dims) for name, (kind, dims) in told.items()})
        if len(found) != 1 or kinds & {_STAND_INS[x] for x in found}:
            return False
        (old,) = found
        kinds = kinds - found | {_STAND_INS[old]}
        first = next(iter(stand_ins), old)
        stand_ins = {first: _STAND_INS[old]}


_Told = Mapping[str, tuple[ir.DataType, Sequence[int | str | None]]]


def _asked(
    nodes: Sequence[ir.Node], model: ir.Model, stand_ins: Mapping[ir.DataType, ir.DataType] | None = None
) -> _Told | None:
    """What a session says of all that some nodes give; None if there is no such session."""
    made = _proto(nodes, model, stand_ins or {})
    ort = onnxruntime()
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        session = ort.InferenceSession(made.SerializeToString(), options, providers=["CPUExecutionProvider"])
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


def _proto(nodes: Sequence[ir.Node], model: ir.Model, stand_ins: Mapping[ir.DataType, ir.DataType]) -> onnx.ModelProto:
    """Some nodes as a model that gives everything they do. Large constants are inputs: their values tell nothing."""
    written = [ir.to_proto(node) for node in nodes]
    own = {x.name for node in nodes for x in node.outputs}
    read = {x.name: x for node in nodes for x in _read(node) if x.name not in own}
    constants = [x for x in read.values() if _is_small(x) and x.dtype not in stand_ins]
    inputs = [x for x in read.values() if x not in constants]
    outputs = [onnx.ValueInfoProto(name=x.name) for node in nodes for x in node.outputs if x.name]
    opsets = [onnx.helper.make_opsetid(domain, version) for domain, version in model.opset_imports.items()]
    graph = onnx.helper.make_graph(
        written,
        "inference",
        [_info(x, stand_ins) for x in inputs],
        outputs,
        [ir.to_proto(x.const_value) for x in constants if x.const_value is not None],
    )
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=min(model.ir_version, IR_VERSION))


def _read(node: ir.Node) -> Iterable[ir.Value]:
    """What a node reads, also inside its branches and loops."""
    yield from (x for x in node.inputs if x is not None)
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            inner = list(attribute.as_graph().all_nodes())
            own = {id(x) for body in inner for x in body.outputs} | {id(x) for x in attribute.as_graph().inputs}
            yield from (x for body in inner for x in body.inputs if x is not None and id(x) not in own)


def _is_small(value: ir.Value) -> bool:
    return value.const_value is not None and value.const_value.size <= _MOST_ELEMENTS and not value.is_graph_input()


def _info(value: ir.Value, stand_ins: Mapping[ir.DataType, ir.DataType]) -> onnx.ValueInfoProto:
    kind = value.dtype if value.dtype is not None else ir.DataType.UNDEFINED
    dims = None if value.shape is None else [_plain(dim) for dim in value.shape]
    return onnx.helper.make_tensor_value_info(str(value.name), int(stand_ins.get(kind, kind)), dims)


def _plain(dim: Any) -> int | str | None:
    return dim if isinstance(dim, int) else dim.value


def _learn(nodes: Sequence[ir.Node], told: _Told) -> bool:
    """Give what is unknown the types and sizes that were told; whether there was any such.

    A session says of a tensor of unknown rank what it says of a scalar, that it has no sizes: neither is believed.
    """
    learnt = False
    for value in (x for node in nodes for x in node.outputs):
        kind, dims = told.get(str(value.name), (None, ()))
        if kind is not None and value.dtype is None:
            value.type, learnt = ir.TensorType(kind), True
        if dims and value.shape is None:
            value.shape, learnt = ir.Shape(dims), True
    return learnt
