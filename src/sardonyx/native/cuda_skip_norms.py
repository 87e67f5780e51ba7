"""Norms of a sum on a GPU as additions and a plain norm: a matrix product can take the additions along."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from sardonyx import opsets
from sardonyx.native.partition import replace_value
from sardonyx.native.table import float_of, is_used
from sardonyx.translate.builder import MICROSOFT

_PLAIN = {"SkipLayerNormalization": "LayerNormalization", "SkipSimplifiedLayerNormalization": "RMSNormalization"}
_BIASES = {"SkipLayerNormalization": 4, "SkipSimplifiedLayerNormalization": 3}
"""Indices of their inputs."""
_MEAN, _DEVIATION, _SUM = 1, 2, 3
"""Indices of their outputs."""


def is_skip_norm(node: ir.Node) -> bool:
    """Return whether a node is the norm of a sum, of which only the result and the sum are used."""
    if node.domain != MICROSOFT or node.op_type not in _PLAIN or is_used(node, _MEAN) or is_used(node, _DEVIATION):
        return False
    assert node.graph is not None
    return _PLAIN[node.op_type] != "RMSNormalization" or node.graph.opset_imports[""] >= opsets.ATTENTION


def bias_of(norm: ir.Node) -> ir.Value | None:
    """Return the row that the norm adds to its two addends, if any."""
    return _input(norm, _BIASES[norm.op_type])


def split_skip_norm(graph: ir.Graph, norm: ir.Node, addend: ir.Value) -> None:
    """Replace a norm by additions, the bias to this addend first, and the plain norm of their sum."""
    (other,) = (x for x in norm.inputs[:2] if x is not addend)
    bias, total = bias_of(norm), addend
    for suffix, added in (("biased", bias), ("sum", other)):
        if added is not None:
            total = _add(graph, norm, total, added, suffix)
    if len(norm.outputs) > _SUM:
        replace_value(norm.outputs[_SUM], total)
    replace_value(norm.outputs[0], _plain_norm(graph, norm, total))
    graph.remove(norm, safe=True)


def _plain_norm(graph: ir.Graph, norm: ir.Node, total: ir.Value) -> ir.Value:
    weights = [x for x in norm.inputs[2 : _BIASES[norm.op_type]] if x is not None]
    attributes = [ir.AttrInt64("axis", -1), ir.AttrFloat32("epsilon", float_of(norm, "epsilon", 1e-12))]
    return _insert(graph, norm, _PLAIN[norm.op_type], [total, *weights], attributes, suffix="plain")


def _add(graph: ir.Graph, norm: ir.Node, a: ir.Value, b: ir.Value, suffix: str) -> ir.Value:
    total = _insert(graph, norm, "Add", [a, b], suffix=suffix)
    total.name, total.type, total.shape = f"{norm.outputs[0].name}_{suffix}", a.type, a.shape
    total.meta.update(a.meta)
    return total


def _insert(
    graph: ir.Graph,
    norm: ir.Node,
    op_type: str,
    inputs: Sequence[ir.Value],
    attributes: Sequence[ir.Attr] = (),
    *,
    suffix: str,
) -> ir.Value:
    """Insert a node of the norm's origin in front of it, and return its result."""
    node = ir.Node("", op_type, inputs, attributes, num_outputs=1)
    node.name = f"{norm.name}_{suffix}"
    node.meta["fx"] = norm.meta.get("fx")
    graph.insert_before(norm, node)
    return node.outputs[0]


def _input(node: ir.Node, index: int) -> ir.Value | None:
    return node.inputs[index] if index < len(node.inputs) else None
