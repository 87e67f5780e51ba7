"""Remove casts and copies without effect."""

from __future__ import annotations

import onnx_ir as ir

from sardonyx.optimize.pattern import P
from sardonyx.optimize.rule import Match, rule


@rule(P.Identity("x"))
def drop_identity(m: Match) -> ir.Value:
    """Identity(x) = x, unless the graph needs it to return a value that it does not compute."""
    producer = m.x.producer()
    local = producer is not None and producer.graph is m.node.graph
    m.require(not m.result.is_graph_output() or local, "the graph returns it")
    m.require(not (m.result.is_graph_output() and m.x.is_graph_output()), "the graph returns both")
    return m.x


@rule(P.Cast("x"))
def drop_cast(m: Match) -> ir.Value:
    """Cast(x, dtype of x) = x."""
    m.require(m.x.dtype is not None and m.x.dtype == m.result.dtype, "the dtypes differ")
    return m.x


@rule(P.Cast(P.Cast("x", _shared=True, _name="inner")))
def join_casts(m: Match) -> ir.Value:
    """Cast(Cast(x, b), c) = Cast(x, c) where b represents every value of x's dtype."""
    source, middle, target = m.x.dtype, m.inner.dtype, m.result.dtype
    m.require(source is not None and middle in _EXACT_IN.get(source, ()), "the inner cast is lossy")
    assert target is not None
    return m.g.Cast(m.x, dtype=target)


_T = ir.DataType
_EXACT_IN: dict[ir.DataType, tuple[ir.DataType, ...]] = {
    _T.BOOL: (_T.INT32, _T.INT64, _T.FLOAT, _T.DOUBLE, _T.UINT8),
    _T.INT8: (_T.INT16, _T.INT32, _T.INT64, _T.FLOAT, _T.DOUBLE),
    _T.UINT8: (_T.INT32, _T.INT64, _T.FLOAT, _T.DOUBLE),
    _T.INT16: (_T.INT32, _T.INT64, _T.FLOAT, _T.DOUBLE),
    _T.INT32: (_T.INT64, _T.DOUBLE),
    _T.FLOAT16: (_T.FLOAT, _T.DOUBLE),
    _T.BFLOAT16: (_T.FLOAT, _T.DOUBLE),
    _T.FLOAT: (_T.DOUBLE,),
}
