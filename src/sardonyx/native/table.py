"""The table of lowerings by operator, and helpers to write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from sardonyx.native.region import CannotLower, Lowering, constant_of
from sardonyx.native.values import Value
from sardonyx.sizes import Dim

Lower: TypeAlias = Callable[[Lowering, ir.Node], None]
TABLE: dict[tuple[str, str], Lower] = {}
"""Lowerings by domain and operator."""

BOOL, FLOAT, INT64 = ir.DataType.BOOL, ir.DataType.FLOAT, ir.DataType.INT64
NARROW = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
FLOATS = frozenset({FLOAT, ir.DataType.DOUBLE}) | NARROW
INTEGERS = frozenset(
    {
        *(ir.DataType.INT8, ir.DataType.INT16, ir.DataType.INT32, INT64),
        *(ir.DataType.UINT8, ir.DataType.UINT16, ir.DataType.UINT32, ir.DataType.UINT64),
    }
)
TYPES = FLOATS | INTEGERS | {BOOL}
_UNSIGNED = frozenset({ir.DataType.UINT32, ir.DataType.UINT64})


def lowers(*names: str, domain: str = "") -> Callable[[Lower], Lower]:
    """Register a lowering."""

    def enter(function: Lower) -> Lower:
        for name in names:
            TABLE[domain, name] = function
        return function

    return enter


# Operands and attributes


def opset_of(node: ir.Node) -> int:
    """Return the opset version of a node."""
    if node.version is not None:
        return node.version
    graph = node.graph
    return graph.opset_imports.get("", 0) if graph is not None else 0


def operand(r: Lowering, node: ir.Node, index: int) -> Value:
    """Return an operand."""
    value = node.inputs[index]
    assert value is not None
    return r.value(value)


def optional(r: Lowering, node: ir.Node, index: int) -> Value | None:
    """Return an operand, or None if it is absent."""
    value = node.inputs[index] if index < len(node.inputs) else None
    return None if value is None else r.value(value)


def float_of(node: ir.Node, name: str, default: float) -> float:
    """Return a float attribute or default, rounded to float32 as in ONNX."""
    return float(np.float32(node.attributes[name].as_float() if name in node.attributes else default))


def int_of(node: ir.Node, name: str, default: int) -> int:
    """Return an integer attribute."""
    return node.attributes[name].as_int() if name in node.attributes else default


def ints_of(node: ir.Node, name: str, default: list[int]) -> list[int]:
    """Return an integer list attribute."""
    return list(node.attributes[name].as_ints()) if name in node.attributes else default


def text_of(node: ir.Node, name: str, default: str) -> str:
    """Return a string attribute."""
    return node.attributes[name].as_string() if name in node.attributes else default


def constants(node: ir.Node, index: int, attribute: str = "") -> list[int] | None:
    """Return the integers of a constant input or an attribute; None if absent."""
    if attribute in node.attributes:
        return list(node.attributes[attribute].as_ints())
    value = node.inputs[index] if index < len(node.inputs) else None
    if value is None:
        return None
    array = constant_of(value)
    if array is None:
        raise CannotLower(f"input {index} of {node.op_type} is not a constant")
    return [int(x) for x in array.reshape(-1)]


def need_floats(value: Value, node: ir.Node) -> None:
    """Raise `CannotLower` for a value that is not floating-point."""
    if value.dtype not in FLOATS:
        raise CannotLower(f"{node.op_type} of {value.dtype}")


def is_used(node: ir.Node, index: int) -> bool:
    """Return whether a result is used."""
    if index >= len(node.outputs):
        return False
    output = node.outputs[index]
    return bool(output.uses()) or output.is_graph_output()


def define_optional(r: Lowering, node: ir.Node, index: int, value: Value | None) -> None:
    """Define a further result if it is used."""
    if is_used(node, index):
        if value is None:
            raise CannotLower(f"{node.op_type} with {len(node.outputs)} results")
        r.define(node.outputs[index], value)


# Expressions


def to_type(r: Lowering, x: Value, dtype: ir.DataType) -> Value:
    """Return a value cast to a type."""
    if x.dtype in FLOATS and dtype in _UNSIGNED:
        raise CannotLower(f"the cast from {x.dtype} to {dtype} depends on the processor")
    return x if x.dtype == dtype else r.apply("cast", x, dtype=dtype)


def widened(r: Lowering, x: Value) -> Value:
    """Return a value in at least single precision, for sums."""
    return to_type(r, x, FLOAT) if x.dtype in NARROW else x


def scaled(r: Lowering, x: Value, factor: float) -> Value:
    """x · factor."""
    return x if factor == 1.0 else r.apply("mul", x, r.number(factor, x))


def plus(r: Lowering, x: Value, term: float) -> Value:
    """x + term."""
    return r.apply("add", x, r.number(term, x))


def where(r: Lowering, condition: Value, yes: Value, no: Value) -> Value:
    """Return `yes` where the condition holds, else `no`."""
    return r.apply("select", condition, yes, no, dtype=yes.dtype)


def less(r: Lowering, x: Value, y: Value) -> Value:
    """x < y."""
    return r.apply("less", x, y, dtype=BOOL)


def negative(r: Lowering, x: Value) -> Value:
    """x < 0."""
    return less(r, x, r.number(0, x))


def indices_along(r: Lowering, size: Dim, rank: int, axis: int) -> Value:
    """Return 0, 1, 2, … along one of several axes."""
    return r.unsqueeze(r.indices((size,)), [a for a in range(rank) if a != axis])
