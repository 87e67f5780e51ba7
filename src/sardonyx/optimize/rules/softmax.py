"""Fuse decomposed softmax into one operator."""

from __future__ import annotations

import math

import onnx_ir as ir

from sardonyx.optimize.pattern import P, array_of, scalar_of
from sardonyx.optimize.rule import Match, rule

_LARGEST = P.ReduceMax("x", "axes", _name="largest", _shared=True)
_ANY_NAN = P.IsNaN(P.ReduceSumSquare("x", "axes", _name="broken", _shared=True), _shared=True)
_LARGEST_OR_NAN = P.Where(_ANY_NAN, "nan", _LARGEST, _shared=True)
_SHIFTED = [P.Sub("x", largest, _name="shifted", _shared=True) for largest in (_LARGEST, _LARGEST_OR_NAN)]


@rule(*(P.Div(P.Exp(d, _name="e", _shared=True), P.ReduceSum("e", "axes", _name="sum")) for d in _SHIFTED))
def softmax(m: Match) -> ir.Value:
    """exp(x − max x) / sum(exp(x − max x)) = Softmax(x)."""
    return _fuse_along_axis(m, "Softmax")


@rule(*(P.Sub(d, P.Log(P.ReduceSum(P.Exp("shifted"), "axes", _name="sum"))) for d in _SHIFTED))
def log_softmax(m: Match) -> ir.Value:
    """(x − max x) − log(sum(exp(x − max x))) = LogSoftmax(x)."""
    return _fuse_along_axis(m, "LogSoftmax")


def _fuse_along_axis(m: Match, op_type: str) -> ir.Value:
    axes, dims = array_of(m.axes), m.dims(m.x)
    m.require(axes is not None and axes.size == 1 and bool(dims), "not along one axis")
    m.require(m.x.dtype == ir.DataType.FLOAT, "ONNX Runtime's kernel does not propagate every NaN")
    for reduced in (m.largest, m.sum, getattr(m, "broken", m.largest)):
        m.require(m.attribute(reduced, "keepdims", 1) == 1, "a reduction drops its axis")
    nan = scalar_of(m.nan) if hasattr(m, "nan") else math.nan
    m.require(nan is not None and math.isnan(nan), "not NaN where the maximum is NaN")
    axis = axes.item() % len(dims)
    return m.g.shaped(m.g.node(op_type, [m.x], axis=axis if axis < len(dims) - 1 else -1), dims)
