"""Arithmetic: neutral elements, and equivalent forms that are faster or that other rules match."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from sardonyx.optimize.pattern import P, array_of, scalar_of
from sardonyx.optimize.rule import Match, rule

_FLOATS = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


@rule(P.Mul("x", 1.0), P.Div("x", 1.0))
def drop_factor_one(m: Match) -> ir.Value:
    """x · 1 = x / 1 = x, where the 1 does not broadcast x to more dimensions."""
    m.require(m.dims(m.x) == m.dims(m.result), "it broadcasts")
    return m.x


@rule(P.Add("x", "zero"), P.Sub("x", "zero"))
def drop_addend_zero(m: Match) -> ir.Value:
    """x + 0 = x − 0 = x, where the 0 does not broadcast x to more dimensions.

    In floating point −0 + 0 = 0: only x + (−0) and x − 0 preserve every x.
    """
    zero = scalar_of(m.zero)
    m.require(zero == 0, "the addend is not zero")
    assert zero is not None
    negative = math.copysign(1.0, zero) < 0
    m.require(m.x.dtype not in _FLOATS or negative == (m.node.op_type == "Add"), "it turns −0 into 0")
    m.require(m.dims(m.x) == m.dims(m.result), "it broadcasts")
    return m.x


@rule(P.Neg(P.Neg("x", _shared=True)))
def drop_double_negation(m: Match) -> ir.Value:
    """−(−x) = x."""
    return m.x


@rule(P.Pow("x", 2.0))
def square_as_product(m: Match) -> ir.Value:
    """x² = x · x, in half the time, and in the form that the norm rules match."""
    m.require(m.x.dtype in _FLOATS, "not floating point")
    m.require(m.dims(m.x) == m.dims(m.result), "it broadcasts")
    return m.g.Mul(m.x, m.x)


@rule(P.Div(1.0, "x"))
def one_over_as_reciprocal(m: Match) -> ir.Value:
    """1 / x = Reciprocal(x), the form that the norm rules match."""
    m.require(m.x.dtype in _FLOATS, "not floating point")
    m.require(m.dims(m.x) == m.dims(m.result), "it broadcasts")
    return m.g.Reciprocal(m.x)


@rule(P.Div("x", "divisor"), late=True)
def divide_by_power_of_two(m: Match) -> ir.Value:
    """x / 2ⁿ = x · 2⁻ⁿ, which is exact, in half the time."""
    divisor, array = scalar_of(m.divisor), array_of(m.divisor)
    m.require(divisor is not None and m.x.dtype in _FLOATS, "the divisor is not a constant number")
    assert divisor is not None
    m.require(math.isfinite(divisor) and abs(math.frexp(divisor)[0]) == 0.5, "not a power of two")
    m.require(2.0**-14 <= abs(divisor) <= 2.0**14, "its inverse may be subnormal")
    return m.g.Mul(m.x, m.g.constant((1 / array).astype(array.dtype)))


@rule(P.Min(P.Max("x", "low"), "high"), P.Max(P.Min("x", "high"), "low"))
def clamp_as_clip(m: Match) -> ir.Value:
    """min(max(x, a), b) = Clip(x, a, b) for a ≤ b, in one pass; NaN stays NaN.

    With a bound of zero, both forms may return either zero for a zero.
    """
    low, high = scalar_of(m.low), scalar_of(m.high)
    m.require(low is not None and high is not None and low <= high, "no constant bounds with low ≤ high")
    m.require(m.x.dtype in _CLIPPED, "no kernel for the dtype")
    assert m.x.dtype is not None
    m.require(m.dims(m.x) == m.dims(m.result), "it broadcasts")
    bounds = [m.g.constant(np.array(bound, m.x.dtype.numpy())) for bound in (low, high)]
    return m.g.Clip(m.x, *bounds)


_CLIPPED = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.INT32, ir.DataType.INT64)
