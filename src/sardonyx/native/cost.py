"""What a kernel is expected to save: nodes that are not launched, bytes that are not written and read between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir
import sympy

from sardonyx.native.lower import LAYOUT
from sardonyx.native.nests import count
from sardonyx.native.region import CannotLower, dims_of
from sardonyx.sizes import value_of

SOME = 64
"""What a size is taken for that is not known before the call."""
_LAUNCH, _BYTE = 1.5e-6, 1e-10
"""Seconds that ONNX Runtime takes for a node besides its work, and for a byte that is written or read."""
_SLOW = {"SkipLayerNormalization": 4e-9, "SkipSimplifiedLayerNormalization": 4e-9}
"""Operators that ONNX Runtime computes element by element: the seconds for each that a kernel of ours does not take."""


@dataclass(frozen=True)
class Saved:
    """What is saved at each call."""

    launches: int
    bytes: int
    seconds: float


def saved(group: Sequence[ir.Node], weights: Sequence[ir.Value]) -> Saved:
    """What one kernel in the place of some nodes saves; of weights that it holds, half the time to read them.

    Layout is no launch that is saved: a kernel that moves elements about takes as long as it would by itself.
    """
    own = set(group)
    working = [node for node in group if node.op_type not in LAYOUT]
    launches = max(0, len(working) - 1)
    inner = [x for node in working for x in node.outputs if x.uses() and not x.is_graph_output()]
    between = sum(_bytes(x) * (1 + len(x.uses())) for x in inner if all(use.node in own for use in x.uses()))
    slow = sum(_SLOW.get(node.op_type, 0.0) * _elements(node.outputs[0]) for node in working)
    held = sum(_bytes(x) for x in weights) / 2
    return Saved(launches, between, launches * _LAUNCH + (between + held) * _BYTE + slow)


def _elements(value: ir.Value) -> int:
    try:
        size = sympy.sympify(count(dims_of(value)))
    except CannotLower:
        return 0
    return value_of(size, dict.fromkeys(size.free_symbols, SOME))


def _bytes(value: ir.Value) -> int:
    return int(_elements(value) * (value.dtype.itemsize if value.dtype is not None else 0))
