"""Values that are views of others: operators that take any type, and move no data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import onnx_ir as ir

from sardonyx.sizes import Dims
from sardonyx.translate.inference import set_dims

_FREE = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"})


def _is_view(node: ir.Node, index: int) -> bool:
    """Whether a node views this one of its inputs."""
    return node.op_type in _FREE and not node.domain and index == 0


def views_of(value: ir.Value) -> Iterator[ir.Value]:
    """Yield the views of a value, and the views of these."""
    for node, index in value.uses():
        if _is_view(node, index):
            view = node.outputs[0]
            yield view
            yield from views_of(view)


def readers_of(value: ir.Value) -> Iterator[tuple[ir.Node, int]]:
    """Yield the nodes that read a value or a view of it, but for its views, and which of their inputs it is."""
    for x in (value, *views_of(value)):
        yield from ((node, index) for node, index in x.uses() if not _is_view(node, index))


def source_of(value: ir.Value | None) -> ir.Value | None:
    """Return what a value is a view of: itself, if it is none."""
    producer = value.producer() if value is not None else None
    if producer is not None and producer.op_type in _FREE and not producer.domain:
        return source_of(producer.inputs[0])
    return value


def insert_reshape(
    graph: ir.Graph, place: ir.Node, x: ir.Value, shape: Sequence[int], sizes: Dims, *, after: bool = False
) -> ir.Node:
    """Insert a Reshape of a value before a node, or after it, whose result has these sizes; return it."""
    operand = ir.Value(name=f"{x.name}_for_{place.outputs[0].name}", type=ir.TensorType(ir.DataType.INT64))
    operand.const_value = ir.tensor(np.array(shape, np.int64), name=operand.name)
    operand.shape = ir.Shape([len(shape)])
    graph.register_initializer(operand)
    node = ir.Node("", "Reshape", [x, operand])
    view = node.outputs[0]
    view.name, view.type = f"{operand.name}_view", x.type
    set_dims(view, sizes)
    node.meta["fx"] = place.meta.get("fx")
    (graph.insert_after if after else graph.insert_before)(place, node)
    return node
