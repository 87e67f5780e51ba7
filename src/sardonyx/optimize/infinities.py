"""Maxima and minima of infinities, which kernels of ONNX Runtime lose.

MaxPool starts each window at the lowest finite number, and on the CPU it skips NaN; on CUDA so do ReduceMax and
ReduceMin, which cuDNN computes. A model that masks with −∞ would get a finite maximum. After operators that never
return −∞, such as ReLU, a maximum is left unchanged, for MaxPool NaN included: a second pooling costs an eighth of the
first layers of a ResNet. The indices that MaxPool returns for such windows remain ONNX Runtime's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import onnx_ir as ir
import torch

from sardonyx import dtypes
from sardonyx.optimize.subgraphs import graphs_of, unused_tag
from sardonyx.translate.builder import Builder

_POOLED = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16)
_REDUCED = (ir.DataType.FLOAT, ir.DataType.DOUBLE)
"""Dtypes of which infinities are lost; ReduceMax computes half precision in single precision, and rounds to −∞."""
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


def keep_infinities(model: ir.Model, operators: Collection[str]) -> None:
    """Correct, in place, the results of these operators: MaxPool, ReduceMax, ReduceMin."""
    g = Builder(model.graph.opset_imports[""], tag=unused_tag(model.graph))
    for graph in graphs_of(model.graph):
        for node in list(graph):
            if node.op_type in operators and _can_lose_infinity(node):
                _replace_result(graph, node, g, _CORRECTIONS[node.op_type](g, node))
    for constant in g.initializers.values():
        model.graph.register_initializer(constant)


def _can_lose_infinity(node: ir.Node) -> bool:
    source = node.inputs[0]
    if source is None or node.outputs[0].dtype not in (_POOLED if node.op_type == "MaxPool" else _REDUCED):
        return False
    return node.op_type == "ReduceMin" or not _is_bounded(source, _DEPTH)


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


def _corrected_pool(g: Builder, node: ir.Node) -> ir.Value:
    """Pool the class of each element too: 2 for NaN, 0 for −∞, 1 for all others."""
    x, y = node.inputs[0], node.outputs[0]
    assert x is not None
    assert y.dtype is not None
    dtype = dtypes.to_torch(y.dtype)
    infinity, nan = (g.scalar(float(name), dtype) for name in ("-inf", "nan"))
    zero, one, two = (g.scalar(number, torch.float32) for number in (0, 1, 2))
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    rank = g.Where(g.IsNaN(x), two, g.cast(g.Greater(x, infinity), torch.float32))
    highest = g.node("MaxPool", [rank], domain=node.domain, **attributes)
    highest.type = ir.TensorType(ir.DataType.FLOAT)
    return g.Where(g.Greater(highest, zero), g.Where(g.Greater(highest, one), nan, y), infinity)


def _corrected_reduction(g: Builder, node: ir.Node) -> ir.Value:
    """Add the infinity to the result, a limit or NaN, if no element is on this side of it."""
    x, y = node.inputs[0], node.outputs[0]
    assert x is not None
    assert y.dtype is not None
    is_max = node.op_type == "ReduceMax"
    infinity = g.scalar(float("-inf" if is_max else "inf"), dtypes.to_torch(y.dtype))
    inside = g.cast(g.Greater(x, infinity) if is_max else g.Less(x, infinity), torch.int32)
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    found = g.node("ReduceMax", [inside, *node.inputs[1:]], **attributes)
    found.type = ir.TensorType(ir.DataType.INT32)
    return g.Where(g.Equal(found, g.scalar(0, torch.int32)), g.Add(y, infinity), y)


_CORRECTIONS: Mapping[str, Callable[[Builder, ir.Node], ir.Value]] = {
    "MaxPool": _corrected_pool,
    "ReduceMax": _corrected_reduction,
    "ReduceMin": _corrected_reduction,
}


def _replace_result(graph: ir.Graph, node: ir.Node, g: Builder, corrected: ir.Value) -> None:
    """Insert the nodes of a builder after a node, let all but them read `corrected`, and empty the builder."""
    y, nodes = node.outputs[0], list(g.nodes)
    g.nodes.clear()
    if "dims" in y.meta:
        corrected.meta["dims"] = y.meta["dims"]
    corrected.shape, corrected.type = y.shape, y.type
    for added in nodes:
        added.meta["fx"] = node.meta.get("fx")
    for use in list(y.uses()):
        if use.node not in nodes:
            use.node.replace_input_with(use.idx, corrected)
    for index, output in enumerate(graph.outputs):
        if output is y:
            graph.outputs[index] = corrected
    graph.insert_after(node, nodes)
