"""Fuse rotary position embedding, x·cos + rotate_half(x)·sin, into one operator."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from sardonyx import opsets
from sardonyx.optimize.pattern import P, array_of, permutation_of
from sardonyx.optimize.rule import Match, Refused, rule
from sardonyx.sizes import Dim, Dims

_HALVES_SWAPPED = P.Concat(
    P.Neg(P.Slice("x", "mid", "end", "axis", "step", _name="upper")), P.Slice("x", "start", "mid", "axis", "step")
)


@rule(P.Add(P.Mul("x", "cos"), P.Mul(_HALVES_SWAPPED, "sin")))
def rotary_embedding(m: Match) -> ir.Value:
    """x·cos + concat(−x₂, x₁)·sin = RotaryEmbedding(x, cos₁, sin₁), if the two halves of cos and of sin are equal."""
    m.require(m.g.opset >= opsets.ATTENTION, "RotaryEmbedding needs opset 23")
    m.require(m.x.dtype in (ir.DataType.FLOAT, ir.DataType.FLOAT16), "no kernel for the dtype")
    batch, _, length, _ = _dims_of_four(m, m.x)
    m.require(0 not in m.dims(m.x), "it is empty")
    half = _half_width(m)
    cos, sin = (_table(m, value, [batch, length, half]) for value in (m.cos, m.sin))
    return m.g.shaped(m.g.RotaryEmbedding(m.x, cos, sin), m.dims(m.x))


def _dims_of_four(m: Match, value: ir.Value) -> Dims:
    dims = m.dims(value)
    m.require(len(dims) == 4, "not (batch, heads, length, width)")
    return dims


def _half_width(m: Match) -> int:
    """Return half the width of a head, if the slices are its two halves."""
    start, mid, end, axis = (array_of(v) for v in (m.start, m.mid, m.end, m.axis))
    m.require(all(a is not None and a.size == 1 for a in (start, mid, end, axis)), "slices of several axes")
    width = m.dims(m.x)[-1]
    m.require(isinstance(width, int) and int(axis.item()) in (3, -1), "not along the last axis")
    half = int(width) // 2
    m.require((start.item(), mid.item()) == (0, half) and end.item() >= width, "not the two halves")
    return half


def _table(m: Match, value: ir.Value, expected: list[Dim]) -> ir.Value:
    """Return the first half of cos or sin as (batch, length, width/2)."""
    half = _half(m, value)
    dims = m.dims(half)
    m.require(len(dims) in (3, 4) and dims[-2] == expected[1], "positions are not along the length")
    m.require(len(dims) == 3 or dims[1] == 1, "it differs between heads")
    m.require(dims[0] in (1, expected[0]), "its batch size differs")
    return m.g.expand(m.g.reshape(half, [dims[0], *expected[1:]]), expected)


_ELEMENTWISE = ("Cos", "Sin", "Cast", "Neg")


def _half(m: Match, value: ir.Value) -> ir.Value:
    """Return half of a value whose two halves along the last axis are equal: by construction, or as constants."""
    array = array_of(value)
    if array is not None:
        lower, upper = np.split(array, 2, axis=-1)
        m.require(np.array_equal(lower, upper), "its halves differ")
        return m.g.constant(np.ascontiguousarray(lower), value.dtype)
    producer = value.producer()
    if producer is None:
        raise Refused("its halves are not known to be equal")
    source = producer.inputs[0]
    assert source is not None
    dims = m.dims(value)
    halved = (*dims[:-1], dims[-1] // 2)
    if producer.op_type == "Concat" and len(producer.inputs) == 2 and source is producer.inputs[1]:
        m.require(producer.attributes["axis"].value in (-1, len(dims) - 1), "joined along another axis")
        return source
    if producer.op_type in _ELEMENTWISE:
        attributes = {name: a.value for name, a in producer.attributes.items()}
        return m.g.shaped(m.g.node(producer.op_type, [_half(m, source)], **attributes), halved)
    if producer.op_type in ("Unsqueeze", "Reshape") and m.dims(source)[-1] == dims[-1]:
        return m.g.reshape(_half(m, source), halved)
    if producer.op_type == "Mul" and producer.inputs[1] is not None and not _rows(m, producer.inputs[1]):
        return m.g.shaped(m.g.Mul(_half(m, source), producer.inputs[1]), halved)
    raise Refused("its halves are not known to be equal")


def _rows(m: Match, factor: ir.Value) -> bool:
    dims = m.dims(factor)
    return bool(dims) and dims[-1] != 1


@rule(P.RotaryEmbedding(P.Transpose("x", _shared=True, _name="transposed"), "cos", "sin"))
def rotary_in_rows(m: Match) -> ir.Value:
    """RotaryEmbedding over transposed heads = the same over rows, transposed afterwards, so that Transposes merge."""
    m.require(permutation_of(m.transposed.producer()) == [0, 2, 1, 3], "not heads before length")
    batch, length, heads, width = _dims_of_four(m, m.x)
    m.require(isinstance(heads, int) and heads > 0, "the number of heads is symbolic or zero")
    rows = m.g.reshape(m.x, [batch, length, heads * width])
    rotated = m.g.shaped(m.g.RotaryEmbedding(rows, m.cos, m.sin, num_heads=heads), m.dims(rows))
    return m.g.transpose(m.g.reshape(rotated, m.dims(m.x)), [0, 2, 1, 3])
