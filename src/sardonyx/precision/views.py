"""Values that are views of others: operators that take any type, and move no data."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

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
