"""Searching in sorted sequences."""

from __future__ import annotations

import onnx_ir as ir
import torch

from sardonyx.translate.builder import Builder, Operand
from sardonyx.translate.errors import Unsupported
from sardonyx.translate.sizes import Dim
from sardonyx.translate.table import aten

Value = ir.Value
_LONGEST = 1024


def place_of(g: Builder, sequence: Value, values: Value, right: bool) -> Value:
    """How many of the sequence stand before each value: every pair is compared, which short sequences allow."""
    length: Dim = g.dims(sequence)[-1]
    if not isinstance(length, int) or length > _LONGEST:
        raise Unsupported(f"a search in a sequence of {length}; up to {_LONGEST} are compared one by one")
    if not length:
        return g.expand(g.scalar(0, torch.int64), g.dims(values))
    sequence, values = g.promote(sequence, values)
    # Written so that NaN, which no comparison holds for, comes after everything.
    behind = g.Not(g.node("Greater" if right else "GreaterOrEqual", [sequence, g.unsqueeze(values, [-1])]))
    return g.ReduceSum(g.cast(behind, torch.int64), g.ints([-1]), keepdims=0)


@aten("bucketize.Tensor", "bucketize.Scalar")
def bucketize(g: Builder, x: Operand, boundaries: Value, *, out_int32: bool = False, right: bool = False) -> Value:
    return place_of(g, boundaries, _as_tensor(g, x), right)


@aten("searchsorted.Tensor", "searchsorted.Scalar")
def searchsorted(
    g: Builder,
    sequence: Value,
    values: Operand,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Value | None = None,
) -> Value:
    if sorter is not None:
        sequence = g.shaped(g.GatherElements(sequence, sorter, axis=-1), g.dims(sequence))
    if g.rank(sequence) > 1:
        sequence = g.unsqueeze(sequence, [-2])
    return place_of(g, sequence, _as_tensor(g, values), right or side == "right")


def _as_tensor(g: Builder, x: Operand) -> Value:
    return x if isinstance(x, Value) else g.scalar(x, torch.float32 if isinstance(x, float) else torch.int64)
