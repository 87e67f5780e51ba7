"""The arguments of a call and its results: tensors, sizes, and all that is around them.

Arguments are taken apart into tensors, integers and a key of everything else: how they are arranged, of which classes,
with which values. Anything that Python code may hold is understood, as long as it is made of attributes and of lists,
tuples and dicts: data classes, outputs and caches of transformers. What is not is refused.
"""

from __future__ import annotations

import enum
import types
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from sardonyx.capture.views import layout_of
from sardonyx.errors import CaptureError

_BY_VALUE: tuple[type, ...] = (
    *(type(None), bool, str, bytes, complex, range, type(...)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_BY_IDENTITY = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, enum.Enum)
_BUILTIN_CONTAINERS = (tuple, list, OrderedDict, dict)
_HEAP_TYPE = 1 << 9
"""CPython's flag of classes that Python code defines; what lacks it has state that attributes do not show."""


@dataclass
class Arguments:
    """What a call was given. Two calls with equal keys differ at most in sizes, integers and values of tensors."""

    tensors: list[torch.Tensor] = field(default_factory=list)
    integers: list[int] = field(default_factory=list)
    containers: list[Any] = field(default_factory=list)
    """Every list, dict and object among the arguments, in the order they are met."""
    key: tuple[Any, ...] = ()
    gaps: list[int] = field(default_factory=list)
    """Which tensors have memory of others between their elements."""

    @classmethod
    def of(cls, given: Any) -> Arguments:
        """Take arguments apart."""
        found = cls()
        tokens: list[Any] = []
        _Walk(found, tokens).visit(given)
        found.key = tuple(tokens)
        return found

    def sizes(self) -> tuple[int, ...]:
        """Every size of every tensor, then the integers."""
        found: list[int] = []
        for tensor in self.tensors:
            found += tensor.shape
        return (*found, *self.integers)

    def dense(self) -> list[torch.Tensor]:
        """The tensors, copied where their memory has gaps, so that strides tell no more than an order of axes."""
        found = [tensor.detach() for tensor in self.tensors]
        for index in self.gaps:
            found[index] = found[index].contiguous()
        return found


class _Walk:
    def __init__(self, found: Arguments, tokens: list[Any]) -> None:
        self._found, self._tokens = found, tokens
        self._met: dict[int, int] = {}

    def visit(self, x: Any) -> None:
        kind = type(x)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            self._tensor(x)
        elif kind is int:
            self._tokens.append(int)
            self._found.integers.append(x)
        elif kind is float:
            self._tokens.append((float, x.hex()))
        elif is_constant(x):
            self._tokens.append((kind, x))
        else:
            self._container(x)

    def _tensor(self, x: torch.Tensor) -> None:
        if x.layout != torch.strided:
            raise unsupported_argument(f"an argument is a tensor of layout {x.layout}")
        at = self._met.setdefault(id(x), len(self._found.tensors))
        if at < len(self._found.tensors):
            self._tokens.append(("tensor", at))
            return
        self._found.tensors.append(x)
        order = None if x.is_contiguous() else layout_of(x)
        has_gaps = order is None and not x.is_contiguous()
        if has_gaps:
            self._found.gaps.append(at)
        self._tokens += (x.dtype, x.device, x.dim(), "gaps" if has_gaps else order)

    def _container(self, x: Any) -> None:
        at = self._met.setdefault(id(x), -1 - len(self._found.containers))
        self._tokens.append(type(x))
        if at != -1 - len(self._found.containers):
            self._tokens.append(at)
            return
        self._found.containers.append(x)
        for part in items_and_attributes(x):
            self._tokens += (len(part), *map(_item_key, part))
            for child in part.values():
                self.visit(child)


def _item_key(key: Any) -> Hashable:
    """The key of an item, told from others that are equal to it, as 1 is to True."""
    if type(key) in (str, int, float) or is_constant(key):
        return key if type(key) is str else (type(key), key)
    if type(key) is tuple:
        return tuple(map(_item_key, key))
    raise unsupported_argument(f"a dict among the arguments has a {type(key).__name__} for a key")


def is_constant(x: Any) -> bool:
    """Whether a value is one that nothing can change, so that it can be compared and handed on as it is."""
    return isinstance(x, (*_BY_VALUE, *_BY_IDENTITY)) and not isinstance(x, torch.nn.Module)


def unsupported_argument(what: str) -> CaptureError:
    """The error for what cannot be handed to a compiled module."""
    return CaptureError(what, hint='give tensors, or tuples, dicts and data classes of them; fallback="warn" allows it')


# Containers: what they hold, as one mapping for their items and one for their attributes


def items_and_attributes(x: Any) -> tuple[Mapping[Any, Any], Mapping[str, Any]]:
    """What an object holds: items by key or place, and attributes by name."""
    base = layout_class(type(x))
    if base is None:
        raise unsupported_argument(f"an argument or a result has a {type(x).__module__}.{type(x).__qualname__} in it")
    items: Mapping[Any, Any] = {}
    if issubclass(base, dict):
        items = dict(x.items()) if type(x) in _BUILTIN_CONTAINERS else dict(base.items(x))
    elif base is not object:
        items = dict(enumerate(base.__iter__(x)))
    return items, {} if type(x) in _BUILTIN_CONTAINERS else {**slots(x), **getattr(x, "__dict__", {})}


def layout_class(kind: type) -> Any:
    """The class that an object's memory is laid out by, if attributes and items show all of it."""
    if kind in _BUILTIN_CONTAINERS:
        return kind
    if issubclass(kind, (torch.Tensor, torch.nn.Module)):
        return None
    base = next(parent for parent in kind.__mro__ if not parent.__flags__ & _HEAP_TYPE)
    if kind is torch.Size:
        return tuple
    return base if kind is not base and base in (*_BUILTIN_CONTAINERS, object) else None


def slots(x: Any) -> dict[str, Any]:
    """What an object holds in slots."""
    names = (name for kind in type(x).__mro__ for name in _names(vars(kind).get("__slots__", ())))
    return {n: getattr(x, n) for n in names if n not in ("__dict__", "__weakref__") and hasattr(x, n)}


def _names(slots: Any) -> Sequence[str]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def new_container(kind: type, items: Mapping[Any, Any], attributes: Mapping[str, Any]) -> Any:
    """A new object of a class, holding what `items_and_attributes` told of another."""
    base: Any = layout_class(kind)
    new = torch.Size.__new__ if kind is torch.Size else base.__new__
    made = new(kind, tuple(items.values())) if base is tuple else new(kind)
    set_contents(made, items, attributes)
    return made


def set_contents(x: Any, items: Mapping[Any, Any], attributes: Mapping[str, Any]) -> None:
    """Let an object hold exactly this, past its own ways of setting things."""
    base = layout_class(type(x))
    if base is list:
        list.__setitem__(x, slice(None), list(items.values()))
    elif base is not None and issubclass(base, dict):
        base.clear(x)
        for key, value in items.items():
            base.__setitem__(x, key, value)
    if type(x) in _BUILTIN_CONTAINERS:
        return
    held = getattr(x, "__dict__", {})
    for name in [name for name in held if name not in attributes]:
        del held[name]
    for name, value in attributes.items():
        object.__setattr__(x, name, value)


@dataclass
class ArgumentsCopy:
    """A copy of arguments that shares nothing with them but constants, and holds other tensors and integers."""

    value: Any
    containers: list[Any]
    """The copies of `Arguments.containers`, in that order."""


def copy_arguments(given: Any, tensors: Sequence[Any], integers: Sequence[Any]) -> ArgumentsCopy:
    """The same arrangement around other tensors and integers, which are in the order of `Arguments`."""
    made: dict[int, Any] = {}
    containers: list[Any] = []
    new_tensors, new_integers = iter(tensors), iter(integers)

    def copied(x: Any) -> Any:
        if type(x) is int:
            return next(new_integers)
        if is_constant(x) or type(x) is float:
            return x
        if id(x) not in made:
            if isinstance(x, torch.Tensor):
                made[id(x)] = next(new_tensors)
            else:
                container(x)
        return made[id(x)]

    def container(x: Any) -> None:
        place = len(containers)
        containers.append(None)
        base = layout_class(type(x))
        if base is not tuple:  # known before its parts are, which may lead back to it
            made[id(x)] = new_container(type(x), {}, {})
        items, attributes = ({name: copied(child) for name, child in part.items()} for part in items_and_attributes(x))
        if base is tuple:
            made[id(x)] = new_container(type(x), items, attributes)
        else:
            set_contents(made[id(x)], items, attributes)
        containers[place] = made[id(x)]

    return ArgumentsCopy(copied(given), containers)


# Results


@dataclass
class ResultContext:
    """One call, as far as it is needed to put its results together."""

    outputs: Sequence[torch.Tensor]
    arguments: Arguments
    sizes: Sequence[int]
    """The integers that results have in them."""
    made: dict[int, Any] = field(default_factory=dict)


ResultBuilder: TypeAlias = Callable[[ResultContext], Any]


class Results:
    """How to put results together from a model's outputs, and how the call changed what it was given.

    Made from one call of the module: its result, and its arguments as the call left them. A list, dict or object that
    the call changed is changed in the same way for the caller, whose tensors are not copied.
    """

    def __init__(
        self,
        result: Any,
        copy: ArgumentsCopy,
        before: Sequence[Any],
        tensors: Sequence[Any],
        gaps: Sequence[int],
        size: Any,
    ) -> None:
        self._new: list[torch.Tensor] = []
        self._gaps = gaps
        self._places: dict[int, int] = {}
        self._given = {id(tensor): index for index, tensor in enumerate(tensors)}
        self._containers = {id(container): index for index, container in enumerate(copy.containers)}
        self._size = size
        self._alive = (result, copy, tensors)
        self._changes = [
            (index, *self._makers(items_and_attributes(container)))
            for index, (container, held) in enumerate(zip(copy.containers, before, strict=True))
            if not _same_contents(_contents(container), held)
        ]
        self._result = self._maker(result)
        del self._given, self._alive, self._containers, self._size, self._places, self._gaps

    def take(self) -> tuple[torch.Tensor, ...]:
        """The tensors that the module computed in the call that this was made from; they are not kept."""
        taken, self._new = tuple(self._new), []
        return taken

    def put_together(self, call: ResultContext) -> Any:
        """The result of a call, whose arguments are changed as the module would."""
        new = [
            (index, _build_all(items, call), _build_all(attributes, call)) for index, items, attributes in self._changes
        ]
        for index, items, attributes in new:
            set_contents(call.arguments.containers[index], items, attributes)
        return self._result(call)

    def _makers(self, both: Sequence[Mapping[Any, Any]]) -> tuple[dict[Any, ResultBuilder], dict[Any, ResultBuilder]]:
        items, attributes = ({name: self._maker(child) for name, child in part.items()} for part in both)
        return items, attributes

    def _maker(self, x: Any) -> ResultBuilder:
        if isinstance(x, torch.Tensor):
            return self._tensor(x)
        if isinstance(x, torch.SymInt):
            return self._size(x)  # type: ignore[no-any-return]  # a maker, by whoever knows the sizes
        if type(x) in (int, float) or is_constant(x):
            return lambda call: x
        if id(x) in self._containers:
            at = self._containers[id(x)]
            return lambda call: call.arguments.containers[at]
        return self._container(x)

    def _tensor(self, x: torch.Tensor) -> ResultBuilder:
        if id(x) in self._given:
            given = self._given[id(x)]
            if given in self._gaps:  # a copy without them was traced, which `contiguous()` gives back as it is
                raise CaptureError(
                    "forward returns an argument whose memory has gaps, or a copy of it without",
                    hint='give it contiguous(); fallback="warn" lets torch.compile do it',
                )
            return lambda call: call.arguments.tensors[given]
        at = self._places.setdefault(id(x), len(self._new))
        if at == len(self._new):
            self._new.append(x)
        return lambda call: call.outputs[at]

    def _container(self, x: Any) -> ResultBuilder:
        kind, name = type(x), id(x)
        items, attributes = self._makers(items_and_attributes(x))

        def maker(call: ResultContext) -> Any:
            if name not in call.made:
                call.made[name] = new_container(kind, _build_all(items, call), _build_all(attributes, call))
            return call.made[name]

        return maker


def _build_all(makers: Mapping[Any, ResultBuilder], call: ResultContext) -> dict[Any, Any]:
    return {name: maker(call) for name, maker in makers.items()}


def contents_of_containers(copy: ArgumentsCopy) -> list[list[tuple[Any, Any]]]:
    """What each container of a copy holds now, to be compared with later."""
    return [_contents(container) for container in copy.containers]


def _contents(container: Any) -> list[tuple[Any, Any]]:
    return [item for part in items_and_attributes(container) for item in part.items()]


def _same_contents(now: Sequence[tuple[Any, Any]], before: Sequence[tuple[Any, Any]]) -> bool:
    """Whether a container holds the same objects under the same names."""
    return len(now) == len(before) and all(
        name == other and (child is old or (is_constant(child) and type(child) is type(old) and child == old))
        for (name, child), (other, old) in zip(now, before, strict=True)
    )
