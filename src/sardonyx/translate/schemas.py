"""Which dtypes ONNX's schemas allow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import onnx


@dataclass(frozen=True)
class Signature:
    """The type constraint that each input and output of an operator falls under, and the types each allows."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    allowed: Mapping[str, frozenset[str]]

    def of_input(self, index: int) -> str:
        """The constraint of an input; the last one's is that of all that follow."""
        return self.inputs[min(index, len(self.inputs) - 1)]

    def of_output(self, index: int) -> str:
        """The constraint of an output."""
        return self.outputs[min(index, len(self.outputs) - 1)]

    def only(self, constraint: str) -> str | None:
        """The one type that a constraint allows, if it is one; a schema may also name a type in its place."""
        allowed = self.allowed.get(constraint, frozenset({constraint}))
        return next(iter(allowed)) if len(allowed) == 1 else None


@cache
def signature(op_type: str, opset: int) -> Signature | None:
    """An operator of ONNX's own domain; None where this opset has none of that name.

    >>> found = signature("Where", 23)
    >>> found.of_input(2), found.only(found.of_input(0))
    ('T', 'tensor(bool)')
    """
    try:
        schema = onnx.defs.get_schema(op_type, opset)
    except onnx.defs.SchemaError:
        return None
    return Signature(
        tuple(x.type_str for x in schema.inputs),
        tuple(x.type_str for x in schema.outputs),
        {c.type_param_str: frozenset(c.allowed_type_strs) for c in schema.type_constraints},
    )
