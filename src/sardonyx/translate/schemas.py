"""The dtypes that ONNX's schemas allow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import onnx


@dataclass(frozen=True)
class Signature:
    """The type constraint of each input and output of an operator, and the types that each allows."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    allowed: Mapping[str, frozenset[str]]

    def of_input(self, index: int) -> str:
        """Return the constraint of an input; further inputs have that of the last one."""
        return self.inputs[min(index, len(self.inputs) - 1)]

    def of_output(self, index: int) -> str:
        """Return the constraint of an output."""
        return self.outputs[min(index, len(self.outputs) - 1)]

    def only(self, constraint: str) -> str | None:
        """Return the single type that a constraint allows, or None; schemas may also have a type instead of one."""
        allowed = self.allowed.get(constraint, frozenset({constraint}))
        return next(iter(allowed)) if len(allowed) == 1 else None


@cache
def signature(op_type: str, opset: int) -> Signature | None:
    """Return the signature of an operator in ONNX's own domain; None if this opset has no such operator.

    >>> where = signature("Where", 23)
    >>> where.of_input(2), where.only(where.of_input(0))
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
