"""Sines and cosines near their zeros: in double precision ONNX Runtime's kernels on the CPU subtract π/2 as one double.

Their error is absolute, about 5e-16: sin(π) is 0 instead of 1.2e-16, and a quotient or a comparison of the result would
be wrong. Where the result only scales or is added to something else, the kernel is precise enough.
"""

from __future__ import annotations

import math

import onnx_ir as ir
import torch

from sardonyx.optimize.small_sigmoids import is_scale
from sardonyx.optimize.subgraphs import graphs_of, replace_node, unused_tag
from sardonyx.translate.builder import Builder

_PI = (3.1415926534682512, 1.2154201012607932e-10, 4.044532497591901e-21)
"""π as a sum: the first two have 33 bits, so that a multiple of them is exact."""
_MULTIPLES_ARE_EXACT = 2.0**20
"""Up to here; further away, the kernels subtract π/2 in three parts themselves."""
_HAS_NO_ZERO = 1.0
"""Below this absolute value there is none but that of the sine at 0, where nothing is subtracted."""


def compose_sines(model: ir.Model) -> None:
    """Subtract, in place, multiples of π before a sine or cosine of doubles whose relative error matters."""
    g = Builder(model.graph.opset_imports[""], tag=unused_tag(model.graph))
    for graph in graphs_of(model.graph):
        for node in list(graph):
            if node.op_type in ("Sin", "Cos") and not node.domain and _is_affected(node.outputs[0]):
                replace_node(graph, node, g, _composed(g, node))
    for constant in g.initializers.values():
        model.graph.register_initializer(constant)


def _is_affected(y: ir.Value) -> bool:
    return y.dtype == ir.DataType.DOUBLE and not is_scale(y)


def _composed(g: Builder, node: ir.Node) -> ir.Value:
    x = node.inputs[0]
    assert x is not None
    distance = g.Abs(x)
    has_zero, is_exact = (
        g.Greater(distance, _number(g, _HAS_NO_ZERO)),
        g.Less(distance, _number(g, _MULTIPLES_ARE_EXACT)),
    )
    reduced = _reduced_cosine(g, x) if node.op_type == "Cos" else _reduced_sine(g, x)
    return g.Where(g.And(has_zero, is_exact), reduced, g.node(node.op_type, [x]))


def _reduced_sine(g: Builder, x: ir.Value) -> ir.Value:
    """sin x = (−1)^q · sin(x − q·π)."""
    count = g.Round(g.Mul(x, _number(g, 1 / math.pi)))
    return g.Mul(_sign(g, count), g.Sin(_minus_pi_times(g, x, count)))


def _reduced_cosine(g: Builder, x: ir.Value) -> ir.Value:
    """cos x = −(−1)^q · sin(x − (q + ½)·π)."""
    half = _number(g, 0.5)
    count = g.Round(g.Sub(g.Mul(x, _number(g, 1 / math.pi)), half))
    return g.Neg(g.Mul(_sign(g, count), g.Sin(_minus_pi_times(g, x, g.Add(count, half)))))


def _minus_pi_times(g: Builder, x: ir.Value, count: ir.Value) -> ir.Value:
    for part in _PI:
        x = g.Sub(x, g.Mul(count, _number(g, part)))
    return x


def _sign(g: Builder, count: ir.Value) -> ir.Value:
    """1 for even numbers and −1 for odd ones."""
    two = _number(g, 2.0)
    is_odd = g.Sub(count, g.Mul(two, g.Floor(g.Div(count, two))))
    return g.Sub(_number(g, 1.0), g.Mul(two, is_odd))


def _number(g: Builder, value: float) -> ir.Value:
    return g.scalar(value, torch.float64)
