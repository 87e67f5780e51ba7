"""Fuse decomposed activations into one operator."""

from __future__ import annotations

import onnx_ir as ir

from sardonyx import opsets
from sardonyx.optimize.pattern import P, scalar_of
from sardonyx.optimize.rule import Match, rule
from sardonyx.translate.builder import MICROSOFT


@rule(P.Mul("x", P.Sigmoid("x")), needs=MICROSOFT)
def silu(m: Match) -> ir.Value:
    """x · sigmoid(x) = QuickGelu(x; alpha=1), one pass over memory."""
    m.require(m.x.dtype == ir.DataType.FLOAT, "QuickGelu has no kernel for the dtype")
    return m.g.shaped(m.g.QuickGelu(m.x, domain=MICROSOFT, alpha=1.0), m.dims(m.result))


@rule(P.Mul("x", P.Sigmoid(P.Mul("x", "factor"))), needs=MICROSOFT)
def quick_gelu(m: Match) -> ir.Value:
    """x · sigmoid(c · x) = QuickGelu(x; alpha=c)."""
    factor = scalar_of(m.factor)
    m.require(factor is not None and m.x.dtype == ir.DataType.FLOAT, "the factor is not a constant number")
    m.require(m.dims(m.x) == m.dims(m.result), "it broadcasts")
    return m.g.shaped(m.g.QuickGelu(m.x, domain=MICROSOFT, alpha=factor), m.dims(m.result))


_CUBES = (P.Mul(P.Mul("x", "x"), "x"), P.Pow("x", 3.0))
_INNER = [P.Mul(P.Add("x", P.Mul(cube, 0.044715)), 0.7978845608) for cube in _CUBES]
_OPENED = [P.Add(P.Tanh(inner), 1.0) for inner in _INNER]


@rule(*(P.Mul(P.Mul("x", 0.5), opened) for opened in _OPENED))
@rule(*(P.Mul(P.Mul(opened, "x"), 0.5) for opened in _OPENED))
@rule(*(P.Mul(P.Mul(opened, 0.5), "x") for opened in _OPENED))
def tanh_gelu(m: Match) -> ir.Value:
    """x/2 · (1 + tanh(√(2/π) · (x + 0.044715·x³))) = Gelu(x; approximate=tanh)."""
    m.require(m.g.opset >= opsets.GELU, "Gelu needs opset 20")
    m.require(m.x.dtype != ir.DataType.DOUBLE, "Gelu has no double kernel, and its function body has float constants")
    m.require(m.dims(m.x) == m.dims(m.result), "it broadcasts")
    return m.g.Gelu(m.x, approximate="tanh")


_ERF = P.Add(P.Erf(P.Mul("x", 0.7071067811865476)), 1.0)


@rule(P.Mul(P.Mul("x", 0.5), _ERF), P.Mul(P.Mul("x", _ERF), 0.5), P.Mul(P.Mul(_ERF, 0.5), "x"))
@rule(P.Mul(P.Mul("x", 0.5), P.Add(P.Erf(P.Div("x", 1.4142135623730951)), 1.0)))
def erf_gelu(m: Match) -> ir.Value:
    """x/2 · (1 + erf(x/√2)) = Gelu(x)."""
    m.require(m.g.opset >= opsets.GELU, "Gelu needs opset 20")
    m.require(m.x.dtype != ir.DataType.DOUBLE, "Gelu has no double kernel, and its function body has float constants")
    m.require(m.dims(m.x) == m.dims(m.result), "it broadcasts")
    return m.g.Gelu(m.x)
