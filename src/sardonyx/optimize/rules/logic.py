"""Simplify boolean masks and Where."""

from __future__ import annotations

import onnx_ir as ir

from sardonyx.optimize.pattern import P
from sardonyx.optimize.rule import Match, rule


@rule(P.Not(P.Not("x", _shared=True)))
def drop_double_not(m: Match) -> ir.Value:
    """¬¬x = x."""
    return m.x


@rule(P.Equal(P.Cast("mask", _shared=True), 0.0), P.Equal("mask", 0.0))
def not_instead_of_equal(m: Match) -> ir.Value:
    """(mask = 0) = ¬mask for booleans."""
    m.require(m.mask.dtype == ir.DataType.BOOL, "not a boolean")
    m.require(m.dims(m.mask) == m.dims(m.result), "it broadcasts")
    return m.g.Not(m.mask)


@rule(P.Where(P.Not("mask", _shared=True), "x", "y"))
def where_not(m: Match) -> ir.Value:
    """Where(¬mask, x, y) = Where(mask, y, x)."""
    return m.g.shaped(m.g.Where(m.mask, m.y, m.x), m.dims(m.result))


@rule(P.Where("mask", "x", "x"))
def drop_where(m: Match) -> ir.Value:
    """Where(mask, x, x) = x, where the mask does not broadcast x."""
    m.require(m.dims(m.x) == m.dims(m.result), "it broadcasts")
    return m.x
