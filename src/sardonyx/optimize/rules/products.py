"""Matrix products: transposes, scales and biases folded into Gemm and FusedMatMul."""

from __future__ import annotations

import onnx_ir as ir

from sardonyx.optimize.pattern import P, scalar_of
from sardonyx.optimize.rule import Match, rule
from sardonyx.translate.builder import MICROSOFT


def _swaps_last_two(perm: list[int]) -> bool:
    rank = len(perm)
    return rank >= 2 and list(perm) == [*range(rank - 2), rank - 1, rank - 2]


def _gemm(m: Match, a: ir.Value, b: ir.Value, c: ir.Value | None, **flips: int) -> ir.Value:
    """The matched Gemm with other operands, `transA` or `transB` flipped."""
    attributes = {name: attribute.value for name, attribute in m.node.attributes.items()}
    for name, flip in flips.items():
        attributes[name] = attributes.get(name, 0) ^ flip
    return m.g.shaped(m.g.Gemm(a, b, c, **attributes), m.dims(m.result))


@rule(P.Gemm("a", P.Transpose("b", _shared=True, _name="turned"), "c"))
def gemm_takes_transposed_right(m: Match) -> ir.Value:
    """Gemm(a, bᵀ, c) = Gemm(a, b, c; transB)."""
    m.require(_swaps_last_two(m.attribute(m.turned, "perm")), "not a matrix transpose")
    return _gemm(m, m.a, m.b, m.c, transB=1)


@rule(P.Gemm(P.Transpose("a", _shared=True, _name="turned"), "b", "c"))
def gemm_takes_transposed_left(m: Match) -> ir.Value:
    """Gemm(aᵀ, b, c) = Gemm(a, b, c; transA)."""
    m.require(_swaps_last_two(m.attribute(m.turned, "perm")), "not a matrix transpose")
    return _gemm(m, m.a, m.b, m.c, transA=1)


def _is_float(value: ir.Value) -> bool:
    return value.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


@rule(P.MatMul("a", P.Transpose("b", _shared=True, _name="turned")))
def matrices_to_gemm(m: Match) -> ir.Value:
    """MatMul(a, bᵀ) = Gemm(a, b; transB) for matrices."""
    m.require(len(m.dims(m.a)) == 2 and len(m.dims(m.b)) == 2, "not two matrices")
    m.require(_is_float(m.a), "Gemm is for floating point")
    return m.g.shaped(m.g.Gemm(m.a, m.b, transB=1), m.dims(m.result))


@rule(P.Add(P.MatMul("a", "b"), "c"))
def bias_into_gemm(m: Match) -> ir.Value:
    """MatMul(a, b) + c = Gemm(a, b, c) for matrices and a row c."""
    m.require(len(m.dims(m.a)) == 2 and len(m.dims(m.b)) == 2 and _is_float(m.a), "not two matrices")
    m.require(len(m.dims(m.c)) <= 1 and len(m.dims(m.result)) == 2, "the addend is no row")
    return m.g.shaped(m.g.Gemm(m.a, m.b, m.c), m.dims(m.result))


@rule(P.Add(P.Gemm("a", "b", _name="product"), "c"))
def bias_into_plain_gemm(m: Match) -> ir.Value:
    """Gemm(a, b) + c = Gemm(a, b, c) for a row c."""
    m.require(len(m.dims(m.c)) == 1 and m.dims(m.c)[0] == m.dims(m.result)[-1], "the addend is no row")
    flags = {name: m.attribute(m.product, name) for name in ("alpha", "transA", "transB")}
    return m.g.shaped(m.g.Gemm(m.a, m.b, m.c, **flags), m.dims(m.result))


@rule(P.Gemm(P.Reshape("x", "shape", _shared=True, _name="rows"), "b", _name="product"), needs=MICROSOFT)
def sink_reshape_through_product(m: Match) -> ir.Value:
    """Gemm(Reshape(x), b) = Reshape(FusedMatMul(x, b)), where the Reshape only joins leading axes.

    Without a bias nothing forces the operand to be a matrix, and the Reshape meets the one that undoes it.
    """
    dims, width = m.dims(m.x), m.dims(m.result)[-1]
    m.require(len(dims) > 2 and dims[-1] == m.dims(m.rows)[-1], "not a matrix of rows")
    m.require(m.x.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE), "FusedMatMul has no such kernel")
    m.require(not m.attribute(m.product, "transA", 0), "the operand is transposed")
    flags = {name: m.attribute(m.product, name) for name in ("alpha", "transB")}
    product = m.g.FusedMatMul(m.x, m.b, domain=MICROSOFT, **flags)
    return m.g.reshape(m.g.shaped(product, [*dims[:-1], width]), m.dims(m.result))


def _fused(m: Match, a: ir.Value, b: ir.Value, **attributes: int | float) -> ir.Value:
    return m.g.shaped(m.g.FusedMatMul(a, b, domain=MICROSOFT, **attributes), m.dims(m.result))


@rule(P.MatMul("a", P.Transpose("b", _shared=True, _name="turned")), needs=MICROSOFT)
def matmul_takes_transposed_right(m: Match) -> ir.Value:
    """MatMul(a, bᵀ) = FusedMatMul(a, b; transB)."""
    m.require(len(m.dims(m.a)) > 1, "a vector, which FusedMatMul gets wrong")
    m.require(_swaps_last_two(m.attribute(m.turned, "perm")), "not a matrix transpose")
    m.require(m.a.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE), "FusedMatMul has no such kernel")
    return _fused(m, m.a, m.b, transB=1)


@rule(P.MatMul(P.Transpose("a", _shared=True, _name="turned"), "b"), needs=MICROSOFT)
def matmul_takes_transposed_left(m: Match) -> ir.Value:
    """MatMul(aᵀ, b) = FusedMatMul(a, b; transA)."""
    m.require(len(m.dims(m.b)) > 1, "a vector, which FusedMatMul gets wrong")
    m.require(_swaps_last_two(m.attribute(m.turned, "perm")), "not a matrix transpose")
    m.require(m.a.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE), "FusedMatMul has no such kernel")
    return _fused(m, m.a, m.b, transA=1)


@rule(
    P.Mul(P.FusedMatMul("a", "b", _domain=MICROSOFT, _name="product"), "factor"),
    P.Mul(P.MatMul("a", "b", _name="product"), "factor"),
    needs=MICROSOFT,
)
def scale_into_matmul(m: Match) -> ir.Value:
    """c · MatMul(a, b) = FusedMatMul(a, b; alpha=c)."""
    factor = scalar_of(m.factor)
    m.require(factor is not None, "the factor is no constant number")
    assert factor is not None
    m.require(m.a.dtype == ir.DataType.FLOAT, "FusedMatMul has no such kernel")
    alpha = factor * m.attribute(m.product, "alpha", 1.0)
    flags = {name: m.attribute(m.product, name, 0) for name in ("transA", "transB")}
    return _fused(m, m.a, m.b, alpha=alpha, **flags)
