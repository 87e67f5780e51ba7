"""Maxima of windows that hold NaN, or nothing but −∞: ONNX Runtime's MaxPool on the CPU loses both.

It begins each window with the lowest number, and skips NaN. A model that masks by −∞ before it pools would see a finite
maximum. After operators that give no −∞, as ReLU, it is left as it is, NaN included: a second pooling costs an eighth
of the first layers of a ResNet. The indices that pooling returns for such windows stay ONNX Runtime's.
"""

from __future__ import annotations

import onnx_ir as ir
import torch

from sardonyx import dtypes
from sardonyx.optimize.scopes import free_tag, graphs_of
from sardonyx.translate.builder import Builder

_FLOATS = (ir.DataType.FLOAT, ir.DataType.DOUBLE)
_BOUNDED_BELOW = frozenset(
    {
        *("Relu", "Sigmoid", "Abs", "Exp", "Softmax", "Softplus", "Tanh", "Erf", "HardSigmoid", "HardSwish"),
        *("Gelu", "Elu", "Selu", "Celu", "Clip"),
    }
)
"""Operators that give no −∞; Clip only with a lower bound."""
_PASS_ON = frozenset({"MaxPool", "Reshape", "Transpose", "Concat", "Identity", "Slice", "Squeeze", "Unsqueeze"})
"""Operators whose results are among their inputs."""
_DEPTH = 8


def keep_infinities(model: ir.Model) -> None:
    """Give windows of −∞, or with NaN, their maximum, in place."""
    g = Builder(model.graph.opset_imports[""], tag=free_tag(model.graph))
    for graph in graphs_of(model.graph):
        for node in list(graph):
            if node.op_type == "MaxPool" and not node.domain and node.outputs[0].dtype in _FLOATS:
                source = node.inputs[0]
                if source is not None and not _is_bounded(source, _DEPTH):
                    _keep_infinity(graph, node, g)
    for constant in g.initializers.values():
        model.graph.register_initializer(constant)


def _is_bounded(x: ir.Value, depth: int) -> bool:
    """Whether a value is known to be above −∞."""
    node = x.producer()
    if node is None or node.domain or not depth:
        return False
    if node.op_type == "Clip":
        return len(node.inputs) > 1 and node.inputs[1] is not None and node.inputs[1].const_value is not None
    if node.op_type == "Mul":  # SiLU and hard swish, written out: of −∞ they make NaN
        gates = [y.producer() for y in node.inputs if y is not None]
        return any(
            gate is not None and gate.op_type in ("Sigmoid", "HardSigmoid") and gate.inputs[0] in node.inputs
            for gate in gates
        )
    if node.op_type in _PASS_ON:
        sources = node.inputs if node.op_type == "Concat" else node.inputs[:1]
        return all(source is not None and _is_bounded(source, depth - 1) for source in sources)
    return node.op_type in _BOUNDED_BELOW


def _keep_infinity(graph: ir.Graph, node: ir.Node, g: Builder) -> None:
    """Pool a second time what elements are: 2 for NaN, 0 for −∞, 1 for all others, the lowest number among them."""
    x, y = node.inputs[0], node.outputs[0]
    assert x is not None
    assert y.dtype is not None
    dtype = dtypes.to_torch(y.dtype)
    uses, places = list(y.uses()), [i for i, output in enumerate(graph.outputs) if output is y]
    infinity, nan = (g.scalar(float(name), dtype) for name in ("-inf", "nan"))
    zero, one, two = (g.scalar(number, torch.float32) for number in (0, 1, 2))
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    rank = g.Where(g.IsNaN(x), two, g.cast(g.Greater(x, infinity), torch.float32))
    highest = g.MaxPool(rank, **attributes)
    kept = g.Where(g.Greater(highest, zero), g.Where(g.Greater(highest, one), nan, y), infinity)
    if "dims" in y.meta:
        kept.meta["dims"] = y.meta["dims"]
    kept.shape = y.shape
    made = list(g.nodes)
    g.nodes.clear()
    for fresh in made:
        fresh.meta["fx"] = node.meta.get("fx")
    graph.insert_after(node, made)
    for use in uses:
        use.node.replace_input_with(use.idx, kept)
    for place in places:
        graph.outputs[place] = kept
