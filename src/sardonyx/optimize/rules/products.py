"""Fold transposes, scales and biases of matrix products into Gemm and FusedMatMul."""

from __future__ import annotations

import math

import onnx_ir as ir

from sardonyx.optimize.pattern import P, permutation_of, scalar_of
from sardonyx.optimize.rule import Match, rule
from sardonyx.translate.builder import MICROSOFT


def _swaps_last_two(transposed: ir.Value) -> bool:
    order = permutation_of(transposed.producer())
    rank = len(order)
    return rank >= 2 and order == [*range(rank - 2), rank - 1, rank - 2]


def _gemm(m: Match, a: ir.Value, b: ir.Value, c: ir.Value | None, **flips: int) -> ir.Value:
    """Return the matched Gemm with other operands, and `transA` or `transB` flipped."""
    attributes = {name: attribute.value for name, attribute in m.node.attributes.items()}
    for name, flip in flips.items():
        attributes[name] = attributes.get(name, 0) ^ flip
    return m.g.shaped(m.g.Gemm(a, b, c, **attributes), m.dims(m.result))


@rule(P.Gemm("a", P.Transpose("b", _shared=True, _name="transposed"), "c"))
def gemm_takes_transposed_right(m: Match) -> ir.Value:
    """Gemm(a, bᵀ, c) = Gemm(a, b, c; transB)."""
    m.require(_swaps_last_two(m.transposed), "not a matrix transpose")
    return _gemm(m, m.a, m.b, m.c, transB=1)


@rule(P.Gemm(P.Transpose("a", _shared=True, _name="transposed"), "b", "c"))
def gemm_takes_transposed_left(m: Match) -> ir.Value:
    """Gemm(aᵀ, b, c) = Gemm(a, b, c; transA)."""
    m.require(_swaps_last_two(m.transposed), "not a matrix transpose")
    return _gemm(m, m.a, m.b, m.c, transA=1)


def _is_float(value: ir.Value) -> bool:
    return value.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


@rule(P.MatMul("a", P.Transpose("b", _shared=True, _name="transposed")))
def matrices_to_gemm(m: Match) -> ir.Value:
    """MatMul(a, bᵀ) = Gemm(a, b; transB) for matrices."""
    m.require(len(m.dims(m.a)) == 2 and len(m.dims(m.b)) == 2, "not two matrices")
    m.require(_swaps_last_two(m.transposed), "not a matrix transpose")
    m.require(_is_float(m.a), "Gemm needs floating point")
    return m.g.shaped(m.g.Gemm(m.a, m.b, transB=1), m.dims(m.result))


@rule(P.Add(P.MatMul("a", "b", _name="product"), "c"))
def bias_into_gemm(m: Match) -> ir.Value:
    """MatMul(a, b) + c = Gemm(a, b, c) for matrices, and a row or a matrix c, as in sums of gradients."""
    m.require(len(m.dims(m.a)) == 2 and len(m.dims(m.b)) == 2 and _is_float(m.a), "not two matrices")
    m.require(m.dims(m.product) == m.dims(m.result), "it broadcasts")
    m.require(len(m.dims(m.c)) <= 1 or m.dims(m.c) == m.dims(m.result), "the addend is neither a row nor a matrix")
    return m.g.shaped(m.g.Gemm(m.a, m.b, m.c), m.dims(m.result))


@rule(P.Add(P.Gemm("a", "b", _name="product"), "c"))
def bias_into_plain_gemm(m: Match) -> ir.Value:
    """Gemm(a, b) + c = Gemm(a, b, c) for a row c."""
    m.require(m.dims(m.c) == m.dims(m.product)[-1:], "the addend is not a row")
    flags = {name: m.attribute(m.product, name) for name in ("alpha", "transA", "transB")}
    return m.g.shaped(m.g.Gemm(m.a, m.b, m.c, **flags), m.dims(m.result))


@rule(P.Gemm(P.Reshape("x", "shape", _shared=True, _name="rows"), "b", _name="product"), needs=MICROSOFT)
def sink_reshape_through_product(m: Match) -> ir.Value:
    """Gemm(Reshape(x), b) = Reshape(FusedMatMul(x, b)), if the Reshape only joins leading axes.

    Without a bias the operand need not be a matrix, and the Reshape can merge with the one that reverses it.
    """
    dims, width = m.dims(m.x), m.dims(m.result)[-1]
    m.require(len(dims) > 2 and dims[-1] == m.dims(m.rows)[-1], "not a matrix of rows")
    m.require(0 not in dims, "empty: FusedMatMul would not write its result")
    m.require(m.x.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE), "FusedMatMul has no kernel for the dtype")
    m.require(not m.attribute(m.product, "transA", 0), "the operand is transposed")
    flags = {name: m.attribute(m.product, name) for name in ("alpha", "transB")}
    product = m.g.FusedMatMul(m.x, m.b, domain=MICROSOFT, **flags)
    return m.g.reshape(m.g.shaped(product, [*dims[:-1], width]), m.dims(m.result))


def _fused(m: Match, a: ir.Value, b: ir.Value, **attributes: int | float) -> ir.Value:
    m.require(0 not in m.dims(a), "empty: FusedMatMul would not write its result")
    return m.g.shaped(m.g.FusedMatMul(a, b, domain=MICROSOFT, **attributes), m.dims(m.result))


@rule(P.MatMul("a", P.Transpose("b", _shared=True, _name="transposed")), needs=MICROSOFT)
def matmul_takes_transposed_right(m: Match) -> ir.Value:
    """MatMul(a, bᵀ) = FusedMatMul(a, b; transB)."""
    m.require(len(m.dims(m.a)) > 1, "FusedMatMul is wrong for a vector")
    m.require(_swaps_last_two(m.transposed), "not a matrix transpose")
    m.require(m.a.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE), "FusedMatMul has no kernel for the dtype")
    return _fused(m, m.a, m.b, transB=1)


@rule(P.MatMul(P.Transpose("a", _shared=True, _name="transposed"), "b"), needs=MICROSOFT)
def matmul_takes_transposed_left(m: Match) -> ir.Value:
    """MatMul(aᵀ, b) = FusedMatMul(a, b; transA)."""
    m.require(len(m.dims(m.b)) > 1, "FusedMatMul is wrong for a vector")
    m.require(_swaps_last_two(m.transposed), "not a matrix transpose")
    m.require(m.a.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE), "FusedMatMul has no kernel for the dtype")
    return _fused(m, m.a, m.b, transA=1)


def _scale(m: Match, factor: ir.Value, *, divides: bool = False) -> float:
    """Return the number that a factor or divisor multiplies by; refuse 0 and ∞, for which the result is undefined."""
    number = scalar_of(factor)
    m.require(number is not None and math.isfinite(number) and number != 0, "not a constant, finite, nonzero number")
    assert number is not None
    return 1 / number if divides else number


@rule(
    P.Mul(P.FusedMatMul("a", "b", _domain=MICROSOFT, _name="product"), "factor"),
    P.Div(P.FusedMatMul("a", "b", _domain=MICROSOFT, _name="product"), "factor"),
    P.Mul(P.MatMul("a", "b", _name="product"), "factor"),
    P.Div(P.MatMul("a", "b", _name="product"), "factor"),
    needs=MICROSOFT,
)
def scale_into_matmul(m: Match) -> ir.Value:
    """c · MatMul(a, b) = FusedMatMul(a, b; alpha=c)."""
    m.require(m.a.dtype == ir.DataType.FLOAT, "FusedMatMul has no kernel for the dtype")
    m.require(min(len(m.dims(m.a)), len(m.dims(m.b))) > 1, "FusedMatMul is wrong for a vector")
    m.require(m.dims(m.product) == m.dims(m.result), "it broadcasts")
    alpha = _scale(m, m.factor, divides=m.node.op_type == "Div") * m.attribute(m.product, "alpha", 1.0)
    return _fused(m, m.a, m.b, alpha=alpha, **_flags(m, m.product))


@rule(
    P.MatMul(P.Mul("a", "factor", _name="scaled", _shared=True), "b"),
    P.MatMul(P.Div("a", "factor", _name="scaled", _shared=True), "b"),
    P.MatMul("a", P.Mul("b", "factor", _name="scaled", _shared=True)),
    P.MatMul("a", P.Div("b", "factor", _name="scaled", _shared=True)),
    P.FusedMatMul(P.Mul("a", "factor", _name="scaled", _shared=True), "b", _domain=MICROSOFT),
    P.FusedMatMul(P.Div("a", "factor", _name="scaled", _shared=True), "b", _domain=MICROSOFT),
    P.FusedMatMul("a", P.Mul("b", "factor", _name="scaled", _shared=True), _domain=MICROSOFT),
    P.FusedMatMul("a", P.Div("b", "factor", _name="scaled", _shared=True), _domain=MICROSOFT),
    needs=MICROSOFT,
)
def scaled_operand_into_matmul(m: Match) -> ir.Value:
    """MatMul(c · a, b) = MatMul(a, c · b) = FusedMatMul(a, b; alpha=c)."""
    m.require(m.a.dtype == ir.DataType.FLOAT, "FusedMatMul has no kernel for the dtype")
    m.require(min(len(m.dims(m.a)), len(m.dims(m.b))) > 1, "FusedMatMul is wrong for a vector")
    operand = m.a if m.scaled is m.node.inputs[0] else m.b
    m.require(m.dims(operand) == m.dims(m.scaled), "it broadcasts")
    others = {use.node.op_type for use in m.scaled.uses()} - {"MatMul", "FusedMatMul", "Transpose", "Reshape"}
    m.require(not others and not m.scaled.is_graph_output(), "the scaled operand is needed anyway")
    scaling = m.scaled.producer()
    assert scaling is not None
    alpha = _scale(m, m.factor, divides=scaling.op_type == "Div") * m.attribute(m.result, "alpha", 1.0)
    return _fused(m, m.a, m.b, alpha=alpha, **_flags(m, m.result))


_FLAGS = ("transA", "transB", "transBatchA", "transBatchB")


def _flags(m: Match, product: ir.Value) -> dict[str, int]:
    """Return the transpose attributes of FusedMatMul."""
    return {name: m.attribute(product, name, 0) for name in _FLAGS}


@rule(
    P.Mul(P.Gemm("a", "b", _name="product"), "factor"),
    P.Div(P.Gemm("a", "b", _name="product"), "factor"),
    P.Mul(P.Gemm("a", "b", "c", _name="product"), "factor"),
    P.Div(P.Gemm("a", "b", "c", _name="product"), "factor"),
)
def scale_into_gemm(m: Match) -> ir.Value:
    """f · Gemm(a, b, c; α, β) = Gemm(a, b, c; f·α, f·β)."""
    m.require(m.a.dtype == ir.DataType.FLOAT, "α is a float")
    m.require(0 not in m.dims(m.a), "empty: ONNX Runtime's Gemm ignores β")
    m.require(m.dims(m.product) == m.dims(m.result), "it broadcasts")
    scale = _scale(m, m.factor, divides=m.node.op_type == "Div")
    gemm = m.product.producer()
    assert gemm is not None
    attributes = {name: attribute.value for name, attribute in gemm.attributes.items()}
    attributes["alpha"] = scale * attributes.get("alpha", 1.0)
    if len(gemm.inputs) > 2:
        attributes["beta"] = scale * attributes.get("beta", 1.0)
    return m.g.shaped(m.g.node("Gemm", gemm.inputs, **attributes), m.dims(m.result))


@rule(P.MatMul(P.Reshape("a", "s", _shared=True, _name="left"), P.Reshape("b", "t", _shared=True, _name="right")))
def sink_reshape_through_batched_product(m: Match) -> ir.Value:
    """MatMul(Reshape(a), Reshape(b)) = Reshape(MatMul(a, b)), if the Reshapes join the same leading axes."""
    a, b = m.dims(m.a), m.dims(m.b)
    m.require(len(a) == len(b) > 3 and a[:-2] == b[:-2], "not two batches of the same shape")
    for source, view in ((m.a, m.left), (m.b, m.right)):
        m.require(len(m.dims(view)) == 3 and m.dims(view)[1:] == m.dims(source)[-2:], "not a join of leading axes")
    product = m.g.shaped(m.g.MatMul(m.a, m.b), (*a[:-1], b[-1]))
    return m.g.reshape(product, m.dims(m.result))
