"""Patterns of backward graphs: scaling, gradients of slices, sums over a softmax."""

from __future__ import annotations

import math

import onnx_ir as ir

from sardonyx.optimize.pattern import P, array_of, permutation_of, scalar_of
from sardonyx.optimize.rule import Match, rule, rule_at
from sardonyx.sizes import Dims

_FLOATS = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16)


@rule(P.Mul(P.Expand("x", "shape", _name="wide"), "factor"))
def scale_before_expand(m: Match) -> ir.Value:
    """c · Expand(x) = Expand(c · x), which has fewer elements."""
    m.require(m.x.dtype in _FLOATS and scalar_of(m.factor) is not None, "not a constant number")
    m.require(m.dims(m.wide) == m.dims(m.result) != m.dims(m.x), "it broadcasts")
    scaled = m.g.Mul(m.x, m.factor)
    m.require(m.dims(scaled) == m.dims(m.x), "it broadcasts")
    return m.g.shaped(m.g.Expand(scaled, m.shape), m.dims(m.result))


@rule(P.Mul("few", P.Mul("many", "factor", _name="scaled")))
def scale_smaller_operand(m: Match) -> ir.Value:
    """a · (c · b) = (c · a) · b, where a broadcasts and has fewer elements than b."""
    m.require(m.many.dtype in _FLOATS and scalar_of(m.factor) is not None, "not a constant number")
    m.require(scalar_of(m.few) is None and m.dims(m.many) == m.dims(m.scaled) == m.dims(m.result), "it broadcasts")
    m.require(_broadcasts(m.dims(m.few), m.dims(m.many)), "not fewer elements")
    return m.g.Mul(m.g.Mul(m.few, m.factor), m.many)


def _broadcasts(few: Dims, many: Dims) -> bool:
    return len(few) < len(many) or any(a == 1 and b != 1 for a, b in zip(few, many, strict=False))


@rule(P.Add(P.Pad("a", "amounts_a", _name="first"), P.Pad("b", "amounts_b", _name="second")))
def padded_parts_as_concat(m: Match) -> ir.Value:
    """Pad(a) + Pad(b) = Concat(a, b), if each is zero where the other is not: gradients of two slices."""
    behind, before = array_of(m.amounts_a), array_of(m.amounts_b)
    m.require(behind is not None and before is not None, "the amounts are not constant")
    for pad in (m.first, m.second):
        m.require(m.attribute(pad, "mode", "constant") == "constant", "not padded with zeros")
    a, b = m.dims(m.a), m.dims(m.b)
    rank = len(a)
    m.require(behind.nonzero()[0].size == before.nonzero()[0].size == 1, "not along one axis")
    axis = int(before.argmax())
    m.require(axis < rank and int(behind.argmax()) == axis + rank, "the second does not follow the first")
    m.require(behind[axis + rank] == b[axis] and before[axis] == a[axis], "they are not adjacent")
    return m.g.shaped(m.g.Concat(m.a, m.b, axis=axis), m.dims(m.result))


_PICKED = P.Mul(P.ScatterElements("zeros", "index", "ones", _name="marked"), "weight", _name="picked", _shared=True)


@rule(P.Sub(_PICKED, P.Mul(P.Exp("logarithms", _name="p"), P.ReduceSum("picked", "axes", _name="sum"))))
def cross_entropy_gradient(m: Match) -> ir.Value:
    """With −w at the class of each row: grad − p · sum(grad) = p · w, minus w at the class."""
    axes = array_of(m.axes)
    m.require(axes is not None and axes.size == 1 and _is_filled(m.ones, -1), "not one class of each row")
    m.require(_is_filled(m.zeros, 0) and m.attribute(m.marked, "reduction", "none") == "none", "not zero elsewhere")
    dims, rank = m.dims(m.result), len(m.dims(m.result))
    axis = axes.item() % rank
    row = tuple(1 if i == axis else dim for i, dim in enumerate(dims))
    m.require(m.dims(m.index) == row and m.dims(m.weight) == row, "not one weight for each row")
    m.require(m.attribute(m.marked, "axis", 0) % rank == axis and m.attribute(m.sum, "keepdims", 1) == 1, "other axes")
    m.require(m.dims(m.p) == dims and m.p.dtype == ir.DataType.FLOAT, "no kernel for the dtype")
    spread = m.g.Mul(m.p, m.weight)
    return m.g.shaped(m.g.ScatterElements(spread, m.index, m.g.Neg(m.weight), axis=axis, reduction="add"), dims)


def _is_filled(value: ir.Value, number: float) -> bool:
    """Whether every element is known to be this number."""
    producer = value.producer()
    array = array_of(producer.inputs[0] if producer is not None and producer.op_type == "Expand" else value)
    return array is not None and bool((array == number).all())


@rule_at("Reshape")
def join_stacks_before_transpose(m: Match) -> ir.Value:
    """Reshape(xᵀ) = Reshape(x)ᵀ, if only batch axes are joined: the product then takes the transpose."""
    transposed = m.node.inputs[0]
    transpose = transposed.producer() if transposed is not None else None
    order = permutation_of(transpose)
    rank = len(order)
    m.require(rank > 2 and order == [*range(rank - 2), rank - 1, rank - 2], "not transposed matrices")
    assert transpose is not None
    assert transpose.inputs[0] is not None
    readers = [use.node.op_type for use in m.result.uses()]
    m.require(all(reader in ("MatMul", "FusedMatMul") for reader in readers) and bool(readers), "no product reads it")
    dims = m.dims(m.result)
    m.require(len(dims) == 3 and dims[1:] == m.dims(transpose.outputs[0])[-2:], "not a join of leading axes")
    stacked = m.g.reshape(transpose.inputs[0], (dims[0], dims[2], dims[1]))
    return m.g.shaped(m.g.Transpose(stacked, perm=[0, 2, 1]), dims)


_EMPTY = P.Equal(P.ReduceMax("scores", "axes"), "lowest")


@rule(P.Where(_EMPTY, "zero", P.Softmax("scores", _name="p")))
def softmax_of_product(m: Match) -> ir.Value:
    """Rows that are −∞ throughout have a softmax of zero; a matrix product without a mask has no such rows."""
    lowest, zero = scalar_of(m.lowest), scalar_of(m.zero)
    m.require(lowest == -math.inf and zero == 0, "not the special case of rows of −∞")
    source = m.scores.producer()
    while source is not None and source.op_type in ("Reshape", "Transpose"):
        source = source.inputs[0].producer() if source.inputs[0] is not None else None
    m.require(source is not None and source.op_type in ("MatMul", "FusedMatMul", "Gemm"), "the rows may be masked")
    return m.p
