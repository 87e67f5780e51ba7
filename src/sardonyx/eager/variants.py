"""From an operator that writes, in place or into `out=`, to the one that computes the same and writes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeVar

import torch

COMPOSED: dict[str, Callable[..., Any]] = {}
"""Operators that become one model by what they are composed of, by their qualified names."""

F = TypeVar("F", bound=Callable[..., Any])


def composed(*names: str) -> Callable[[F], F]:
    """Let a function of torch's operators be what an operator computes on the device."""

    def register(function: F) -> F:
        COMPOSED.update(dict.fromkeys(names, function))
        return function

    return register


_ABOUT_TENSORS = frozenset({"dtype", "layout", "device", "pin_memory"})
"""What a functional operator says of a new tensor, and one with `out=` does not need."""


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
    schema = operator._schema
    written = tuple(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    parameters = tuple(a.name for a in schema.arguments)
    if not written:
        return Variant(operator, COMPOSED.get(operator.name(), operator), "functional", (), parameters)
    is_out = any(a.is_out for a in schema.arguments)
    if is_out != all(a.is_out for a in schema.arguments if a.name in written):
        return None
    wanted = [(a.name, str(a.type)) for a in schema.arguments if not a.is_out]
    for candidate in _candidates(operator, is_out):
        if _takes(candidate, wanted):
            return Variant(operator, candidate, "out" if is_out else "in place", written, parameters)
    return None


def _candidates(operator: Any, is_out: bool) -> Iterator[Any]:
    """Operators of the same name that write nothing."""
    namespace, name = operator._schema.name.split("::")
    if not is_out:
        if not name.endswith("_"):
            return
        name = name[:-1]
    packet = getattr(getattr(torch.ops, namespace), name, None)
    for overload in packet.overloads() if packet is not None else ():
        candidate = getattr(packet, overload)
        if all(a.alias_info is None for a in candidate._schema.arguments):
            yield candidate


def _takes(candidate: Any, wanted: list[tuple[str, str]]) -> bool:
    has = [(a.name, str(a.type)) for a in candidate._schema.arguments]
    return [pair for pair in has if pair[0] not in _ABOUT_TENSORS or pair in wanted] == wanted


@cache
def is_view(operator: Any) -> bool:
    """Whether an operator gives its operand's memory, with other sizes or strides."""
    returns = operator._schema.returns
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
