"""Fuse decomposed normalizations into one operator: first the norm, then its weight and bias."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from sardonyx import opsets
from sardonyx.optimize.pattern import P, array_of, scalar_of
from sardonyx.optimize.rule import Match, rule


@rule(P.Div(P.ReduceSum("x", "axes", _name="sum"), "count"))
def sum_as_mean(m: Match) -> ir.Value:
    """sum(x) / n = mean(x) of n elements."""
    dims, axes = m.dims(m.x), array_of(m.axes)
    m.require(axes is not None and axes.size > 0, "the axes are not constant")
    m.require(m.x.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE), "no kernel for the dtype")
    sizes = [dims[axis] for axis in axes.tolist()]
    m.require(all(isinstance(size, int) and size > 0 for size in sizes), "empty, or of symbolic size")
    m.require(scalar_of(m.count) == math.prod(map(int, sizes)), "the divisor is not the number of elements")
    m.require(m.dims(m.sum) == m.dims(m.result), "it broadcasts")
    mean = m.g.ReduceMean(m.x, m.axes, keepdims=m.attribute(m.sum, "keepdims", 1))
    return m.g.shaped(mean, m.dims(m.result))


_MEAN_SQUARE = P.ReduceMean(P.Mul("x", "x", _shared=True), "axes", _name="square", _shared=True)
_ROOT = P.Sqrt(P.Add(_MEAN_SQUARE, "eps", _shared=True), _shared=True)


_CENTRED = P.Sub("input", P.ReduceMean("input", "axes", _name="mean", _shared=True), _name="x", _shared=True)


@rule(P.Mul(_CENTRED, P.Reciprocal(_ROOT, _shared=True)), P.Div(_CENTRED, _ROOT))
def layer_norm(m: Match) -> ir.Value:
    """(x − mean(x)) / √(mean((x − mean(x))²) + ε) = LayerNormalization(x, 1; ε)."""
    _check(m, m.square)
    _check(m, m.mean)
    return m.g.LayerNormalization(m.input, _ones(m), axis=-1, epsilon=scalar_of(m.eps))


@rule(P.Mul("x", P.Reciprocal(_ROOT, _shared=True)), P.Div("x", _ROOT))
def rms_norm(m: Match) -> ir.Value:
    """x / √(mean(x²) + ε) = RMSNormalization(x, 1; ε)."""
    m.require(m.g.opset >= opsets.ATTENTION, "RMSNormalization needs opset 23")
    _check(m, m.square)
    return m.g.RMSNormalization(m.x, _ones(m), axis=-1, epsilon=scalar_of(m.eps))


def _check(m: Match, mean: ir.Value) -> None:
    """Require that the mean is along the last axis with keepdims, and that ε is a number that changes no shape."""
    eps, axes, rank = scalar_of(m.eps), array_of(m.axes), len(m.dims(m.x))
    m.require(m.x.dtype == ir.DataType.FLOAT, "the operator computes in float, and ε is a float")
    m.require(eps is not None and eps >= 0, "ε is not a constant")
    m.require(axes is not None and axes.size == 1 and rank > 0, "not one axis")
    m.require(axes.item() % rank == rank - 1, "not the last axis")
    m.require(m.attribute(mean, "keepdims", 1) == 1, "the mean drops its axis")
    m.require(m.dims(m.x) == m.dims(m.result), "it broadcasts")


def _ones(m: Match) -> ir.Value:
    width = m.dims(m.x)[-1]
    m.require(isinstance(width, int) and width > 0, "the width is symbolic or zero")
    assert m.x.dtype is not None
    return m.g.constant(np.ones(int(width), m.x.dtype.numpy()))


@rule(
    P.Mul(P.RMSNormalization("x", "one", _name="norm"), "weight"),
    P.Mul(P.LayerNormalization("x", "one", _name="norm"), "weight"),
)
def norm_takes_weight(m: Match) -> ir.Value:
    """norm(x, 1) · w = norm(x, w) for a w of the normalized shape."""
    _check_row(m, m.weight)
    m.require(bool(np.all(array_of(m.one) == 1)), "it already has a weight")
    return _with_inputs(m, m.x, m.weight)


@rule(P.Add(P.LayerNormalization("x", "weight", _name="norm"), "bias"))
def norm_takes_bias(m: Match) -> ir.Value:
    """norm(x, w) + b = norm(x, w, b) for a b of the normalized shape."""
    _check_row(m, m.bias)
    return _with_inputs(m, m.x, m.weight, m.bias)


@rule(P.Mul(P.Cast(P.RMSNormalization(P.Cast("x", _name="wide", _shared=True), "one", _name="norm")), "weight"))
def rms_norm_in_float(m: Match) -> ir.Value:
    """w · half(norm(float(x), 1)) = norm(x, w), which computes in float by itself."""
    m.require(m.x.dtype == m.result.dtype == ir.DataType.FLOAT16, "not from half to half")
    m.require(m.wide.dtype == ir.DataType.FLOAT, "not through float")
    m.require(bool(np.all(array_of(m.one) == 1)), "it already has a weight")
    _check_row(m, m.weight)
    return _with_inputs(m, m.x, m.weight)


def _check_row(m: Match, row: ir.Value) -> None:
    axis = m.attribute(m.norm, "axis", -1)
    m.require(m.dims(row) == m.dims(m.norm)[axis:], "not of the normalized shape")


def _with_inputs(m: Match, *inputs: ir.Value) -> ir.Value:
    norm = m.norm.producer()
    assert norm is not None
    attributes = {name: attribute.value for name, attribute in norm.attributes.items()}
    return m.g.node(norm.op_type, inputs, **attributes)
