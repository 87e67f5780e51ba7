"""Sigmoids of large negative numbers: ONNX Runtime's kernel on the CPU has only an absolute error bound, about 6e-8.

It returns 0 below −18, and 7 % too little at −14: a logarithm, a quotient or a comparison of the result would be wrong.
Where the result only scales or is added to something else, as in gates and SiLU, the kernel is precise enough, unless a
quotient or a comparison reads the product.
"""

from __future__ import annotations

import onnx_ir as ir
import torch

from sardonyx.optimize.subgraphs import graphs_of, replace_node, unused_tag
from sardonyx.translate.builder import Builder

_TOLERANT = frozenset({"Mul", "Add", "Sub", "MatMul", "FusedMatMul", "Gemm", "Conv", "ReduceSum", "ReduceMean"})
"""Operators whose result an absolute error of their operand changes by about as much."""
_AMPLIFYING = frozenset(
    {"Reciprocal", "Log", "Sqrt", "Sign", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"}
)
"""Operators of which a small operand decides the result, as a divisor does."""
_LAYOUT = frozenset(
    {"Reshape", "Transpose", "Slice", "Squeeze", "Unsqueeze", "Identity", "Expand", "Split", "Gather", "Concat"}
)


def compose_sigmoids(model: ir.Model) -> None:
    """Compute, in place, 1 / (1 + exp(−x)) where the relative error of a sigmoid matters."""
    g = Builder(model.graph.opset_imports[""], tag=unused_tag(model.graph))
    for graph in graphs_of(model.graph):
        for node in list(graph):
            if node.op_type == "Sigmoid" and not node.domain and _is_affected(node.outputs[0]):
                replace_node(graph, node, g, _composed(g, node.inputs[0]))
            if node.op_type == "QuickGelu" and _is_affected_gate(node.outputs[0]):
                replace_node(graph, node, g, _composed_gate(g, node))
    for constant in g.initializers.values():
        model.graph.register_initializer(constant)


def _composed(g: Builder, x: ir.Value | None) -> ir.Value:
    assert x is not None
    one = g.scalar(1, torch.float32)
    return g.Div(one, g.Add(one, g.Exp(g.Neg(x))))


def _composed_gate(g: Builder, node: ir.Node) -> ir.Value:
    """QuickGelu(x) = x · sigmoid(αx), SiLU for α = 1."""
    x = node.inputs[0]
    assert x is not None
    alpha = node.attributes["alpha"].as_float() if "alpha" in node.attributes else _QUICK_GELU
    scaled = x if alpha == 1 else g.Mul(x, g.scalar(alpha, torch.float32))
    return g.Mul(x, _composed(g, scaled))


_QUICK_GELU = 1.702
"""The default α of ONNX Runtime's QuickGelu."""


def _is_affected(y: ir.Value) -> bool:
    return y.dtype == ir.DataType.FLOAT and not is_scale(y)


def _is_affected_gate(y: ir.Value) -> bool:
    return y.dtype == ir.DataType.FLOAT and _is_amplified(y)


def is_scale(x: ir.Value) -> bool:
    """Whether a value is only multiplied or added, and no product of it amplified."""
    if x.is_graph_output():
        return False
    return all(
        (use.node.op_type in _TOLERANT and not (use.node.op_type == "Mul" and _is_amplified(use.node.outputs[0])))
        or (use.node.op_type in _LAYOUT and all(map(is_scale, use.node.outputs)))
        for use in x.uses()
    )


def _is_amplified(x: ir.Value) -> bool:
    return any(use.node.op_type in _AMPLIFYING or (use.node.op_type == "Div" and use.idx == 1) for use in x.uses())
