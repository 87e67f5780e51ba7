"""From an operator that writes, in place or into `out=`, to the one that computes the same and writes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeVar

from sardonyx.translate.functional import functional_of, mutated_arguments

COMPOSED: dict[str, Callable[..., Any]] = {}
"""Operators that become one model by what they are composed of, by their qualified names."""

F = TypeVar("F", bound=Callable[..., Any])


def composed(*names: str) -> Callable[[F], F]:
    """Let a function of torch's operators be what an operator computes on the device."""

    def register(function: F) -> F:
        COMPOSED.update(dict.fromkeys(names, function))
        return function

    return register


@dataclass(frozen=True)
class Variant:
    """How an operator relates to the functional one."""

    operator: Any
    functional: Any
    """Another operator, or a function that is composed of such."""
    kind: Literal["functional", "in place", "out"]
    written: tuple[str, ...]
    """The arguments that are written to."""
    parameters: tuple[str, ...]
    """The names of all arguments, in their order."""


@cache
def variant_of(operator: Any) -> Variant | None:
    """The functional operator behind one, by torch's schemas; None where there is none."""
    parameters, names = tuple(a.name for a in operator._schema.arguments), mutated_arguments(operator)
    if not names:
        return Variant(operator, COMPOSED.get(operator.name(), operator), "functional", (), parameters)
    functional = functional_of(operator)
    if functional is None:
        return None
    is_out = any(a.is_out for a in operator._schema.arguments)
    return Variant(operator, functional, "out" if is_out else "in place", names, parameters)


@cache
def is_view(operator: Any) -> bool:
    """Whether an operator gives its operand's memory, with other sizes or strides."""
    returns = operator._schema.returns
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
