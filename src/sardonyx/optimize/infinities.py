"""Maxima and minima of infinities, which kernels of ONNX Runtime lose.

MaxPool starts each window at the lowest finite number, and on the CPU it skips NaN; on CUDA so do ReduceMax and
ReduceMin, which cuDNN computes. A model that masks with −∞ would get a finite maximum. After operators that never
return −∞, such as ReLU, a maximum is left unchanged, for MaxPool NaN included: a second pooling costs an eighth of the
first layers of a ResNet. If its indices are read, those of windows with NaN are corrected too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

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
                _replace_results(graph, node, g, _CORRECTIONS[node.op_type](g, node))
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


def _corrected_pool(g: Builder, node: ir.Node) -> list[ir.Value]:
    """Pool a rank of each element too: positive for NaN, negative for −∞, 0 for all others.

    Its absolute value is the index in the plane, counted from 1: torch's index of such a window is that of its last NaN
    or first −∞.
    """
    x, y = node.inputs[0], node.outputs[0]
    assert x is not None
    assert y.dtype is not None
    infinity, nan = (g.scalar(float(name), dtypes.to_torch(y.dtype)) for name in ("-inf", "nan"))
    dtype = _exact_dtype(x) if _reads_indices(node) else torch.float32
    zero, one = (g.scalar(number, dtype) for number in (0, 1))
    place = g.Add(g.cast(_places(g, x), dtype), one) if _reads_indices(node) else one
    rank = g.Where(g.IsNaN(x), place, g.Where(g.Greater(x, infinity), zero, g.Neg(place)))
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    highest = g.node("MaxPool", [rank], domain=node.domain, **attributes)
    highest.type = ir.TensorType(dtypes.to_onnx(dtype))
    is_finite = g.Equal(highest, zero)
    corrected = g.Where(is_finite, y, g.Where(g.Greater(highest, zero), nan, infinity))
    if not _reads_indices(node):
        return [corrected]
    index = g.Add(g.cast(g.Sub(g.Abs(highest), one), torch.int64), _plane_starts(g, x))
    return [corrected, g.Where(is_finite, node.outputs[1], index)]


def _reads_indices(node: ir.Node) -> bool:
    if len(node.outputs) == 1 or ("storage_order" in node.attributes and node.attributes["storage_order"].as_int()):
        return False
    return bool(node.outputs[1].uses()) or node.outputs[1].is_graph_output()


def _exact_dtype(x: ir.Value) -> torch.dtype:
    """Return a dtype that represents every index of a plane and that MaxPool supports."""
    sizes = [] if x.shape is None else list(x.shape)[2:]
    known = [size for size in sizes if isinstance(size, int)]
    return torch.float32 if known and known == sizes and math.prod(known) < 2**24 else torch.float64


def _places(g: Builder, x: ir.Value) -> ir.Value:
    """Return the index of each element in its plane."""
    sizes = g.Shape(x, start=2)
    zero, one = (g.scalar(number, torch.int64) for number in (0, 1))
    return g.Reshape(g.Range(zero, g.ReduceProd(sizes, keepdims=0), one), g.Concat(g.ints([1, 1]), sizes, axis=0))


def _plane_starts(g: Builder, x: ir.Value) -> ir.Value:
    """Return the index of each plane's first element in the whole tensor, over which ONNX counts."""
    sizes = g.Shape(x, start=2)
    starts = g.Range(g.scalar(0, torch.int64), g.Size(x), g.ReduceProd(sizes, keepdims=0))
    return g.Reshape(starts, g.Concat(g.Shape(x, start=0, end=2), g.Expand(g.ints([1]), g.Shape(sizes)), axis=0))


def _corrected_reduction(g: Builder, node: ir.Node) -> list[ir.Value]:
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
    return [g.Where(g.Equal(found, g.scalar(0, torch.int32)), g.Add(y, infinity), y)]


_CORRECTIONS: Mapping[str, Callable[[Builder, ir.Node], list[ir.Value]]] = {
    "MaxPool": _corrected_pool,
    "ReduceMax": _corrected_reduction,
    "ReduceMin": _corrected_reduction,
}


def _replace_results(graph: ir.Graph, node: ir.Node, g: Builder, corrected: Sequence[ir.Value]) -> None:
    """Insert the nodes of a builder after a node, let all but them read `corrected`, and empty the builder."""
    nodes = list(g.nodes)
    g.nodes.clear()
    for added in nodes:
        added.meta["fx"] = node.meta.get("fx")
    for old, new in zip(node.outputs, corrected, strict=False):
        _replace_value(graph, old, new, nodes)
    graph.insert_after(node, nodes)


def _replace_value(graph: ir.Graph, old: ir.Value, new: ir.Value, excluded: Sequence[ir.Node]) -> None:
    """Let all nodes but the excluded ones, and the graph's outputs, read a new value."""
    if "dims" in old.meta:
        new.meta["dims"] = old.meta["dims"]
    new.shape, new.type = old.shape, old.type
    for use in list(old.uses()):
        if use.node not in excluded:
            use.node.replace_input_with(use.idx, new)
    for index, output in enumerate(graph.outputs):
        if output is old:
            graph.outputs[index] = new
