"""The table of translations, by operator: the single source of truth for every door."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeAlias, TypeVar

import torch

from sardonyx.errors import DeclarationError, OptionError
from sardonyx.options import validates

Translation: TypeAlias = Callable[..., Any]
F = TypeVar("F", bound=Translation)

_TABLE: dict[str, Translation] = {}


def operator(*names: str) -> Callable[[F], F]:
    """Register a translation for operators by qualified name: `"aten::add.Tensor"`, `"mylib::op"`.

    The function receives the builder, then the operator's arguments in the order of torch's schema, with tensors as
    ONNX values and symbolic sizes as expressions; it returns a value or a tuple of values.
    """

    def register(translation: F) -> F:
        for name in names:
            if name in _TABLE:
                raise ValueError(f"{name} is translated twice")
            _TABLE[name] = translation
        return translation

    return register


_edits = 0
_of_torch: set[str] = set()
"""Operators of torch whose translations were registered after those of this package."""


def register(name: str, translation: Translation, *, replace: bool = False) -> None:
    """Register the translation of an operator at run time, by its qualified name."""
    global _edits
    if replace:
        _load()
        _TABLE.pop(name, None)
    operator(name)(translation)
    _edits += 1
    if _load.cache_info().currsize and name.startswith(("aten::", "prims::")):
        _of_torch.add(name)


def remove(name: str) -> None:
    """Remove a translation that `register` added."""
    global _edits
    _TABLE.pop(name, None)
    _edits += 1
    _of_torch.discard(name)


def revision() -> int:
    """Return how often the table was changed; what is derived from it is valid for one revision."""
    return _edits


def has_only_own_translations() -> bool:
    """Whether torch's own operators have only the translations of this package."""
    return not _of_torch


def aten(*names: str) -> Callable[[F], F]:
    """Register a translation for ATen overloads: `"add.Tensor"`, or `"relu"` for the default overload."""
    return operator(*(f"aten::{name}" for name in names))


def prims(*names: str) -> Callable[[F], F]:
    """Register a translation for operators of torch's `prims`."""
    return operator(*(f"prims::{name}" for name in names))


def operator_of(name: str) -> Any:
    """Return torch's operator of a qualified name.

    >>> operator_of("aten::add.Tensor"), operator_of("aten::relu")
    (<OpOverload(op='aten.add', overload='Tensor')>, <OpOverload(op='aten.relu', overload='default')>)
    """
    operator = find_operator(name)
    if operator is None:
        raise DeclarationError(f"torch has no operator {name!r}", hint=_similar_operator(name))
    return operator


@validates("translations")
def _check_translations(translations: Mapping[str, Translation] | None) -> None:
    """Raise for an operator that torch does not have: its translation would never be used."""
    for name in translations or ():
        operator = find_operator(name)
        if operator is None:
            raise OptionError(
                f"translations has {name!r}, but torch has no such operator", hint=_similar_operator(name)
            )
        if name_of(operator) != name:
            raise OptionError(f"translations has {name!r}", hint=f"its name is {name_of(operator)!r}")


def _similar_operator(name: str) -> str:
    """Return a hint for an unknown operator: a similar name of its namespace."""
    space, _, rest = name.partition("::")
    registered = (other.partition("::") for other in torch._C._dispatch_get_all_op_names())
    known = [other for namespace, _, other in registered if namespace == space]
    near = difflib.get_close_matches(rest, known, n=1)
    if near:
        return f"did you mean '{space}::{near[0]}'?"
    return "use a name such as 'aten::add.Tensor'" if known else "load the library that registers it first"


def find_operator(name: str) -> Any:
    """Like `operator_of`, but return None if there is none."""
    space, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    overloads = getattr(getattr(torch.ops, space), packet, None)
    return getattr(overloads, overload or "default", None)


@cache
def _load() -> None:
    from sardonyx.translate import aten as families

    for module in pkgutil.iter_modules(families.__path__):
        importlib.import_module(f"{families.__name__}.{module.name}")


def names() -> frozenset[str]:
    """Return the qualified name of every operator that our own table translates."""
    _load()
    return frozenset(_TABLE)


def lookup(name: str) -> Translation:
    """Return the translation of an operator that is known to be in the table."""
    _load()
    return _TABLE[name]


def find(target: Any) -> Translation | None:
    """Return the translation of an operator in our own table, or None."""
    _load()
    return _TABLE.get(name_of(target))


def name_of(target: Any) -> str:
    """Return the qualified name of an operator: `"aten::add.Tensor"`, and `"aten::relu"` for a default overload.

    >>> import torch
    >>> name_of(torch.ops.aten.add.Tensor), name_of(torch.ops.aten.relu.default)
    ('aten::add.Tensor', 'aten::relu')
    """
    return str(target.name()) if hasattr(target, "name") else ""
