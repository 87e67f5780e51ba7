"""Compute models in bfloat16 in float32, where an engine would cast around nearly every node.

Values between their operators are not rounded to bfloat16 then, which is what fused kernels do, too; inputs and results
keep their dtypes, and numbers that the model casts to bfloat16 are rounded. Models in float16 stay as they are: their
numbers become infinite beyond 65,504, and those of float32 would not. Weights that only tables are read from stay as
they are, others are widened when a session is opened, or packed by layers in lower precision.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from sardonyx.optimize.subgraphs import bodies_of
from sardonyx.translate.builder import MICROSOFT
from sardonyx.translate.translator import WEIGHTS_LOCATION, external_weight

HALF = (ir.DataType.BFLOAT16, ir.DataType.FLOAT16)
_PRODUCTS = frozenset({"MatMul", "Gemm", "Conv", "ConvTranspose", "FusedMatMul", "Einsum"})
_MOVES = frozenset({"Transpose", "Reshape"})
_TYPED = frozenset({"BitCast", "QuantizeLinear", "DequantizeLinear", "Bernoulli", "Multinomial"})
"""Operators whose results depend on the dtype itself."""


@dataclass
class Widened:
    """What became of the weights in half precision."""

    weights: set[str] = field(default_factory=set)
    """Those that are to be widened when a session is opened."""
    tables: dict[str, str] = field(default_factory=dict)
    """Those that stay for Gather besides, and the weight of each."""
    factors: Mapping[str, ir.DataType] = field(default_factory=dict)
    """Those that a product multiplied in half precision, and their dtype."""


def has_half_products(graph: ir.Graph) -> bool:
    """Whether a graph computes products in bfloat16, and nothing that depends on the dtype itself, or is in float16."""
    nodes = list(graph)
    plain = all(_is_plain(node) for node in nodes) and not any(x.dtype == ir.DataType.FLOAT16 for x in _values(graph))
    return plain and any(node.op_type in _PRODUCTS and _is_half(node.inputs[0]) for node in nodes)


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph:
        yield from node.outputs


def _is_plain(node: ir.Node) -> bool:
    known = node.domain in ("", MICROSOFT) and node.op_type not in _TYPED and not bodies_of(node)
    return known and all(x.dtype is not None for x in node.outputs if x.uses() or x.is_graph_output())


def _is_half(value: ir.Value | None) -> bool:
    return value is not None and value.dtype in HALF


def widen(graph: ir.Graph) -> Widened:
    """Compute a graph in float32, in place."""
    widened = Widened(factors=_factors(graph))
    nodes = list(graph)
    for value in list(graph.initializers.values()):
        if _is_half(value):
            _widen_initializer(graph, value, widened)
    for value in list(graph.inputs):
        if _is_half(value):
            _cast_uses(graph, value)
    for node in nodes:
        _widen_node(graph, node)
    for output in {value for value in graph.outputs if value.producer() in nodes and value.meta.get(_WAS) is not None}:
        _narrow_output(graph, output)
    return widened


_WAS = "half"
"""Of a value's metadata: its dtype before."""


def _factors(graph: ir.Graph) -> Mapping[str, ir.DataType]:
    """Return the weights that are factors of products in half precision."""
    found = {}
    for node in graph:
        if node.op_type in _PRODUCTS and len(node.inputs) > 1 and _is_half(node.inputs[1]):
            source = node.inputs[1]
            while source is not None and (producer := source.producer()) is not None and producer.op_type in _MOVES:
                source = producer.inputs[0]
            if source is not None and source.is_initializer() and source.dtype is not None:
                found[str(source.name)] = source.dtype
    return found


# Weights and inputs


def _widen_initializer(graph: ir.Graph, value: ir.Value, widened: Widened) -> None:
    data = value.const_value
    assert data is not None
    if not (isinstance(data, ir.ExternalTensor) and data.location == WEIGHTS_LOCATION):
        value.const_value = ir.tensor(data.numpy().astype(np.float32), name=value.name)
        value.dtype = ir.DataType.FLOAT
    elif value.is_graph_output():
        _cast_uses(graph, value)
    else:
        _widen_weight(graph, value, widened)


def _widen_weight(graph: ir.Graph, value: ir.Value, widened: Widened) -> None:
    name, readers = str(value.name), [node for node, index in value.uses() if _reads_table(node, index)]
    if readers:
        _keep_table(graph, value, readers, widened)
    if value.uses():
        value.const_value = external_weight(name, ir.DataType.FLOAT, _sizes(value))
        value.dtype = ir.DataType.FLOAT
        widened.weights.add(name)
    else:
        del graph.initializers[name]


def _sizes(weight: ir.Value) -> tuple[int, ...]:
    assert weight.const_value is not None
    return tuple(weight.const_value.shape.numpy())


def _reads_table(node: ir.Node, index: int) -> bool:
    return node.op_type == "Gather" and not node.domain and index == 0


def _keep_table(graph: ir.Graph, value: ir.Value, readers: list[ir.Node], widened: Widened) -> None:
    """Let Gather read a weight in half precision, and widen what it returns."""
    assert value.dtype is not None
    name = f"{value.name}_table"
    table = ir.Value(name=name, type=ir.TensorType(value.dtype), shape=value.shape)
    table.const_value = external_weight(name, value.dtype, _sizes(value))
    table.meta.update(value.meta)
    graph.register_initializer(table)
    widened.tables[name] = str(value.name)
    for node in readers:
        node.replace_input_with(0, table)
        _cast_uses(graph, node.outputs[0])
        node.meta[_WAS] = True


def _cast_uses(graph: ir.Graph, value: ir.Value) -> None:
    """Let what reads a value in half precision read it in float32; the graph's outputs stay."""
    uses = list(value.uses())
    if not uses:
        return
    node = ir.Node("", "Cast", [value], [ir.AttrInt64("to", ir.DataType.FLOAT.value)])
    wide = node.outputs[0]
    wide.name, wide.type, wide.shape = f"{value.name}_widened", ir.TensorType(ir.DataType.FLOAT), value.shape
    wide.meta.update(value.meta)
    producer = value.producer()
    if producer is None:
        graph.insert_before(graph[0], node)
    else:
        graph.insert_after(producer, node)
    for use in uses:
        use.node.replace_input_with(use.idx, wide)


# Nodes and outputs


def _widen_node(graph: ir.Graph, node: ir.Node) -> None:
    if _WAS in node.meta:  # a table's
        return
    if _rounds(node):
        _cast_uses(graph, node.outputs[0])
        return
    for attribute in list(node.attributes.values()):
        if attribute.name in ("to", "dtype") and attribute.as_int() in HALF:
            node.attributes[attribute.name] = ir.AttrInt64(attribute.name, ir.DataType.FLOAT.value)
        elif attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype in HALF:
            number = ir.tensor(attribute.as_tensor().numpy().astype(np.float32))
            node.attributes[attribute.name] = ir.AttrTensor(attribute.name, number)
    for value in node.outputs:
        if value.dtype in HALF:
            value.meta[_WAS] = value.dtype
            value.dtype = ir.DataType.FLOAT


def _rounds(node: ir.Node) -> bool:
    """Whether a node casts numbers of another dtype, which are rounded as the model says, and may become infinite."""
    if node.op_type != "Cast" or node.domain or node.attributes["to"].as_int() not in HALF:
        return False
    x = node.inputs[0]
    return x is not None and x.meta.get(_WAS) is None


def _narrow_output(graph: ir.Graph, value: ir.Value) -> None:
    """Return a value in the dtype that it had."""
    producer, dtype = value.producer(), value.meta[_WAS]
    assert producer is not None
    node = ir.Node("", "Cast", [value], [ir.AttrInt64("to", dtype.value)])
    result = node.outputs[0]
    result.name, result.type, result.shape = value.name, ir.TensorType(dtype), value.shape
    result.meta.update(value.meta)
    value.name = f"{value.name}_widened"
    node.meta["fx"] = producer.meta.get("fx")
    graph.insert_after(producer, node)
    for index, output in enumerate(graph.outputs):
        if output is value:
            graph.outputs[index] = result
