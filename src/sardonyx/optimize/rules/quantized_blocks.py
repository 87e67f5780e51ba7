"""Products with weights of 4 bits in blocks, which ONNX Runtime would multiply by activations rounded to 8 bits."""

from __future__ import annotations

import onnx_ir as ir
import torch

from sardonyx.optimize.pattern import P, array_of
from sardonyx.optimize.rule import Match, rule
from sardonyx.translate.builder import MICROSOFT

_LEAST_BLOCK = 16


@rule(
    P.MatMul("x", P.DequantizeLinear(P.Cast("codes"), "scales", P.Cast("zero"), _name="weight")),
    P.MatMul("x", P.DequantizeLinear(P.Cast("codes"), "scales", "zero", _name="weight")),
    needs=MICROSOFT,
)
def product_with_blocks(m: Match) -> ir.Value:
    """x · DequantizeLinear(codes) = MatMulNBits(x, codes), in float32, of codes around 8."""
    node = m.weight.producer()
    assert node is not None
    assert node.inputs[0] is not None
    m.require(node.inputs[0].dtype == ir.DataType.UINT4 and m.x.dtype == ir.DataType.FLOAT, "other types")
    zero, block = array_of(m.zero), m.attribute(m.weight, "block_size", 0)
    m.require(zero is not None and bool((zero.astype(int) == 8).all()), "another zero point")
    m.require(block >= _LEAST_BLOCK and block & (block - 1) == 0, "no kernel for the block")
    depth, columns = m.dims(m.weight)
    m.require(m.attribute(m.weight, "axis", 1) == 0 and isinstance(depth, int) and depth % block == 0, "other blocks")
    assert isinstance(depth, int)
    scales = m.g.reshape(m.g.transpose(m.scales, [1, 0]), (columns, depth // block))
    operands = [m.x, _packed(m, m.codes, block), scales]
    sizes = {"K": depth, "N": columns, "bits": 4, "block_size": block, "accuracy_level": 0}
    product = m.g.node("MatMulNBits", operands, domain=MICROSOFT, dtype=ir.DataType.FLOAT, **sizes)
    return m.g.shaped(product, m.dims(m.result))


def _packed(m: Match, codes: ir.Value, block: int) -> ir.Value:
    """Return two codes of a column in each byte, the first in the lower bits."""
    depth, columns = m.dims(codes)
    pairs = m.g.reshape(m.g.transpose(codes, [1, 0]), (columns, depth // block, block // 2, 2))
    dims = m.dims(pairs)[:-1]
    first, second = (m.g.shaped(m.g.Gather(pairs, m.g.scalar(i, torch.int64), axis=3), dims) for i in (0, 1))
    upper = m.g.shaped(m.g.BitShift(second, m.g.scalar(4, torch.uint8), direction="LEFT"), dims)
    return m.g.shaped(m.g.BitwiseOr(first, upper), dims)
