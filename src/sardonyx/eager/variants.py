"""Map in-place and `out=` operators to their functional variants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeVar

from sardonyx.translate.functional import functional_of, mutated_arguments

COMPOSITES: dict[str, Callable[..., Any]] = {}
"""Functions that compose an operator from others, compiled to one model; by qualified name."""

F = TypeVar("F", bound=Callable[..., Any])


def composite(*names: str) -> Callable[[F], F]:
    """Register a function of torch operators as what an operator computes on the device."""

    def register(function: F) -> F:
        COMPOSITES.update(dict.fromkeys(names, function))
        return function

    return register


@dataclass(frozen=True)
class Variant:
    """An operator and its functional variant."""

    operator: Any
    functional: Any
    """An operator, or a function that composes operators."""
    kind: Literal["functional", "in place", "out"]
    written: tuple[str, ...]
    """Names of the arguments that are written."""
    parameters: tuple[str, ...]
    """Names of all arguments, in order."""


@cache
def variant_of(operator: Any) -> Variant | None:
    """Return the functional variant of an operator by torch's schemas, or None."""
    parameters, names = tuple(a.name for a in operator._schema.arguments), mutated_arguments(operator)
    if not names:
        return Variant(operator, COMPOSITES.get(operator.name(), operator), "functional", (), parameters)
    functional = functional_of(operator)
    if functional is None:
        return None
    is_out = any(a.is_out for a in operator._schema.arguments)
    return Variant(operator, functional, "out" if is_out else "in place", names, parameters)


@cache
def is_view(operator: Any) -> bool:
    """Return whether an operator returns a view of its operand."""
    returns = operator._schema.returns
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
