"""Detect changes of what a module's code may read: attributes of its modules, their classes and their globals."""

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
"""Limit of values checked for a module. More is likely data, which a model does not read attribute by attribute."""
_dtype, _shape, _device = attrgetter("dtype"), attrgetter("shape"), attrgetter("device")
_strides = torch.Tensor.stride


class Attributes:
    """Detects changes of a module's attributes.

    `unchanged` compares the identity of every value and the metadata of every tensor at each call: tens of nanoseconds
    each. `key` compares by value: two states with equal keys differ at most in tensor values.
    Detected: an attribute set, added or removed on the module, a submodule or an object they refer to, such as a
    configuration; a list or dict edited; a submodule or hook replaced; a method of a class replaced; a global variable
    that a method names. Not detected: changes in closures, in functions outside the modules, and inside objects
    implemented in C, except numpy arrays.
    """

    def __init__(self, module: torch.nn.Module, mask: Mask | None = None) -> None:
        self._mask = mask
        self._tokens: list[Any] = []
        self._views: list[Collection[Any]] = []
        self._mappings: list[dict[Any, Any]] = []
        self._visited: dict[int, int] = {}
        self._tensors: list[torch.Tensor] = []
        self._arrays: list[tuple[np.ndarray, bytes]] = []
        self._remaining = _MAX_VALUES
        self._globals: dict[int, tuple[dict[str, Any], set[str]]] = {}
        self._walk(module)
        for variables, names in self._globals.values():
            self._walk_globals(variables, sorted(names))
        self.key = tuple(self._tokens)
        self._empty = [view for view in self._views if not view]
        self._views = [view for view in self._views if view]
        self._values = list(chain.from_iterable(self._views))
        self._lengths = list(map(len, self._views))
        self._names = list(map(list, self._mappings))
        self._metadata = self._tensor_metadata()
        if self._remaining < 0:
            log.warning("%s has so many objects that changes of some are not detected", type(module).__name__)
        del self._tokens, self._visited, self._globals

    def unchanged(self) -> bool:
        """Whether nothing changed."""
        try:
            return self._is_unchanged()
        except KeyError:  # a global variable was deleted
            return False

    def _is_unchanged(self) -> bool:
        return (
            not any(self._empty)
            and list(map(len, self._views)) == self._lengths
            and list(map(list, self._mappings)) == self._names
            and all(map(is_, chain.from_iterable(self._views), self._values))
            and self._tensor_metadata() == self._metadata
            and all(array.tobytes() == before for array, before in self._arrays)
        )

    def _tensor_metadata(self) -> list[list[Any]]:
        return [list(map(ask, self._tensors)) for ask in (_dtype, _shape, _strides, _device)]

    def _walk(self, x: Any) -> None:
        if type(x) in (int, float) or is_constant(x):
            self._tokens.append((type(x), x.hex() if type(x) is float else x))
        elif id(x) in self._visited:
            self._tokens.append(("again", self._visited[id(x)]))
        else:
            self._visited[id(x)] = len(self._visited)
            self._walk_object(x)

    def _walk_object(self, x: Any) -> None:
        if _is_strided_tensor(x):
            self._tensors.append(x)
            self._tokens.append((type(x), x.dtype, x.shape, x.device, x.stride()))
        elif isinstance(x, np.ndarray):
            self._arrays.append((x, x.tobytes()))
            self._tokens.append((np.ndarray, x.dtype, x.shape, self._arrays[-1][1]))
        elif self._remaining < 0 or _is_compared_by_identity(x):
            self._tokens.append(_Identity(x))
        else:
            self._walk_into(x)

    def _walk_into(self, x: Any) -> None:
        is_module = isinstance(x, torch.nn.Module)
        if not is_module and layout_class(type(x)) is None:
            self._tokens.append(_Identity(x))  # its attributes do not show its whole state
        masked = self._mask is not None and x is self._mask.owner
        views, mappings = (
            ([self._mask], [self._mask.items()]) if self._mask and masked else (list(_live_views(x)), _mappings(x))
        )
        self._views += views
        self._mappings += [] if masked else mappings
        self._remaining -= sum(map(len, views))
        self._tokens += (type(x), *map(len, views))
        for key, child in chain.from_iterable(mapping.items() for mapping in mappings):
            self._tokens.append(_key_token(key))
            self._walk(child)
        for child in x if isinstance(x, (tuple, list, set)) else slots(x).values() if not mappings else ():
            self._walk(child)
        if is_module:
            self._walk_class(type(x))

    def _walk_class(self, kind: type) -> None:
        """Visit the methods and constants of a module's class and its bases, except torch's."""
        for parent in kind.__mro__:
            if parent.__module__.partition(".")[0] not in _UNCHECKED_PACKAGES and id(parent) not in self._visited:
                self._visited[id(parent)] = len(self._visited)
                self._views.append(vars(parent).values())
                self._tokens += map(_Identity, vars(parent).values())
                for function in vars(parent).values():
                    if isinstance(function, FunctionType):
                        variables = function.__globals__
                        names = self._globals.setdefault(id(variables), (variables, set()))[1]
                        names |= _names_in(function.__code__) & variables.keys()

    def _walk_globals(self, variables: dict[str, Any], names: list[str]) -> None:
        """Visit global variables that methods name: numbers and containers by value, everything else by identity."""
        if names:
            self._views.append(_NamedValues(variables, names))
        for name in names:
            self._tokens.append((str, name))
            value = variables[name]
            is_data = type(value) in (list, dict, set, tuple, int, float) or is_constant(value)
            self._walk(value) if is_data else self._tokens.append(_Identity(value))


_UNCHECKED_PACKAGES = ("torch", "builtins", "typing", "abc")


def _is_strided_tensor(x: Any) -> bool:
    """Whether it is a tensor with sizes and strides."""
    return isinstance(x, torch.Tensor) and not is_lazy(x) and x.layout == torch.strided


def _is_compared_by_identity(x: Any) -> bool:
    """Whether it is an object of torch other than a module, such as a graph or a generator."""
    return type(x).__module__.partition(".")[0] == "torch" and not isinstance(x, torch.nn.Module)


def _key_token(key: Hashable) -> Hashable:
    return (type(key), key) if type(key) is int or is_constant(key) else _Identity(key)


def _mappings(x: Any) -> list[dict[Any, Any]]:
    """Return the non-empty dicts of an object: itself and its `__dict__`."""
    candidates = (x if isinstance(x, dict) else None, getattr(x, "__dict__", None))
    return [mapping for mapping in candidates if isinstance(mapping, dict) and mapping]


def _live_views(x: Any) -> Iterator[Collection[Any]]:
    """Yield live views of the values of an object, which follow its changes."""
    if isinstance(x, (list, set)):
        yield x
    elif isinstance(x, dict):
        yield x.values() if x else x
    attributes = getattr(x, "__dict__", None)
    if isinstance(attributes, dict):
        yield attributes.values() if attributes else attributes
    elif slots(x):
        yield _SlotValues(x)


def _names_in(code: CodeType) -> set[str]:
    """Return every name that code uses, nested functions included."""
    inside = (_names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inside)


class _NamedValues(Collection[Any]):
    """A live view of some values of a dict; raises KeyError if one was deleted."""

    def __init__(self, values: dict[str, Any], names: list[str]) -> None:
        self._dict, self._count = values, len(names)
        self._get = itemgetter(*names, names[0])  # repeated, since of a single name it returns no tuple

    def __iter__(self) -> Iterator[Any]:
        return iter(self._get(self._dict))

    def __len__(self) -> int:
        return self._count + 1

    def __contains__(self, x: object) -> bool:
        return x in list(self)


class _SlotValues(Collection[Any]):
    """A live view of an object with `__slots__`."""

    def __init__(self, x: Any) -> None:
        self._x = x

    def __iter__(self) -> Iterator[Any]:
        values = slots(self._x)
        return chain(values.keys(), values.values())

    def __len__(self) -> int:
        return 2 * len(slots(self._x))

    def __contains__(self, x: object) -> bool:
        return x in list(self)


class Mask(Collection[Any]):
    """A live view of a module's attributes that shows the original value of one that is temporarily replaced."""

    def __init__(self, owner: torch.nn.Module, name: str, hidden: Any, shown: Callable[[], Any]) -> None:
        self.owner = owner
        self._name, self._hidden, self._shown = name, hidden, shown

    def items(self) -> dict[str, Any]:
        """Return the attributes, with the original value of the replaced one."""
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
    """A reference that compares by identity, and keeps the object alive so that its address is not reused."""

    def __init__(self, x: Any) -> None:
        self._x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self._x is other._x

    def __hash__(self) -> int:
        return id(self._x)

    def __repr__(self) -> str:
        return f"{type(self._x).__name__}"


def first_difference(before: tuple[Hashable, ...], after: tuple[Hashable, ...]) -> str:
    """Return the name of the first attribute that differs between two keys, or "?"."""
    at = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after)))
    known = set(_attribute_names(before))
    added = [name for name in _attribute_names(after) if name not in known]
    last = list(_attribute_names(after[: at + 1]))[-1:]
    return str((added or last or ["?"])[0])


def _attribute_names(key: tuple[Hashable, ...]) -> Iterator[str]:
    return (token[1] for token in key if isinstance(token, tuple) and token[0] is str)
