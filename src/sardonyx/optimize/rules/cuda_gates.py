"""Gated activations of a few rows on CUDA in float32, in models in half precision."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import onnx_ir as ir
import torch

from sardonyx.optimize.rule import Match, rule_at
from sardonyx.optimize.rules.cuda import CUDA_KERNELS, LEAST_ELEMENTS, NARROW

_MOST_ELEMENTS = 2**17
"""Up to which twice the bytes between kernels take no time: 8 rows of 16,384."""
_PRODUCTS = ("Gemm", "MatMul")
_ELEMENTWISE = ("Reshape", "Mul", "Sigmoid", "Gelu", "Relu", "Tanh")


@rule_at("Mul", needs=CUDA_KERNELS, last=True)
def gate_in_float32(m: Match) -> ir.Value:
    """activation(x·v) · (x·w) = Cast(activation(Cast(x·v)) · Cast(x·w)) for a few rows in half precision.

    The products return float32, which the native kernel of the rest computes in anyway, and rounds once.
    """
    m.require(m.result.dtype in NARROW, "not in half precision")
    sizes = [size for size in m.dims(m.result) if isinstance(size, int)]
    m.require(len(sizes) == len(m.dims(m.result)), "of symbolic size")
    m.require(LEAST_ELEMENTS <= math.prod(sizes) <= _MOST_ELEMENTS, "too small for a kernel, or many rows")
    gate = _Gate(m)
    m.require(gate.collect(m.result) and len(gate.products) == 2, "not computed from two products")
    m.require(gate.is_private(), "read in half precision, too")
    return m.g.cast(gate.in_float32(m.result), m.g.dtype(m.result))


@dataclass
class _Gate:
    """The elementwise nodes between two products and a value."""

    m: Match
    nodes: dict[ir.Node, None] = field(default_factory=dict)
    products: dict[ir.Value, None] = field(default_factory=dict)
    replaced: dict[ir.Value, ir.Value] = field(default_factory=dict)

    def collect(self, x: ir.Value | None) -> bool:
        """Collect what computes a value; return whether it is computed from products alone."""
        node = x.producer() if x is not None else None
        if x is None or node is None or node.domain or node.graph is not self.m.node.graph:
            return False
        if node.op_type in _PRODUCTS:
            self.products[x] = None
            return True
        if node.op_type not in _ELEMENTWISE:
            return False
        self.nodes[node] = None
        return all(self.collect(operand) for operand in _operands(node))

    def is_private(self) -> bool:
        """Whether only these nodes read the products and what is computed from them."""
        inner = [*self.products, *(node.outputs[0] for node in self.nodes if node is not self.m.node)]
        return all(not x.is_graph_output() and all(use.node in self.nodes for use in x.uses()) for x in inner)

    def in_float32(self, x: ir.Value) -> ir.Value:
        """Return a value computed in float32."""
        if x not in self.replaced:
            self.replaced[x] = self._computed(x)
        return self.replaced[x]

    def _computed(self, x: ir.Value) -> ir.Value:
        g, node = self.m.g, x.producer()
        assert node is not None
        if x in self.products:
            return g.cast(x, torch.float32)
        operands = [self.in_float32(operand) for operand in _operands(node)]
        if node.op_type == "Reshape":
            return g.reshape(operands[0], self.m.dims(x))
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        return g.shaped(g.node(node.op_type, operands, **attributes), self.m.dims(x))


def _operands(node: ir.Node) -> list[ir.Value]:
    """Return what an elementwise node computes with: not the shape of a Reshape."""
    operands = node.inputs[:1] if node.op_type == "Reshape" else node.inputs
    return [x for x in operands if x is not None]
