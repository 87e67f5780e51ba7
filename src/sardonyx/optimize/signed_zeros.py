"""The sign of zeros, which decides whether `1 / x` is ∞ or −∞, where ONNX Runtime on the CPU loses it.

Its Where returns 0 for a −0 from its first choice, and keeps a −0 from its second. Its optimizer removes the addition
of zero, which turns −0 into 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from sardonyx.translate.inference import broadcast, set_dims

_T = ir.DataType
_FLOATS = (_T.FLOAT, _T.DOUBLE)
_NEVER_NEGATIVE = frozenset({"Exp", "Sigmoid", "Softmax", "Abs", "ReduceL2", "ReduceSumSquare"})
_SAME_FOR_BOTH_ZEROS = frozenset(
    {
        *("Softmax", "LogSoftmax", "Exp", "Sigmoid", "Cos", "MatMul", "Gemm", "FusedMatMul", "Conv", "ReduceSum"),
        *("ReduceMean", "ReduceSumSquare", "ReduceL1", "ReduceL2", "LayerNormalization", "RMSNormalization"),
        *("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "IsNaN", "IsInf", "Abs"),
    }
)


def keep_zero_signs(graph: ir.Graph) -> None:
    """Rewrite, in place, additions of zero, and each Where whose first choice may be a −0 whose sign matters."""
    for node in list(graph):
        if node.op_type == "Where" and not node.domain and _loses_signs(node):
            _rewrite_where(graph, node)
        elif node.op_type in ("Add", "Sub") and not node.domain:
            _rewrite_addition(graph, node)


def _rewrite_addition(graph: ir.Graph, node: ir.Node) -> None:
    """Rewrite x + 0 and x − (−0), which turn −0 into 0, with an operator that is not removed.

    The zero keeps its dimensions, which may be more than those of x.
    """
    dtype, negative = node.outputs[0].dtype, node.op_type == "Sub"
    zeros = [x for x in node.inputs[negative:] if x is not None and _is_zero(x, negative)]
    if dtype in _FLOATS and zeros:
        assert dtype is not None
        others = [x for x in node.inputs if x is not None and x is not zeros[0]]
        node.op_type = "Sum"
        _set_inputs(node, [*others, _constant(graph, node, 0, dtype, _rank(zeros[0]))])


def _is_zero(x: ir.Value, negative: bool) -> bool:
    producer = x.producer()
    if producer is not None and producer.op_type == "Cast" and producer.inputs[0] is not None:
        return _is_zero(producer.inputs[0], negative)
    if not isinstance(x.const_value, ir.Tensor) or x.const_value.size != 1:
        return False
    number = x.const_value.numpy()
    return bool((number == 0).all() and (np.signbit(number) == negative).all())


def _rank(x: ir.Value) -> int:
    """Return the dimensions of a constant, or of one that is cast."""
    producer = x.producer()
    if x.const_value is None and producer is not None and producer.inputs[0] is not None:
        return _rank(producer.inputs[0])
    assert x.const_value is not None
    return len(x.const_value.shape)


def _loses_signs(node: ir.Node) -> bool:
    result = node.outputs[0]
    if result.dtype not in _FLOATS or not _may_be_negative_zero(node.inputs[1]):
        return False
    return result.is_graph_output() or any(use.node.op_type not in _SAME_FOR_BOTH_ZEROS for use in result.uses())


def _may_be_negative_zero(x: ir.Value | None) -> bool:
    assert x is not None
    if isinstance(x.const_value, ir.Tensor):
        array = x.const_value.numpy()
        return bool(((array == 0) & np.signbit(array)).any())
    producer = x.producer()
    if producer is None or producer.op_type != "Cast":
        return producer is None or producer.op_type not in _NEVER_NEGATIVE
    source = producer.inputs[0]
    return source is None or source.dtype is None or source.dtype.is_floating_point()


def _rewrite_where(graph: ir.Graph, node: ir.Node) -> None:
    """Where(c, x, y) = Where(¬c, y, x), and if y may be −0 too, Where(¬c, 1, x) · Where(c, 1, y).

    The condition is negated by Xor: ONNX Runtime removes a Not before a Where, and swaps the choices back.
    """
    condition, x, y = node.inputs
    result = node.outputs[0]
    assert condition is not None
    assert x is not None
    assert y is not None
    assert result.dtype is not None
    negated = _insert(graph, node, "Xor", [condition, _constant(graph, node, True, _T.BOOL)], condition)
    if not _may_be_negative_zero(y):
        _set_inputs(node, [negated, y, x])
        return
    one = _constant(graph, node, 1, result.dtype)
    factors = [_insert(graph, node, "Where", [c, one, v], v) for c, v in ((negated, x), (condition, y))]
    node.op_type = "Mul"
    _set_inputs(node, factors)


def _set_inputs(node: ir.Node, inputs: Sequence[ir.Value]) -> None:
    node.resize_inputs(len(inputs))
    for index, value in enumerate(inputs):
        node.replace_input_with(index, value)


def _insert(graph: ir.Graph, before: ir.Node, op_type: str, inputs: Sequence[ir.Value], like: ir.Value) -> ir.Value:
    """Insert a node with the type of `like` and return its output."""
    node = ir.Node("", op_type, inputs, num_outputs=1)
    output = node.outputs[0]
    output.name, output.type = f"{before.outputs[0].name}_{op_type.lower()}_{inputs[0].name}", like.type
    known = [x.meta["dims"] for x in inputs if x.meta.get("dims") is not None]
    dims = broadcast(*known) if len(known) == len(inputs) else None
    if dims is not None:
        set_dims(output, dims)
    node.meta["fx"] = before.meta.get("fx")
    graph.insert_before(before, node)
    return output


def _constant(graph: ir.Graph, node: ir.Node, number: float, dtype: ir.DataType, rank: int = 0) -> ir.Value:
    """Add a constant for one node, named by its output: names must be unique across subgraphs."""
    name = f"{node.outputs[0].name}_{dtype.name.lower()}_{int(number)}"
    tensor = ir.tensor(np.full((1,) * rank, number, dtype.numpy()), name=name)
    value = ir.Value(name=name, type=ir.TensorType(dtype), const_value=tensor)
    set_dims(value, (1,) * rank)
    graph.register_initializer(value)
    return value
