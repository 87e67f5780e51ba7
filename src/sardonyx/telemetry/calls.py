"""A call of a module: its arguments by name, and a summary as text."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import nn

from sardonyx.telemetry.text import summarize


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """One call of a module, as passed to hooks; `str` gives the text that is printed by default.

    The arguments are the caller's own objects: in-place changes by a hook are visible to `forward`.
    """

    module: nn.Module
    name: str
    """Path of the module in the model; empty for the model itself, `graph 0/0` for a compiled graph."""
    number: int
    """How many calls of this module came before."""
    arguments: Mapping[str, Any]
    """Arguments by the names in `forward`'s signature."""
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    returned: bool = False
    """Whether `forward` has returned: with `results=True` hooks are called again then."""
    result: Any = None

    def __str__(self) -> str:
        kind = type(self.module).__name__
        head = f"call {self.number} of " + (f"{self.name} ({kind})" if self.name else kind)
        if self.returned:
            return "\n  ".join([f"{head} returns", *summarize("result", self.result)])
        return "\n  ".join([head, *(line for name, value in self.arguments.items() for line in summarize(name, value))])


Hook: TypeAlias = Callable[[Call], object]


def bind_arguments(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments by the names in a signature.

    >>> bind_arguments(signature_of(nn.Bilinear(2, 2, 2)), (1,), {"input2": 2})
    {'input1': 1, 'input2': 2}
    """
    try:
        arguments = signature.bind(*args, **kwargs).arguments
    except TypeError:  # the call itself will raise
        arguments = {f"args[{index}]": value for index, value in enumerate(args)} | dict(kwargs)
    by_name: dict[str, Any] = {}
    for name, value in arguments.items():
        kind = signature.parameters[name].kind if name in signature.parameters else None
        if kind is inspect.Parameter.VAR_POSITIONAL:
            by_name |= {f"{name}[{index}]": part for index, part in enumerate(value)}
        elif kind is inspect.Parameter.VAR_KEYWORD:
            by_name |= value
        else:
            by_name[name] = value
    return by_name


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_WRAPPED = ("_orig_mod", "module")
"""Attributes in which torch.compile, DataParallel and others store the module they wrap."""


def signature_of(module: nn.Module) -> inspect.Signature:
    """Return the signature of `forward`; for a wrapper with *args and **kwargs, that of the wrapped module."""
    signature = declared_signature(module)
    if all(parameter.kind in _VARIADIC for parameter in signature.parameters.values()):
        wrapped = (vars(module)["_modules"].get(name) for name in _WRAPPED)
        return next((signature_of(inner) for inner in wrapped if inner is not None), signature)
    return signature


def declared_signature(module: nn.Module) -> inspect.Signature:
    """Return the signature that `forward` declares; *args and **kwargs if it has none."""
    try:
        return inspect.signature(module.forward)
    except ValueError:
        return inspect.Signature([inspect.Parameter("args", _VARIADIC[0]), inspect.Parameter("kwargs", _VARIADIC[1])])
