"""Max pooling of windows that contain NaN, or only −∞: ONNX Runtime's MaxPool on the CPU is wrong for both.

It starts each window at the lowest finite number, and skips NaN. A model that masks with −∞ before pooling would get a
finite maximum. After operators that never return −∞, such as ReLU, MaxPool is left unchanged, NaN included: a second
pooling costs an eighth of the first layers of a ResNet. The indices returned for such windows remain ONNX Runtime's.
"""

from __future__ import annotations

import onnx_ir as ir
import torch

from sardonyx import dtypes
from sardonyx.optimize.subgraphs import graphs_of, unused_tag
from sardonyx.translate.builder import Builder

_FLOATS = (ir.DataType.FLOAT, ir.DataType.DOUBLE)
_BOUNDED_BELOW = frozenset(
    {
        *("Relu", "Sigmoid", "Abs", "Exp", "Softmax", "Softplus", "Tanh", "Erf", "HardSigmoid", "HardSwish"),
        *("Gelu", "Elu", "Selu", "Celu", "Clip"),
    }
)
"""Operators that never return −∞; Clip only with a lower bound."""
_SELECTING = frozenset({"MaxPool", "Reshape", "Transpose", "Concat", "Identity", "Slice", "Squeeze", "Unsqueeze"})
"""Operators whose outputs consist of elements of their inputs."""
_DEPTH = 8


def keep_infinities(model: ir.Model) -> None:
    """Correct, in place, the maxima of windows of −∞ or with NaN."""
    g = Builder(model.graph.opset_imports[""], tag=unused_tag(model.graph))
    for graph in graphs_of(model.graph):
        for node in list(graph):
            if node.op_type == "MaxPool" and not node.domain and node.outputs[0].dtype in _FLOATS:
                source = node.inputs[0]
                if source is not None and not _is_bounded(source, _DEPTH):
                    _correct_pool(graph, node, g)
    for constant in g.initializers.values():
        model.graph.register_initializer(constant)


def _is_bounded(x: ir.Value, depth: int) -> bool:
    """Whether a value is known to be above −∞."""
    node = x.producer()
    if node is None or node.domain or not depth:
        return False
    if node.op_type == "Clip":
        return len(node.inputs) > 1 and node.inputs[1] is not None and node.inputs[1].const_value is not None
    if node.op_type == "Mul":  # decomposed SiLU and hard swish: they map −∞ to NaN
        gates = [y.producer() for y in node.inputs if y is not None]
        return any(
            gate is not None and gate.op_type in ("Sigmoid", "HardSigmoid") and gate.inputs[0] in node.inputs
            for gate in gates
        )
    if node.op_type in _SELECTING:
        sources = node.inputs if node.op_type == "Concat" else node.inputs[:1]
        return all(source is not None and _is_bounded(source, depth - 1) for source in sources)
    return node.op_type in _BOUNDED_BELOW


def _correct_pool(graph: ir.Graph, node: ir.Node, g: Builder) -> None:
    """Pool the class of each element too: 2 for NaN, 0 for −∞, 1 for all others."""
    x, y = node.inputs[0], node.outputs[0]
    assert x is not None
    assert y.dtype is not None
    dtype = dtypes.to_torch(y.dtype)
    uses, indices = list(y.uses()), [i for i, output in enumerate(graph.outputs) if output is y]
    infinity, nan = (g.scalar(float(name), dtype) for name in ("-inf", "nan"))
    zero, one, two = (g.scalar(number, torch.float32) for number in (0, 1, 2))
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    rank = g.Where(g.IsNaN(x), two, g.cast(g.Greater(x, infinity), torch.float32))
    highest = g.MaxPool(rank, **attributes)
    corrected = g.Where(g.Greater(highest, zero), g.Where(g.Greater(highest, one), nan, y), infinity)
    if "dims" in y.meta:
        corrected.meta["dims"] = y.meta["dims"]
    corrected.shape = y.shape
    nodes = list(g.nodes)
    g.nodes.clear()
    for added in nodes:
        added.meta["fx"] = node.meta.get("fx")
    graph.insert_after(node, nodes)
    for use in uses:
        use.node.replace_input_with(use.idx, corrected)
    for index in indices:
        graph.outputs[index] = corrected
