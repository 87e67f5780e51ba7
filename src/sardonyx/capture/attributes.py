"""What a module's code may read beside its arguments: every attribute of every module in it, and of what they hold."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Iterator
from itertools import chain
from operator import attrgetter, is_, itemgetter
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from sardonyx.capture.arguments import is_constant, layout_class, slots

log = logging.getLogger(__name__)

_MAX_VALUES = 100_000
"""Values looked at for a module. More than that is data, which a model does not read attribute by attribute."""
_dtype, _shape, _device = attrgetter("dtype"), attrgetter("shape"), attrgetter("device")
_strides = torch.Tensor.stride


class Attributes:
    """Remembers the attributes of a module well enough to notice a change.

    Whether anything changed is told at each call, from the identity of every value and the kind of every tensor: tens
    of nanoseconds each. `key` tells it by value: two states with equal keys are the same but for values of tensors.
    What is noticed: an attribute set, added or removed on the module, on a module inside or on an object it holds, as
    its configuration; a list or dict edited; a module or hook replaced; a class given another method; a global variable
    that such a method names. What is not: a change that only a function outside of the modules sees, in a closure, or
    inside an object that is written in C, numpy's arrays apart.
    """

    def __init__(self, module: torch.nn.Module, mask: Mask | None = None) -> None:
        self._mask = mask
        self._tokens: list[Any] = []
        self._views: list[Collection[Any]] = []
        self._mappings: list[dict[Any, Any]] = []
        self._met: dict[int, int] = {}
        self._tensors: list[torch.Tensor] = []
        self._arrays: list[tuple[np.ndarray, bytes]] = []
        self._left = _MAX_VALUES
        self._globals: dict[int, tuple[dict[str, Any], set[str]]] = {}
        self._walk(module)
        for held, names in self._globals.values():
            self._walk_globals(held, sorted(names))
        self.key = tuple(self._tokens)
        self._empty = [view for view in self._views if not view]
        self._views = [view for view in self._views if view]
        self._values = list(chain.from_iterable(self._views))
        self._lengths = list(map(len, self._views))
        self._names = list(map(list, self._mappings))
        self._kinds = self._kinds_now()
        if self._left < 0:
            log.warning("%s holds so many objects that changes of some are not noticed", type(module).__name__)
        del self._tokens, self._met, self._globals

    def unchanged(self) -> bool:
        """Whether everything is as it was."""
        try:
            return self._is_unchanged()
        except KeyError:  # a global variable that is gone
            return False

    def _is_unchanged(self) -> bool:
        return (
            not any(self._empty)
            and list(map(len, self._views)) == self._lengths
            and list(map(list, self._mappings)) == self._names
            and all(map(is_, chain.from_iterable(self._views), self._values))
            and self._kinds_now() == self._kinds
            and all(array.tobytes() == before for array, before in self._arrays)
        )

    def _kinds_now(self) -> list[list[Any]]:
        return [list(map(ask, self._tensors)) for ask in (_dtype, _shape, _strides, _device)]

    def _walk(self, x: Any) -> None:
        if type(x) in (int, float) or is_constant(x):
            self._tokens.append((type(x), x.hex() if type(x) is float else x))
        elif id(x) in self._met:
            self._tokens.append(("again", self._met[id(x)]))
        else:
            self._met[id(x)] = len(self._met)
            self._walk_object(x)

    def _walk_object(self, x: Any) -> None:
        if _is_strided_tensor(x):
            self._tensors.append(x)
            self._tokens.append((type(x), x.dtype, x.shape, x.device, x.stride()))
        elif isinstance(x, np.ndarray):
            self._arrays.append((x, x.tobytes()))
            self._tokens.append((np.ndarray, x.dtype, x.shape, self._arrays[-1][1]))
        elif self._left < 0 or _is_compared_by_identity(x):
            self._tokens.append(_Identity(x))
        else:
            self._walk_into(x)

    def _walk_into(self, x: Any) -> None:
        is_module = isinstance(x, torch.nn.Module)
        if not is_module and layout_class(type(x)) is None:
            self._tokens.append(_Identity(x))  # what it is made of shows only in part
        masked = self._mask is not None and x is self._mask.owner
        views, mappings = (
            ([self._mask], [self._mask.items()]) if self._mask and masked else (list(_live_views(x)), _mappings(x))
        )
        self._views += views
        self._mappings += [] if masked else mappings
        self._left -= sum(map(len, views))
        self._tokens += (type(x), *map(len, views))
        for key, child in chain.from_iterable(mapping.items() for mapping in mappings):
            self._tokens.append(_key_token(key))
            self._walk(child)
        for child in x if isinstance(x, (tuple, list, set)) else slots(x).values() if not mappings else ():
            self._walk(child)
        if is_module:
            self._walk_class(type(x))

    def _walk_class(self, kind: type) -> None:
        """Methods and constants of the classes that modules are of; torch's own are taken for granted."""
        for parent in kind.__mro__:
            if parent.__module__.partition(".")[0] not in _UNCHECKED_PACKAGES and id(parent) not in self._met:
                self._met[id(parent)] = len(self._met)
                self._views.append(vars(parent).values())
                self._tokens += map(_Identity, vars(parent).values())
                for function in vars(parent).values():
                    if isinstance(function, FunctionType):
                        held, names = self._globals.setdefault(id(function.__globals__), (function.__globals__, set()))
                        names |= _names_in(function.__code__) & held.keys()

    def _walk_globals(self, held: dict[str, Any], names: list[str]) -> None:
        """Global variables that methods name: numbers, lists and dicts by value, all else by identity."""
        if names:
            self._views.append(_NamedValues(held, names))
        for name in names:
            self._tokens.append((str, name))
            is_data = type(held[name]) in (list, dict, set, tuple, int, float) or is_constant(held[name])
            self._walk(held[name]) if is_data else self._tokens.append(_Identity(held[name]))


_UNCHECKED_PACKAGES = ("torch", "builtins", "typing", "abc")


def _is_strided_tensor(x: Any) -> bool:
    """Whether it is a tensor that has sizes and strides."""
    return isinstance(x, torch.Tensor) and not is_lazy(x) and x.layout == torch.strided


def _is_compared_by_identity(x: Any) -> bool:
    """Whether it is an object of torch's, a graph or a generator say, that is no module and holds no settings."""
    return type(x).__module__.partition(".")[0] == "torch" and not isinstance(x, torch.nn.Module)


def _key_token(key: Hashable) -> Hashable:
    return (type(key), key) if type(key) is int or is_constant(key) else _Identity(key)


def _mappings(x: Any) -> list[dict[Any, Any]]:
    """The dicts that name what an object holds, empty ones apart."""
    held = (x if isinstance(x, dict) else None, getattr(x, "__dict__", None))
    return [mapping for mapping in held if isinstance(mapping, dict) and mapping]


def _live_views(x: Any) -> Iterator[Collection[Any]]:
    """The values that an object holds, as collections that always have what it holds now."""
    if isinstance(x, (list, set)):
        yield x
    elif isinstance(x, dict):
        yield x.values() if x else x
    held = getattr(x, "__dict__", None)
    if isinstance(held, dict):
        yield held.values() if held else held
    elif slots(x):
        yield _SlotValues(x)


def _names_in(code: CodeType) -> set[str]:
    """Every name that code uses, in functions inside as well."""
    inside = (_names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inside)


class _NamedValues(Collection[Any]):
    """A live view of some values of a dict; raises if one is gone."""

    def __init__(self, held: dict[str, Any], names: list[str]) -> None:
        self._held, self._count = held, len(names)
        self._get = itemgetter(*names, names[0])  # of a single name it would give no tuple

    def __iter__(self) -> Iterator[Any]:
        return iter(self._get(self._held))

    def __len__(self) -> int:
        return self._count + 1

    def __contains__(self, x: object) -> bool:
        return x in list(self)


class _SlotValues(Collection[Any]):
    """A live view of an object that has slots in place of a dict."""

    def __init__(self, x: Any) -> None:
        self._x = x

    def __iter__(self) -> Iterator[Any]:
        held = slots(self._x)
        return chain(held.keys(), held.values())

    def __len__(self) -> int:
        return 2 * len(slots(self._x))

    def __contains__(self, x: object) -> bool:
        return x in list(self)


class Mask(Collection[Any]):
    """A live view of a module's attributes that hides one which is there only for a while."""

    def __init__(self, owner: torch.nn.Module, name: str, hidden: Any, shown: Callable[[], Any]) -> None:
        self.owner = owner
        self._name, self._hidden, self._shown = name, hidden, shown

    def items(self) -> dict[str, Any]:
        """The attributes as they are without it."""
        items = dict(vars(self.owner))
        if items.get(self._name) is self._hidden:
            del items[self._name]
            shown = self._shown()
            if shown is not None:
                items[self._name] = shown
        return items

    def __iter__(self) -> Iterator[Any]:
        items = self.items()
        return chain(items.keys(), items.values())

    def __len__(self) -> int:
        return 2 * len(self.items())

    def __contains__(self, x: object) -> bool:
        return x in list(self)


class _Identity:
    """An object that is compared by identity, and kept alive so that no other takes its address."""

    def __init__(self, x: Any) -> None:
        self._x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self._x is other._x

    def __hash__(self) -> int:
        return id(self._x)

    def __repr__(self) -> str:
        return f"{type(self._x).__name__}"


def first_difference(before: tuple[Hashable, ...], after: tuple[Hashable, ...]) -> str:
    """The name of the attribute that two keys first differ in, as far as it can be told."""
    at = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after)))
    known = set(_attribute_names(before))
    added = [name for name in _attribute_names(after) if name not in known]
    last = list(_attribute_names(after[: at + 1]))[-1:]
    return str((added or last or ["?"])[0])


def _attribute_names(key: tuple[Hashable, ...]) -> Iterator[str]:
    return (token[1] for token in key if isinstance(token, tuple) and token[0] is str)
