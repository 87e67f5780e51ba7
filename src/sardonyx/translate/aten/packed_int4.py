"""Products with weights of 4 bits in the layout of torch's kernel for CPUs."""

from __future__ import annotations

from functools import cache

import onnx_ir as ir
import torch

from sardonyx.errors import Unsupported
from sardonyx.translate.builder import Builder
from sardonyx.translate.table import aten

Value = ir.Value

_BLOCKS = (64, 32)
"""Rows that are packed together, with AVX-512 and with AVX2."""


@aten("_weight_int4pack_mm_for_cpu")
def weight_int4pack_mm_for_cpu(g: Builder, x: Value, packed: Value, group_size: int, parameters: Value) -> Value:
    """Multiply by rows of (code − 8) · scale + zero, in float32, where groups of a row have a scale and a zero each.

    The zeros are multiplied with the sums of groups of x.
    """
    depth, groups = _size(g, x, 1), _size(g, parameters, 0)
    rows, x = g.dims(x)[0], g.cast(x, torch.float32)
    codes = g.Cast(g.transpose(unpacked(g, packed, depth), [1, 0]), dtype=ir.DataType.UINT4)
    scales, zeros = (g.cast(_part(g, parameters, i), torch.float32) for i in (0, 1))
    eight = g.Cast(g.expand(g.scalar(8, torch.uint8), g.dims(scales)), dtype=ir.DataType.UINT4)
    weight = g.node("DequantizeLinear", [codes, scales, eight], dtype=ir.DataType.FLOAT, axis=0, block_size=group_size)
    product = g.MatMul(x, g.shaped(weight, (depth, _size(g, packed, 0))))
    sums = g.ReduceSum(g.reshape(x, (rows, groups, group_size)), g.ints([2]), keepdims=0)
    return g.cast(g.Add(product, g.MatMul(g.shaped(sums, (rows, groups)), zeros)), g.out.dtype)


def _size(g: Builder, x: Value, axis: int) -> int:
    size = g.dims(x)[axis]
    if not isinstance(size, int):
        raise Unsupported("a weight of a symbolic size")
    return size


def _part(g: Builder, parameters: Value, index: int) -> Value:
    """Return the scales or the zeros, of groups × rows."""
    part = g.Gather(parameters, g.scalar(index, torch.int64), axis=2)
    return g.shaped(part, g.dims(parameters)[:2])


def unpacked(g: Builder, packed: Value, depth: int) -> Value:
    """Return the codes, of rows × depth: those of whole blocks, then of the rest."""
    rows, block = _size(g, packed, 0), rows_of_block()
    whole = rows // block * block
    flat = g.reshape(packed, (rows * depth // 2,))
    parts = [
        _block_codes(g, g.slice(flat, 0, 0, whole * depth // 2), whole // block, depth, block) if whole else None,
        _rest_codes(g, g.slice(flat, 0, whole * depth // 2, rows * depth // 2), depth, rows - whole)
        if rows > whole
        else None,
    ]
    present = [part for part in parts if part is not None]
    return g.shaped(g.node("Concat", present, axis=0), (rows, depth)) if len(present) > 1 else present[0]


def _nibbles(g: Builder, packed: Value) -> tuple[Value, Value]:
    dims = g.dims(packed)
    low = g.BitwiseAnd(packed, g.scalar(15, torch.uint8))
    high = g.BitShift(packed, g.scalar(4, torch.uint8), direction="RIGHT")
    return g.shaped(low, dims), g.shaped(high, dims)


def _block_codes(g: Builder, flat: Value, blocks: int, depth: int, block: int) -> Value:
    """The lower bits are of the first half of a block's rows, and the upper bits of the second."""
    halves = _nibbles(g, g.reshape(flat, (blocks, depth, block // 2)))
    codes = g.shaped(g.node("Concat", halves, axis=2), (blocks, depth, block))
    return g.reshape(g.transpose(codes, [0, 2, 1]), (blocks * block, depth))


def _rest_codes(g: Builder, flat: Value, depth: int, rows: int) -> Value:
    """The lower bits are of even rows, and the upper bits of odd ones."""
    pairs = [g.unsqueeze(x, [2]) for x in _nibbles(g, g.reshape(flat, (depth, rows // 2)))]
    codes = g.shaped(g.node("Concat", pairs, axis=2), (depth, rows // 2, 2))
    return g.transpose(g.reshape(codes, (depth, rows)), [1, 0])


@cache
def rows_of_block() -> int:
    """Return how many rows torch packs together on this machine."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (_BLOCKS[0], 4), generator=generator, dtype=torch.int32)
    packed = torch._convert_weight_to_int4pack_for_cpu(codes, 1).flatten()
    for block in _BLOCKS:
        low, high = codes.view(-1, 2, block // 2, 4).permute(1, 0, 3, 2).flatten(1)
        if torch.equal(packed, (low | high << 4).to(torch.uint8)):
            return block
    raise Unsupported("torch packs weights of 4 bits in a layout that is not known")
