"""The table: which function translates which operator. The single source of truth for every door."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias, TypeVar

import torch

Translation: TypeAlias = Callable[..., Any]
F = TypeVar("F", bound=Translation)

_TABLE: dict[str, Translation] = {}


def operator(*names: str) -> Callable[[F], F]:
    """Register a translation for operators by qualified name: `"aten::add.Tensor"`, `"mylib::op"`.

    The function receives the builder, then the operator's arguments as torch's schema orders them, tensors as ONNX
    values and symbolic sizes as expressions; it returns a value, or a tuple of them.
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
"""Operators of torch's own whose translations were registered after those of this package."""


def register(name: str, translation: Translation, *, replace: bool = False) -> None:
    """Register the translation of an operator that is declared while the process runs, by its qualified name."""
    global _edits
    if replace:
        _load()
        _TABLE.pop(name, None)
    operator(name)(translation)
    _edits += 1
    if _load.cache_info().currsize and name.startswith(("aten::", "prims::")):
        _of_torch.add(name)


def remove(name: str) -> None:
    """Forget the translation of an operator that `register` registered."""
    global _edits
    _TABLE.pop(name, None)
    _edits += 1
    _of_torch.discard(name)


def edits() -> int:
    """How often translations were registered or removed: what is derived from the table is out of date with another."""
    return _edits


def is_as_released() -> bool:
    """Whether operators of torch's own have the translations of this package, and no others."""
    return not _of_torch


def aten(*names: str) -> Callable[[F], F]:
    """Register a translation for ATen overloads, written `"add.Tensor"` or, for the default one, `"relu"`."""
    return operator(*(f"aten::{name}" for name in names))


def prims(*names: str) -> Callable[[F], F]:
    """Register a translation for operators of torch's `prims`."""
    return operator(*(f"prims::{name}" for name in names))


def operator_of(name: str) -> Any:
    """torch's operator of a qualified name.

    >>> operator_of("aten::add.Tensor"), operator_of("aten::relu")
    (<OpOverload(op='aten.add', overload='Tensor')>, <OpOverload(op='aten.relu', overload='default')>)
    """
    found = find_operator(name)
    if found is None:
        raise ValueError(f"torch has no operator {name!r}")
    return found


def find_operator(name: str) -> Any:
    """The same; None where there is none."""
    space, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    found = getattr(getattr(torch.ops, space), packet, None)
    return getattr(found, overload or "default", None)


@cache
def _load() -> None:
    from sardonyx.translate import aten as families

    for module in pkgutil.iter_modules(families.__path__):
        importlib.import_module(f"{families.__name__}.{module.name}")


def names() -> frozenset[str]:
    """The qualified name of every operator that our own table translates."""
    _load()
    return frozenset(_TABLE)


def named(name: str) -> Translation:
    """The translation of an operator that is known to be in the table."""
    _load()
    return _TABLE[name]


def find(target: Any) -> Translation | None:
    """The translation of an operator in our own table."""
    _load()
    return _TABLE.get(name_of(target))


def name_of(target: Any) -> str:
    """The qualified name of an operator: `"aten::add.Tensor"`, and `"aten::relu"` for a default overload.

    >>> import torch
    >>> name_of(torch.ops.aten.add.Tensor), name_of(torch.ops.aten.relu.default)
    ('aten::add.Tensor', 'aten::relu')
    """
    return str(target.name()) if hasattr(target, "name") else ""
