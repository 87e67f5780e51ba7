"""From an operator that writes, in place or into `out=`, to the one that returns the same value and writes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

_ABOUT_TENSORS = frozenset({"dtype", "layout", "device", "pin_memory"})
"""What a functional operator says of a new tensor, and one with `out=` does not need."""


def written(operator: Any) -> tuple[str, ...]:
    """The arguments that an operator writes to.

    >>> written(torch.ops.aten.sin.out), written(torch.ops.aten.sin_.default), written(torch.ops.aten.sin.default)
    (('out',), ('self',), ())
    """
    arguments = operator._schema.arguments
    return tuple(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)


def functional_of(operator: Any) -> Any:
    """The functional operator behind one that writes, by torch's schemas; None where there is none.

    >>> functional_of(torch.ops.aten.sin.out), functional_of(torch.ops.aten.add_.Tensor)
    (<OpOverload(op='aten.sin', overload='default')>, <OpOverload(op='aten.add', overload='Tensor')>)
    """
    arguments, names = operator._schema.arguments, written(operator)
    is_out = any(a.is_out for a in arguments)
    if not names or is_out != all(a.is_out for a in arguments if a.name in names):
        return None
    wanted = [(a.name, str(a.type)) for a in arguments if not a.is_out]
    return next((candidate for candidate in _candidates(operator, is_out) if _takes(candidate, wanted)), None)


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
