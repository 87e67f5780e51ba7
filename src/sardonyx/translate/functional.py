"""Map an operator that writes, in place or to `out=`, to the functional operator that returns the same value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

_TENSOR_OPTIONS = frozenset({"dtype", "layout", "device", "pin_memory"})
"""Arguments that describe a new tensor, which an operator with `out=` does not need."""


def mutated_arguments(operator: Any) -> tuple[str, ...]:
    """Return the arguments that an operator writes to.

    >>> mutated_arguments(torch.ops.aten.sin.out), mutated_arguments(torch.ops.aten.sin_.default)
    (('out',), ('self',))
    >>> mutated_arguments(torch.ops.aten.sin.default)
    ()
    """
    arguments = operator._schema.arguments
    return tuple(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)


def functional_of(operator: Any) -> Any:
    """Return the functional operator of one that writes, by torch's schemas; None if there is none.

    >>> functional_of(torch.ops.aten.sin.out), functional_of(torch.ops.aten.add_.Tensor)
    (<OpOverload(op='aten.sin', overload='default')>, <OpOverload(op='aten.add', overload='Tensor')>)
    """
    arguments, names = operator._schema.arguments, mutated_arguments(operator)
    is_out = any(a.is_out for a in arguments)
    if not names or is_out != all(a.is_out for a in arguments if a.name in names):
        return None
    expected = [(a.name, str(a.type)) for a in arguments if not a.is_out]
    return next((candidate for candidate in _candidates(operator, is_out) if _has_arguments(candidate, expected)), None)


def _candidates(operator: Any, is_out: bool) -> Iterator[Any]:
    """Yield operators of the same name that write nothing."""
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


def _has_arguments(candidate: Any, expected: list[tuple[str, str]]) -> bool:
    arguments = [(a.name, str(a.type)) for a in candidate._schema.arguments]
    return [pair for pair in arguments if pair[0] not in _TENSOR_OPTIONS or pair in expected] == expected
