"""Casts to integers: those of floats to uint8 on CUDA, and pairs that ONNX Runtime wrongly fuses.

It fuses Cast(Cast(x, int64), int32) of a float into Cast(x, int32), which saturates instead of taking the low bits, and
Cast(Cast(x, float), int8) of an int64 or double into a cast that does not round to single precision.
"""

from __future__ import annotations

import onnx_ir as ir

_T = ir.DataType
_FLOATS = frozenset({_T.FLOAT, _T.FLOAT16, _T.BFLOAT16})
_NARROW = frozenset({_T.INT32, _T.INT16, _T.INT8, _T.UINT8})
_LOSES = {
    _T.DOUBLE: (_T.INT64, _T.FLOAT, _T.FLOAT16, _T.BFLOAT16),
    _T.FLOAT: (_T.INT64, _T.FLOAT16, _T.BFLOAT16),
    _T.FLOAT16: (_T.INT64, _T.BFLOAT16),
    _T.BFLOAT16: (_T.INT64, _T.FLOAT16),
    _T.INT64: (_T.DOUBLE, _T.FLOAT, _T.FLOAT16, _T.BFLOAT16),
    _T.INT32: (_T.FLOAT, _T.FLOAT16, _T.BFLOAT16),
    _T.INT16: (_T.FLOAT16, _T.BFLOAT16),
}
"""Source dtypes of the first cast, and the dtypes that cannot represent all of their values.

Infinity and NaN are no integers."""


def cast_through_int64(graph: ir.Graph) -> None:
    """Cast floats to int64 before uint8, in place: the CUDA provider's cast returns 0 for negative numbers."""
    for node in list(graph):
        source = node.inputs[0] if _is_cast(node) else None
        if source is not None and source.dtype in _FLOATS and node.outputs[0].dtype == _T.UINT8:
            to = [ir.AttrInt64("to", int(_T.INT64))]
            wide = _insert(graph, node, ir.Node("", "Cast", [source], to, num_outputs=1), _T.INT64)
            node.replace_input_with(0, wide)


def separate_casts(graph: ir.Graph) -> None:
    """Insert, in place, a Max of one operand, which is a copy, between casts that must not be fused."""
    for node in list(graph):
        if _is_cast(node) and _is_lossy_chain(node):
            between = node.inputs[0]
            assert between is not None
            if between.dtype == _T.BFLOAT16:  # Max does not support bfloat16
                to = [ir.AttrInt64("to", int(_T.FLOAT))]
                between = _insert(graph, node, ir.Node("", "Cast", [between], to, num_outputs=1), _T.FLOAT)
            assert between.dtype is not None
            copy = ir.Node("", "Max", [between], num_outputs=1)
            node.replace_input_with(0, _insert(graph, node, copy, between.dtype))


def _insert(graph: ir.Graph, before: ir.Node, node: ir.Node, dtype: ir.DataType) -> ir.Value:
    """Insert a node and return its output, with the shape of its operand."""
    source, value = node.inputs[0], node.outputs[0]
    assert source is not None
    value.name, value.type = f"{before.outputs[0].name}_{node.op_type.lower()}_between", ir.TensorType(dtype)
    value.shape, value.meta["dims"] = source.shape, source.meta.get("dims")
    node.meta["fx"] = before.meta.get("fx")
    graph.insert_before(before, node)
    return value


def _is_cast(node: ir.Node | None) -> bool:
    return node is not None and node.op_type == "Cast" and not node.domain


def _is_lossy_chain(node: ir.Node) -> bool:
    (between,) = node.inputs
    inner = None if between is None else between.producer()
    if between is None or inner is None or not _is_cast(inner) or node.outputs[0].dtype not in _NARROW:
        return False
    source = inner.inputs[0]
    return source is not None and source.dtype is not None and between.dtype in _LOSES.get(source.dtype, ())
