"""Norms before layers in lower precision, by our own operator: faster, and it can return bfloat16."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import onnx_ir as ir

from sardonyx.native import linear, norm
from sardonyx.options import Options
from sardonyx.precision.sizes import dims
from sardonyx.precision.views import readers_of
from sardonyx.translate.inference import set_dims

_CENTERED = {"LayerNormalization": True, "RMSNormalization": False}
_EPSILON = 1e-5
"""ONNX's default."""


def lower_norms(model: ir.Model, options: Options) -> Sequence[Path]:
    """Replace the norms that layers in lower precision read, in place; return the library that they need."""
    chosen = [node for node in model.graph if _is_norm(node) and any(_read_by_layers(node.outputs[0]))]
    for node in chosen:
        _replace(model.graph, node)
    if not chosen:
        return []
    model.graph.opset_imports[norm.DOMAIN] = 1
    return [norm.build(options)]


def _is_norm(node: ir.Node) -> bool:
    if node.domain or node.op_type not in _CENTERED or any(x.uses() for x in node.outputs[1:]):
        return False
    x, *rows = [value for value in node.inputs if value is not None]
    if any(value.dtype != ir.DataType.FLOAT for value in (x, *rows)) or not dims(x):
        return False
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else -1
    return axis in (-1, len(dims(x)) - 1) and all(dims(row) == dims(x)[-1:] for row in rows)


def _read_by_layers(value: ir.Value) -> Iterator[bool]:
    return (linear.is_layer(use.node) and use.idx == 0 for use in readers_of(value))


def _replace(graph: ir.Graph, old: ir.Node) -> None:
    x, scale, *shift = old.inputs
    assert x is not None
    assert scale is not None
    epsilon = old.attributes["epsilon"].as_float() if "epsilon" in old.attributes else _EPSILON
    node = norm.norm_node(x, scale, *(shift or [None]), epsilon=epsilon, centered=_CENTERED[old.op_type])
    before, after = old.outputs[0], node.outputs[0]
    after.name = f"{before.name}_norm"
    set_dims(after, dims(before))
    node.meta["fx"] = old.meta.get("fx")
    graph.insert_before(old, node)
    ir.convenience.replace_all_uses_with(before, after, replace_graph_outputs=True)
    graph.remove(old, safe=True)
