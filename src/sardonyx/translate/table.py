"""The table: which function translates which operator. The single source of truth for every door."""

from __future__ import annotations

import importlib
import operator
import pkgutil
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, TypeAlias

import torch

Translation: TypeAlias = Callable[..., Any]

_TABLE: dict[Any, Translation] = {}


def aten(*names: str) -> Callable[[Translation], Translation]:
    """Register a translation for ATen overloads, written `"add.Tensor"` or, for `default`, just `"relu"`.

    The function receives the builder, then the operator's arguments as torch's schema orders them, tensors as ONNX
    values and symbolic sizes as expressions; it returns a value, or a tuple of them.
    """
    return _registering(torch.ops.aten, names)


def prims(*names: str) -> Callable[[Translation], Translation]:
    """Register a translation for operators of torch's `prims`."""
    return _registering(torch.ops.prims, names)


def _registering(namespace: Any, names: tuple[str, ...]) -> Callable[[Translation], Translation]:
    def register(translation: Translation) -> Translation:
        for name in names:
            packet, _, overload = name.partition(".")
            target = getattr(getattr(namespace, packet, None), overload or "default", None)
            if target is None:
                continue  # an operator that this torch does not have (2.11 and 2.13 differ in a few)
            if target in _TABLE:
                raise ValueError(f"{target} is translated twice")
            _TABLE[target] = translation
        return translation

    return register


@cache
def _load() -> None:
    from sardonyx.translate import aten as families

    for module in pkgutil.iter_modules(families.__path__):
        importlib.import_module(f"{families.__name__}.{module.name}")


def find(target: Any) -> Translation | None:
    """The translation of an operator in our own table."""
    _load()
    return _TABLE.get(target)


def targets() -> Iterator[Any]:
    """Every operator that our own table translates."""
    _load()
    return iter(_TABLE)


def is_size_arithmetic(node: torch.fx.Node) -> bool:
    """Whether the node computes a number from sizes, which values read off tensors express instead."""
    if node.op != "call_function" or isinstance(node.meta.get("val"), torch.Tensor):
        return False
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymBool, int)) and (
        node.target is not operator.getitem
    )
