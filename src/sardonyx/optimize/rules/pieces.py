"""Slices, splits, and concatenations of them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import onnx_ir as ir

from sardonyx.optimize.pattern import array_of
from sardonyx.optimize.rule import Match, rule_at
from sardonyx.sizes import Dims


@rule_at("Slice")
def drop_slice(m: Match) -> ir.Value:
    """A Slice that keeps all elements in order has no effect."""
    source = m.node.inputs[0]
    assert source is not None
    m.require(m.dims(source) == m.dims(m.result), "it selects a part")
    steps = array_of(m.node.inputs[4]) if len(m.node.inputs) > 4 else np.ones(1)
    m.require(steps is not None and bool((steps == 1).all()), "it changes the order")
    return source


@rule_at("Concat")
def drop_concat(m: Match) -> ir.Value:
    """Concat of one tensor = that tensor."""
    m.require(len(m.node.inputs) == 1 and m.node.inputs[0] is not None, "it joins several tensors")
    assert m.node.inputs[0] is not None
    return m.node.inputs[0]


Piece = tuple[ir.Value, int, int, int]
"""A part of a tensor along one axis: the tensor, the axis, start and end."""


def _piece(value: ir.Value | None) -> Piece | None:
    """Return the part of a tensor that a value is, if a Slice or a Split selected it along one axis."""
    node = value.producer() if value is not None else None
    source = node.inputs[0] if node is not None and node.inputs else None
    dims: Dims | None = source.meta.get("dims") if source is not None else None
    if node is None or source is None or value is None or dims is None:
        return None
    if node.op_type == "Slice":
        return _slice_piece(node, source, dims)
    return _split_piece(node, source, dims, value) if node.op_type == "Split" else None


def _slice_piece(node: ir.Node, source: ir.Value, dims: Dims) -> Piece | None:
    arrays = [array_of(x) for x in node.inputs[1:]]
    if len(arrays) < 3 or any(a is None or a.size != 1 for a in arrays):
        return None
    start, end, axis, *step = (int(a.item()) for a in arrays)
    size = dims[axis]
    if step not in ([], [1]) or not isinstance(size, int):
        return None
    start, end = (min(max(index + size if index < 0 else index, 0), size) for index in (start, end))
    return (source, axis % len(dims), start, end) if start < end else None


def _split_piece(node: ir.Node, source: ir.Value, dims: Dims, value: ir.Value) -> Piece | None:
    axis = (node.attributes["axis"].as_int() if "axis" in node.attributes else 0) % len(dims)
    start = 0
    for output in node.outputs:
        size = (output.meta.get("dims") or (None,) * len(dims))[axis]
        if not isinstance(size, int):
            return None
        if output is value:
            return source, axis, start, start + size
        start += size
    return None


@rule_at("Concat")
def rejoin_pieces(m: Match) -> ir.Value:
    """Concat of all pieces of x in their order = x."""
    pieces = [_piece(x) for x in m.node.inputs]
    first = pieces[0] if pieces else None
    m.require(first is not None and all(p is not None for p in pieces), "the inputs are not slices")
    assert first is not None
    source, axis, at, _ = first
    rank = len(m.dims(source))
    m.require(at == 0 and m.node.attributes["axis"].as_int() % rank == axis, "not along the axis of the slices")
    for piece in pieces:
        m.require(piece is not None and piece[:3] == (source, axis, at), "not in order")
        assert piece is not None
        at = piece[3]
    m.require(at == m.dims(source)[axis], "a part is missing")
    return source


@rule_at("Slice", late=True)
def slices_as_split(m: Match) -> ir.Value:
    """Slices that partition one axis of x = the outputs of one Split of x."""
    piece = _piece(m.result)
    m.require(piece is not None, "not a slice along one axis")
    assert piece is not None
    source, axis, start, _ = piece
    existing = _existing_split_output(m.node, piece)
    if existing is not None:
        return existing
    siblings = [node for node, index in source.uses() if index == 0 and node.op_type == "Slice"]
    pieces = [_piece(node.outputs[0]) for node in siblings if node.graph is m.node.graph]
    tiles = sorted(p[2:] for p in pieces if p is not None and p[1] == axis)
    m.require(len(tiles) > 1 and (tiles[0][0], tiles[-1][1]) == (0, m.dims(source)[axis]), "a part is missing")
    m.require(all(a[1] == b[0] for a, b in pairwise(tiles)), "they overlap or leave gaps")
    sizes = m.g.ints([stop - begin for begin, stop in tiles])
    outputs = m.g.several("Split", len(tiles), [source, sizes], axis=axis)
    for output, (begin, stop) in zip(outputs, tiles, strict=True):
        dims = list(m.dims(source))
        dims[axis] = stop - begin
        m.g.shaped(output, dims)
    return outputs[[begin for begin, _ in tiles].index(start)]


def _existing_split_output(node: ir.Node, piece: Piece) -> ir.Value | None:
    """Return the output of a Split in the node's graph that is the same part; other branches cannot be read."""
    readers = [use.node for use in piece[0].uses()]
    splits = [reader for reader in readers if reader.op_type == "Split" and reader.graph is node.graph]
    return next((output for split in splits for output in split.outputs if _piece(output) == piece), None)
