"""Normalisations written out, put back into one operator."""

from __future__ import annotations

import onnx_ir as ir

from sardonyx.optimize.pattern import P, array_of, scalar_of
from sardonyx.optimize.rule import Match, rule

_MEAN_SQUARE = P.ReduceMean(P.Mul("x", "x", _shared=True), "axes", _name="mean", _shared=True)
_INVERSE = P.Reciprocal(P.Sqrt(P.Add(_MEAN_SQUARE, "eps", _shared=True), _shared=True), _shared=True)


@rule(P.Mul("weight", P.Cast(P.Mul(P.Cast("narrow", _name="x", _shared=True), _INVERSE))))
def rms_norm_in_float(m: Match) -> ir.Value:
    """w · half(float(x) / √(mean(float(x)²) + ε)) = RMSNormalization(x, w; ε), which computes in float by itself."""
    m.require(m.narrow.dtype == m.result.dtype == ir.DataType.FLOAT16, "not from half through float to half")
    m.require(m.x.dtype == ir.DataType.FLOAT, "not through float")
    _check(m)
    return m.g.RMSNormalization(m.narrow, m.weight, axis=-1, epsilon=scalar_of(m.eps))


@rule(P.Mul("weight", P.Mul("x", _INVERSE)))
def rms_norm(m: Match) -> ir.Value:
    """w · x / √(mean(x²) + ε) = RMSNormalization(x, w; ε)."""
    m.require(m.x.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE), "no such kernel")
    _check(m)
    return m.g.RMSNormalization(m.x, m.weight, axis=-1, epsilon=scalar_of(m.eps))


def _check(m: Match) -> None:
    m.require(m.g.opset >= 23, "RMSNormalization came with opset 23")
    eps, axes = scalar_of(m.eps), array_of(m.axes)
    rank = len(m.dims(m.x))
    m.require(eps is not None, "ε is no constant")
    m.require(axes is not None and axes.size == 1 and axes.reshape(-1)[0] % rank == rank - 1, "not the last axis")
    m.require(m.attribute(m.mean, "keepdims", 1) == 1, "the mean drops its axis")
    m.require(m.dims(m.weight) == m.dims(m.x)[-1:], "the weight is no row")
