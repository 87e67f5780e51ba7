"""A call of a module: its arguments by name, and all of it in words."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import nn

from sardonyx.telemetry.text import summarize


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """One call of a module, as a hook gets it; as text it is what would be printed.

    The arguments are the caller's own objects: what a hook changes in place, `forward` sees.
    """

    module: nn.Module
    name: str
    """Where the module is in the model; empty for the model itself, `graph 0/0` for a compiled graph."""
    number: int
    """How many calls of this module were seen before."""
    arguments: Mapping[str, Any]
    """What was given, by the names in `forward`'s signature."""
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    returned: bool = False
    """Whether `forward` is done: with `results=True` a hook is called once more then."""
    result: Any = None

    def __str__(self) -> str:
        kind = type(self.module).__name__
        head = f"call {self.number} of " + (f"{self.name} ({kind})" if self.name else kind)
        if self.returned:
            return "\n  ".join([f"{head} returns", *summarize("result", self.result)])
        return "\n  ".join([head, *(line for name, value in self.arguments.items() for line in summarize(name, value))])


Hook: TypeAlias = Callable[[Call], object]


def bind_arguments(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What is given to a module, by the names in its signature.

    >>> named(signature_of(nn.Bilinear(2, 2, 2)), (1,), {"input2": 2})
    {'input1': 1, 'input2': 2}
    """
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError:  # the call itself will say what is wrong
        given = {f"args[{index}]": value for index, value in enumerate(args)} | dict(kwargs)
    found: dict[str, Any] = {}
    for name, value in given.items():
        kind = signature.parameters[name].kind if name in signature.parameters else None
        if kind is inspect.Parameter.VAR_POSITIONAL:
            found |= {f"{name}[{index}]": part for index, part in enumerate(value)}
        elif kind is inspect.Parameter.VAR_KEYWORD:
            found |= value
        else:
            found[name] = value
    return found


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_WRAPPED = ("_orig_mod", "module")
"""Where torch.compile, DataParallel and others keep the module they wrap."""


def signature_of(module: nn.Module) -> inspect.Signature:
    """The signature of `forward`; of the module inside where a wrapper takes anything."""
    signature = declared_signature(module)
    if all(parameter.kind in _VARIADIC for parameter in signature.parameters.values()):
        inside = (vars(module)["_modules"].get(name) for name in _WRAPPED)
        return next((signature_of(found) for found in inside if found is not None), signature)
    return signature


def declared_signature(module: nn.Module) -> inspect.Signature:
    """What `forward` itself says that it takes; anything if it does not say."""
    try:
        return inspect.signature(module.forward)
    except ValueError:
        return inspect.Signature([inspect.Parameter("args", _VARIADIC[0]), inspect.Parameter("kwargs", _VARIADIC[1])])
