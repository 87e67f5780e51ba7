"""Masks of attention with the lowest number in them: ONNX Runtime's kernel on the CPU takes it for −∞.

A row that has it throughout is then zero, where torch returns the mean of the values, as softmax of equal scores is
uniform. Half of the lowest number masks as well.
"""

from __future__ import annotations

import onnx_ir as ir
import torch

from sardonyx.optimize.pattern import array_of
from sardonyx.optimize.subgraphs import graphs_of, unused_tag
from sardonyx.translate.builder import Builder

_LOWEST = torch.finfo(torch.float32).min
_MASK = 3
"""The input of Attention that is added to scores."""


def raise_lowest_masks(model: ir.Model) -> None:
    """Replace, in place, the lowest number in masks of attention by half of it."""
    for graph in graphs_of(model.graph):
        raised: dict[ir.Value, ir.Value] = {}
        for node in list(graph):
            mask = node.inputs[_MASK] if node.op_type == "Attention" and len(node.inputs) > _MASK else None
            if mask is None or node.domain or mask.dtype != ir.DataType.FLOAT or not _may_be_lowest(mask):
                continue
            if mask not in raised:
                raised[mask] = _raised(model, graph, node, mask)
            node.replace_input_with(_MASK, raised[mask])


def _may_be_lowest(mask: ir.Value) -> bool:
    """Whether a row may have the lowest number throughout; a choice between other constants has none."""
    data = array_of(mask)
    if data is not None:
        return bool((data == _LOWEST).all(-1).any())
    node = mask.producer()
    if node is None or node.op_type != "Where":
        return True
    choices = [array_of(x) for x in node.inputs[1:] if x is not None]
    return any(data is None or bool((data == _LOWEST).any()) for data in choices)


def _raised(model: ir.Model, graph: ir.Graph, node: ir.Node, mask: ir.Value) -> ir.Value:
    g = Builder(model.graph.opset_imports[""], tag=unused_tag(model.graph))
    half = g.Where(g.Equal(mask, g.scalar(_LOWEST, torch.float32)), g.scalar(_LOWEST / 2, torch.float32), mask)
    half.type, half.shape = mask.type, mask.shape
    half.meta.update(mask.meta)
    graph.insert_before(node, list(g.nodes))
    for constant in g.initializers.values():
        model.graph.register_initializer(constant)
    return half
