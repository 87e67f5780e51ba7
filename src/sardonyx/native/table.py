"""The table of lowerings, one entry an operator, and what they are written with."""

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
"""How an operator of a domain is lowered."""

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
    """Enter a lowering into the table."""

    def enter(function: Lower) -> Lower:
        for name in names:
            TABLE[domain, name] = function
        return function

    return enter


# What a node says


def opset_of(node: ir.Node) -> int:
    """The version of ONNX's operators that a node is of."""
    if node.version is not None:
        return node.version
    graph = node.graph
    return graph.opset_imports.get("", 0) if graph is not None else 0


def given(r: Lowering, node: ir.Node, index: int) -> Value:
    """An operand."""
    value = node.inputs[index]
    assert value is not None
    return r.value(value)


def optional(r: Lowering, node: ir.Node, index: int) -> Value | None:
    """An operand that may be left out."""
    value = node.inputs[index] if index < len(node.inputs) else None
    return None if value is None else r.value(value)


def float_of(node: ir.Node, name: str, default: float) -> float:
    """An attribute that is a number, in single precision, as ONNX has them and their defaults, whatever x is in."""
    return float(np.float32(node.attributes[name].as_float() if name in node.attributes else default))


def int_of(node: ir.Node, name: str, default: int) -> int:
    """An attribute that is an integer."""
    return node.attributes[name].as_int() if name in node.attributes else default


def ints_of(node: ir.Node, name: str, default: list[int]) -> list[int]:
    """An attribute that is several integers."""
    return list(node.attributes[name].as_ints()) if name in node.attributes else default


def text_of(node: ir.Node, name: str, default: str) -> str:
    """An attribute that is a word."""
    return node.attributes[name].as_string() if name in node.attributes else default


def constants(node: ir.Node, index: int, attribute: str = "") -> list[int] | None:
    """Integers that an input or an attribute holds; None if not given."""
    if attribute in node.attributes:
        return list(node.attributes[attribute].as_ints())
    value = node.inputs[index] if index < len(node.inputs) else None
    if value is None:
        return None
    array = constant_of(value)
    if array is None:
        raise CannotLower(f"input {index} of {node.op_type} is no constant")
    return [int(x) for x in array.reshape(-1)]


def need_floats(value: Value, node: ir.Node) -> None:
    """Refuse what is no floating-point number."""
    if value.dtype not in FLOATS:
        raise CannotLower(f"{node.op_type} of {value.dtype}")


def is_asked_for(node: ir.Node, index: int) -> bool:
    """Whether anybody wants a result."""
    if index >= len(node.outputs):
        return False
    output = node.outputs[index]
    return bool(output.uses()) or output.is_graph_output()


def give_optional(r: Lowering, node: ir.Node, index: int, value: Value | None) -> None:
    """A further result, where anybody asks for it."""
    if is_asked_for(node, index):
        if value is None:
            raise CannotLower(f"{node.op_type} with {len(node.outputs)} results")
        r.give(node.outputs[index], value)


# Small expressions


def to_type(r: Lowering, x: Value, dtype: ir.DataType) -> Value:
    """The same numbers in another type."""
    if x.dtype in FLOATS and dtype in _UNSIGNED:
        raise CannotLower(f"what {x.dtype} is as {dtype} depends on the processor's instruction")
    return x if x.dtype == dtype else r.apply("cast", x, dtype=dtype)


def widened(r: Lowering, x: Value) -> Value:
    """In at least single precision, for sums that half of it could not hold."""
    return to_type(r, x, FLOAT) if x.dtype in NARROW else x


def scaled(r: Lowering, x: Value, factor: float) -> Value:
    """x · factor."""
    return x if factor == 1.0 else r.apply("mul", x, r.number(factor, x))


def plus(r: Lowering, x: Value, term: float) -> Value:
    """x + term."""
    return r.apply("add", x, r.number(term, x))


def where(r: Lowering, condition: Value, yes: Value, no: Value) -> Value:
    """One or the other."""
    return r.apply("select", condition, yes, no, dtype=yes.dtype)


def less(r: Lowering, x: Value, y: Value) -> Value:
    """x < y."""
    return r.apply("less", x, y, dtype=BOOL)


def negative(r: Lowering, x: Value) -> Value:
    """x < 0."""
    return less(r, x, r.number(0, x))


def places_along(r: Lowering, size: Dim, rank: int, axis: int) -> Value:
    """0, 1, 2, … along one of several axes."""
    return r.unsqueeze(r.places((size,)), [a for a in range(rank) if a != axis])
