"""Maxima and minima of infinities and NaN, which kernels of ONNX Runtime lose.

MaxPool starts each window at the lowest finite number, and on the CPU it skips NaN; on CUDA so do ReduceMax and
ReduceMin, which cuDNN computes. A model that masks with −∞ would get a finite maximum. After operators that never
return −∞, such as ReLU, only NaN has to be kept: by the average of each window, which is NaN with it, and costs a third
of what a second maximum does. The indices that MaxPool returns for the windows it loses are corrected where they are
read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

import onnx_ir as ir
import torch

from sardonyx import dtypes
from sardonyx.optimize.integers import is_dequantized
from sardonyx.optimize.rules.images import IMAGES
from sardonyx.optimize.subgraphs import graphs_of, unused_tag
from sardonyx.sizes import Dims
from sardonyx.translate.builder import Builder
from sardonyx.translate.inference import set_dims

_POOLED = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16)
_REDUCED = (ir.DataType.FLOAT, ir.DataType.DOUBLE)
"""Dtypes of which infinities are lost; ReduceMax computes half precision in single precision, and rounds to −∞."""
_BOUNDED_BELOW = frozenset(
    {
        *("Relu", "Sigmoid", "Abs", "Exp", "Softmax", "Softplus", "Tanh", "Erf", "HardSigmoid", "HardSwish"),
        *("Gelu", "Elu", "Selu", "Celu", "Clip"),
    }
)
"""Operators that never return −∞, nor numbers of which a few add up to it; Clip only with a lower bound."""
_LOWEST_BOUND = -1e30
_SELECTING = frozenset({"MaxPool", "Reshape", "Transpose", "Concat", "Identity", "Slice", "Squeeze", "Unsqueeze"})
"""Operators whose outputs consist of elements of their inputs."""
_DEPTH = 8


def keep_infinities(model: ir.Model, operators: Collection[str], *, pool_skips_nan: bool = False) -> None:
    """Correct, in place, the results of these operators: MaxPool, ReduceMax, ReduceMin.

    `pool_skips_nan` is whether MaxPool loses NaN as well.
    """
    g = Builder(model.graph.opset_imports[""], tag=unused_tag(model.graph))
    for graph in graphs_of(model.graph):
        for node in list(graph):
            if node.op_type in operators and _is_lossy(node):
                if _can_lose_infinity(node):
                    _replace_results(graph, node, g, _CORRECTIONS[node.op_type](g, node))
                elif node.op_type == "MaxPool" and pool_skips_nan:
                    correct = _with_nan_of_averages if _has_averages(node) else _corrected_pool
                    _replace_results(graph, node, g, correct(g, node))
    for constant in g.initializers.values():
        model.graph.register_initializer(constant)


def _is_lossy(node: ir.Node) -> bool:
    """Whether a kernel of ONNX Runtime loses numbers of the dtype; our own over images do not, and codes are finite."""
    if node.domain == IMAGES or is_dequantized(node.inputs[0]):
        return False
    return node.outputs[0].dtype in (_POOLED if node.op_type == "MaxPool" else _REDUCED)


def _can_lose_infinity(node: ir.Node) -> bool:
    source = node.inputs[0]
    return source is not None and (node.op_type == "ReduceMin" or not _is_bounded(source, _DEPTH))


def _is_bounded(x: ir.Value, depth: int) -> bool:
    """Whether the elements of a value are known to be NaN or above −∞."""
    node = x.producer()
    if node is None or node.domain or not depth:
        return False
    if node.op_type == "Clip":
        least = node.inputs[1].const_value if len(node.inputs) > 1 and node.inputs[1] is not None else None
        return least is not None and bool(least.numpy() >= _LOWEST_BOUND)
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
    """Pool a rank of each element too: positive for NaN, −2 for −∞, 0 for numbers that MaxPool does not lose.

    Where the indices are read, the rank of NaN rises with its place, for torch returns the last NaN of a window, and
    the lowest finite number has the rank −1: MaxPool returns it as a maximum, but not its index.
    """
    x, y = node.inputs[0], node.outputs[0]
    assert x is not None
    assert y.dtype is not None
    number = dtypes.to_torch(y.dtype)
    infinity, nan = (g.scalar(float(name), number) for name in ("-inf", "nan"))
    reads_indices = _reads_indices(node)
    dtype = _rank_dtype(x) if reads_indices else torch.float32
    zero, minus_one, two = (g.scalar(rank, dtype) for rank in (0, -1, 2))
    found = g.cast(g.Greater(x, infinity), dtype)
    lowest = g.scalar(torch.finfo(number).min, number)
    above = g.Add(found, g.cast(g.Greater(x, lowest), dtype)) if reads_indices else g.Mul(found, two)
    rank = g.Where(g.IsNaN(x), g.cast(_places(g, x), dtype) if reads_indices else two, g.Sub(above, two))
    highest, *index = _pooled_again(g, node, rank)
    corrected = g.Where(g.Less(highest, minus_one), infinity, g.Where(g.Greater(highest, zero), nan, y))
    return [corrected, *(g.Where(g.Equal(highest, zero), node.outputs[1], i) for i in index)]


def _has_averages(node: ir.Node) -> bool:
    """Whether AveragePool has these windows, in this dtype, and nothing reads the indices of the maxima."""
    others = ("dilations", "ceil_mode", "storage_order")
    attributes = {name: node.attributes[name].value for name in others if name in node.attributes}
    plain = all(set(value) == {1} if name == "dilations" else not value for name, value in attributes.items())
    return plain and node.outputs[0].dtype == ir.DataType.FLOAT and not _reads_indices(node)


def _with_nan_of_averages(g: Builder, node: ir.Node) -> list[ir.Value]:
    x, y = node.inputs[0], node.outputs[0]
    attributes = {name: value.value for name, value in node.attributes.items() if name in _WINDOW}
    average = g.node("AveragePool", [x], domain=node.domain, **attributes)
    _sized(average, y.meta.get("dims"))
    return [g.Where(g.IsNaN(average), g.scalar(float("nan"), torch.float32), y)]


_WINDOW = frozenset({"kernel_shape", "strides", "pads", "auto_pad"})


def _reads_indices(node: ir.Node) -> bool:
    return len(node.outputs) > 1 and (bool(node.outputs[1].uses()) or node.outputs[1].is_graph_output())


def _rank_dtype(x: ir.Value) -> torch.dtype:
    """Return a dtype of MaxPool that represents every place in a plane."""
    plane = _static_plane(x)
    return torch.float32 if plane is not None and math.prod(plane) < 2**24 else torch.float64


def _static_plane(x: ir.Value) -> list[int] | None:
    sizes = [] if x.shape is None else list(x.shape)[2:]
    static = [size for size in sizes if isinstance(size, int)]
    return static if sizes and len(static) == len(sizes) else None


def _places(g: Builder, x: ir.Value) -> ir.Value:
    """Return the place of each element in its plane, from 1 on."""
    plane = _static_plane(x)
    if plane is not None:
        count, shape = g.scalar(math.prod(plane), torch.int64), g.ints([1, 1, *plane])
    else:
        sizes = g.Shape(x, start=2)
        count, shape = g.ReduceProd(sizes, keepdims=0), g.Concat(g.ints([1, 1]), sizes, axis=0)
    one = g.scalar(1, torch.int64)
    dims: Dims | None = x.meta.get("dims")
    return _sized(g.Reshape(g.Range(one, g.Add(count, one), one), shape), dims and (1, 1, *dims[2:]))


def _pooled_again(g: Builder, pool: ir.Node, x: ir.Value) -> Sequence[ir.Value]:
    """Return the maxima of another value in the windows of a pooling, with their indices if those are read."""
    attributes = {name: attribute.value for name, attribute in pool.attributes.items()}
    results = g.several("MaxPool", 1 + _reads_indices(pool), [x], domain=pool.domain, **attributes)
    for result, like, dtype in zip(results, pool.outputs, (x.dtype, ir.DataType.INT64), strict=False):
        assert dtype is not None
        result.type = ir.TensorType(dtype)
        _sized(result, like.meta.get("dims"))
    return results


def _sized(value: ir.Value, dims: Dims | None) -> ir.Value:
    """Set the sizes of a new value as far as they are known: without them it is in no native kernel."""
    if dims is not None:
        set_dims(value, dims)
    return value


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
    _sized(found, y.meta.get("dims"))
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
