"""Values that are views of others: operators that take any type, and move no data."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

_FREE = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"})


def is_view(use: ir.Usage) -> bool:
    """Whether a use of a value is to view it."""
    return use.node.op_type in _FREE and not use.node.domain and use.idx == 0


def views_of(value: ir.Value) -> Iterator[ir.Value]:
    """Yield the views of a value, and the views of these."""
    for use in value.uses():
        if is_view(use):
            view = use.node.outputs[0]
            yield view
            yield from views_of(view)


def readers_of(value: ir.Value) -> Iterator[ir.Usage]:
    """Yield the uses of a value and of its views, but for the views themselves."""
    for x in (value, *views_of(value)):
        yield from (use for use in x.uses() if not is_view(use))


def source_of(value: ir.Value | None) -> ir.Value | None:
    """Return what a value is a view of: itself, if it is none."""
    producer = value.producer() if value is not None else None
    if producer is not None and producer.op_type in _FREE and not producer.domain:
        return source_of(producer.inputs[0])
    return value
