"""Estimate what a kernel saves: node launches, and bytes written and read between nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir
import sympy

from sardonyx.native.lower import LAYOUT
from sardonyx.native.nests import count
from sardonyx.native.region import CannotLower, dims_of
from sardonyx.sizes import value_of

ASSUMED_SIZE = 64
"""Assumed value of a symbolic size."""
_LAUNCH_SECONDS, _BYTE_SECONDS = 1.5e-6, 1e-10
"""Overhead of a node in ONNX Runtime, and of a byte written or read."""


@dataclass(frozen=True)
class Savings:
    """Savings per call."""

    launches: int
    bytes: int
    seconds: float


def estimate_savings(
    group: Sequence[ir.Node], weights: Sequence[ir.Value], slow_seconds: Mapping[str, float]
) -> Savings:
    """Estimate what one kernel saves over some nodes; for weights that it holds, half the time to read them.

    `slow_seconds` has operators whose own kernels are slow: seconds per element that another kernel saves.
    Layout nodes count as no launches: moving elements in a kernel takes as long as in ONNX Runtime.
    """
    members = set(group)
    working = [node for node in group if node.op_type not in LAYOUT]
    launches = max(0, len(working) - 1)
    inner = [x for node in working for x in node.outputs if x.uses() and not x.is_graph_output()]
    between = sum(_bytes(x) * (1 + len(x.uses())) for x in inner if all(use.node in members for use in x.uses()))
    slow = sum(slow_seconds.get(node.op_type, 0.0) * elements_of(node.outputs[0]) for node in group)
    held = sum(_bytes(x) for x in weights) / 2
    return Savings(launches, between, launches * _LAUNCH_SECONDS + (between + held) * _BYTE_SECONDS + slow)


def elements_of(value: ir.Value) -> int:
    """Return the number of elements, with `ASSUMED_SIZE` for symbolic sizes; 0 if it is unknown."""
    try:
        size = sympy.sympify(count(dims_of(value)))
    except CannotLower:
        return 0
    return value_of(size, dict.fromkeys(size.free_symbols, ASSUMED_SIZE))


def _bytes(value: ir.Value) -> int:
    return int(elements_of(value) * (value.dtype.itemsize if value.dtype is not None else 0))
