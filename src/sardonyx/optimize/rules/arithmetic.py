"""Arithmetic with neutral elements."""

from __future__ import annotations

import onnx_ir as ir

from sardonyx.optimize.pattern import P
from sardonyx.optimize.rule import Match, rule


@rule(P.Mul("x", 1.0), P.Div("x", 1.0))
def drop_factor_one(m: Match) -> ir.Value:
    """x · 1 = x / 1 = x, where the 1 does not broadcast x to more dimensions."""
    m.require(m.dims(m.x) == m.dims(m.result), "it broadcasts")
    return m.x


@rule(P.Add("x", 0.0), P.Sub("x", 0.0))
def drop_addend_zero(m: Match) -> ir.Value:
    """x + 0 = x − 0 = x, where the 0 does not broadcast x to more dimensions."""
    m.require(m.dims(m.x) == m.dims(m.result), "it broadcasts")
    return m.x
