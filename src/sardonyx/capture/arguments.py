"""Flatten the arguments of a call to tensors and integers, and rebuild its results.

Arguments are flattened into tensors, integers and a key of everything else: structure, classes and values. Supported
are lists, tuples, dicts, and objects of Python classes with attributes or slots, such as data classes and the outputs
and caches of transformers. Other objects are an error.
"""

from __future__ import annotations

import enum
import types
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from sardonyx.capture.cache_buffers import CacheBuffer, buffer_of
from sardonyx.capture.views import layout_of
from sardonyx.errors import CaptureError

_BY_VALUE: tuple[type, ...] = (
    *(type(None), bool, str, bytes, complex, range, type(...)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_BY_IDENTITY = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, enum.Enum)
_BUILTIN_CONTAINERS = (tuple, list, OrderedDict, dict)
_HEAP_TYPE = 1 << 9
"""Py_TPFLAGS_HEAPTYPE, the flag of classes defined in Python; others may have state that attributes do not show."""


@dataclass
class Arguments:
    """Flattened arguments of a call. Calls with equal keys differ at most in sizes, integers and tensor values."""

    tensors: list[torch.Tensor] = field(default_factory=list)
    integers: list[int] = field(default_factory=list)
    containers: list[Any] = field(default_factory=list)
    """Every list, dict and object among the arguments, in the order of traversal."""
    key: tuple[Any, ...] = ()
    gaps: list[int] = field(default_factory=list)
    """Indices of tensors whose memory has gaps."""
    cached: list[tuple[int, CacheBuffer]] = field(default_factory=list)
    """Indices of views of buffers, whose key is that of a contiguous tensor, and the buffers."""

    @classmethod
    def of(cls, call: Any) -> Arguments:
        """Flatten the arguments of a call."""
        arguments = cls()
        tokens: list[Any] = []
        _Walk(arguments, tokens).visit(call)
        arguments.key = tuple(tokens)
        return arguments

    def sizes(self) -> tuple[int, ...]:
        """Return all sizes of all tensors, then the integers."""
        sizes: list[int] = []
        for tensor in self.tensors:
            sizes += tensor.shape
        return (*sizes, *self.integers)

    def dense(self) -> list[torch.Tensor]:
        """Return the tensors, detached; those whose memory has gaps are made contiguous, but for views of caches."""
        tensors = [tensor.detach() for tensor in self.tensors]
        for index in self.gaps:
            tensors[index] = tensors[index].contiguous()
        for index, buffer in self.cached:
            buffer.adopt(tensors[index])
        return tensors

    def to_trace(self) -> list[torch.Tensor]:
        """Return the tensors, detached, with the layouts that their key says."""
        tensors = self.dense()
        for index, _ in self.cached:
            tensors[index] = tensors[index].contiguous()
        return tensors


class _Walk:
    def __init__(self, arguments: Arguments, tokens: list[Any]) -> None:
        self._arguments, self._tokens = arguments, tokens
        self._visited: dict[int, int] = {}

    def visit(self, x: Any) -> None:
        kind = type(x)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            self._tensor(x)
        elif kind is int:
            self._tokens.append(int)
            self._arguments.integers.append(x)
        elif kind is float:
            self._tokens.append((float, x.hex()))
        elif is_constant(x):
            self._tokens.append((kind, x))
        else:
            self._container(x)

    def _tensor(self, x: torch.Tensor) -> None:
        if x.layout != torch.strided:
            raise unsupported_argument(f"an argument is a tensor of layout {x.layout}")
        at = self._visited.setdefault(id(x), len(self._arguments.tensors))
        if at < len(self._arguments.tensors):
            self._tokens.append(("tensor", at))
            return
        self._arguments.tensors.append(x)
        buffer = buffer_of(x)
        is_cached = buffer is not None
        if buffer is not None:
            self._arguments.cached.append((at, buffer))
        order = None if is_cached or x.is_contiguous() else layout_of(x)
        has_gaps = not is_cached and order is None and not x.is_contiguous()
        if has_gaps:
            self._arguments.gaps.append(at)
        self._tokens += (x.dtype, x.device, x.dim(), "gaps" if has_gaps else order)

    def _container(self, x: Any) -> None:
        at = self._visited.setdefault(id(x), -1 - len(self._arguments.containers))
        self._tokens.append(type(x))
        if at != -1 - len(self._arguments.containers):
            self._tokens.append(at)
            return
        self._arguments.containers.append(x)
        for part in items_and_attributes(x):
            self._tokens += (len(part), *map(_item_key, part))
            for child in part.values():
                self.visit(child)


def _item_key(key: Any) -> Hashable:
    """Return a hashable token of a dict key that also distinguishes types: 1 == True."""
    if type(key) in (str, int, float) or is_constant(key):
        return key if type(key) is str else (type(key), key)
    if type(key) is tuple:
        return tuple(map(_item_key, key))
    raise unsupported_argument(f"a dict among the arguments has a key of type {type(key).__name__}")


def is_constant(x: Any) -> bool:
    """Whether a value is immutable or compared by identity, so that it can be part of a key."""
    return isinstance(x, (*_BY_VALUE, *_BY_IDENTITY)) and not isinstance(x, torch.nn.Module)


def unsupported_argument(what: str) -> CaptureError:
    """Return the error for an argument that a compiled module cannot take."""
    return CaptureError(what, hint='pass tensors, or tuples, dicts and data classes of them; fallback="warn" allows it')


# Containers: one mapping of their items and one of their attributes


def items_and_attributes(x: Any) -> tuple[Mapping[Any, Any], Mapping[str, Any]]:
    """Return the items of an object by key or index, and its attributes by name."""
    base = layout_class(type(x))
    if base is None:
        raise unsupported_argument(f"an argument or a result contains a {type(x).__module__}.{type(x).__qualname__}")
    items: Mapping[Any, Any] = {}
    if issubclass(base, dict):
        items = dict(x.items()) if type(x) in _BUILTIN_CONTAINERS else dict(base.items(x))
    elif base is not object:
        items = dict(enumerate(base.__iter__(x)))
    return items, {} if type(x) in _BUILTIN_CONTAINERS else {**slots(x), **getattr(x, "__dict__", {})}


def layout_class(kind: type) -> Any:
    """Return the built-in base class of a container class; None if items and attributes do not show its whole state."""
    if kind in _BUILTIN_CONTAINERS:
        return kind
    if issubclass(kind, (torch.Tensor, torch.nn.Module)):
        return None
    base = next(parent for parent in kind.__mro__ if not parent.__flags__ & _HEAP_TYPE)
    if kind is torch.Size:
        return tuple
    return base if kind is not base and base in (*_BUILTIN_CONTAINERS, object) else None


def slots(x: Any) -> dict[str, Any]:
    """Return the values of an object's slots by name."""
    names = (name for kind in type(x).__mro__ for name in _names(vars(kind).get("__slots__", ())))
    return {n: getattr(x, n) for n in names if n not in ("__dict__", "__weakref__") and hasattr(x, n)}


def _names(slots: Any) -> Sequence[str]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def new_container(kind: type, items: Mapping[Any, Any], attributes: Mapping[str, Any]) -> Any:
    """Return a new object of a class, with these items and attributes, without calling `__init__`."""
    base: Any = layout_class(kind)
    new = torch.Size.__new__ if kind is torch.Size else base.__new__
    container = new(kind, tuple(items.values())) if base is tuple else new(kind)
    set_contents(container, items, attributes)
    return container


def set_contents(x: Any, items: Mapping[Any, Any], attributes: Mapping[str, Any]) -> None:
    """Replace the items and attributes of an object, bypassing its own setters."""
    base = layout_class(type(x))
    if base is list:
        list.__setitem__(x, slice(None), list(items.values()))
    elif base is not None and issubclass(base, dict):
        base.clear(x)
        for key, value in items.items():
            base.__setitem__(x, key, value)
    if type(x) in _BUILTIN_CONTAINERS:
        return
    own = getattr(x, "__dict__", {})
    for name in [name for name in own if name not in attributes]:
        del own[name]
    for name, value in attributes.items():
        object.__setattr__(x, name, value)


@dataclass
class CallCopy:
    """A copy of the structure of arguments, with other tensors and integers."""

    value: Any
    containers: list[Any]
    """The copies of `Arguments.containers`, in that order."""


def copy_arguments(call: Any, tensors: Sequence[Any], integers: Sequence[Any]) -> CallCopy:
    """Copy the structure of arguments, with these tensors and integers in the order of `Arguments`."""
    copies: dict[int, Any] = {}
    containers: list[Any] = []
    new_tensors, new_integers = iter(tensors), iter(integers)

    def copied(x: Any) -> Any:
        if type(x) is int:
            return next(new_integers)
        if is_constant(x) or type(x) is float:
            return x
        if id(x) not in copies:
            if isinstance(x, torch.Tensor):
                copies[id(x)] = next(new_tensors)
            else:
                container(x)
        return copies[id(x)]

    def container(x: Any) -> None:
        place = len(containers)
        containers.append(None)
        base = layout_class(type(x))
        if base is not tuple:  # registered before its contents, which may refer to it
            copies[id(x)] = new_container(type(x), {}, {})
        items, attributes = ({name: copied(child) for name, child in part.items()} for part in items_and_attributes(x))
        if base is tuple:
            copies[id(x)] = new_container(type(x), items, attributes)
        else:
            set_contents(copies[id(x)], items, attributes)
        containers[place] = copies[id(x)]

    return CallCopy(copied(call), containers)


# Results


@dataclass
class ResultContext:
    """The parts of a call that its results are rebuilt from."""

    outputs: Sequence[torch.Tensor]
    arguments: Arguments
    sizes: Sequence[int]
    """The symbolic integers among the results."""
    built: dict[int, Any] = field(default_factory=dict)


ResultBuilder: TypeAlias = Callable[[ResultContext], Any]


class Results:
    """Rebuilds results from a model's outputs, and repeats changes that the call made to its arguments.

    Made from one traced call: its result, and its arguments after it. A list, dict or object that the traced call
    changed is changed in the same way in later calls; their tensors are not copied.
    """

    def __init__(
        self,
        result: Any,
        copy: CallCopy,
        before: Sequence[Any],
        tensors: Sequence[Any],
        gaps: Sequence[int],
        size: Any,
    ) -> None:
        self._new: list[torch.Tensor] = []
        self._gaps = gaps
        self._places: dict[int, int] = {}
        self._argument_indices = {id(tensor): index for index, tensor in enumerate(tensors)}
        self._containers = {id(container): index for index, container in enumerate(copy.containers)}
        self._size = size
        self._alive = (result, copy, tensors)
        self._changes = [
            (index, *self._builders(items_and_attributes(container)))
            for index, (container, contents) in enumerate(zip(copy.containers, before, strict=True))
            if not _same_contents(_contents(container), contents)
        ]
        self._result = self._builder(result)
        del self._argument_indices, self._alive, self._containers, self._size, self._places, self._gaps

    def take_tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors that the module computed in the traced call, and drop the references to them."""
        tensors, self._new = tuple(self._new), []
        return tensors

    def rebuild(self, call: ResultContext) -> Any:
        """Return the result of a call, and change its arguments as the module does."""
        new = [(index, _build(items, call), _build(attributes, call)) for index, items, attributes in self._changes]
        for index, items, attributes in new:
            set_contents(call.arguments.containers[index], items, attributes)
        return self._result(call)

    def _builders(self, both: Sequence[Mapping[Any, Any]]) -> tuple[dict[Any, ResultBuilder], dict[Any, ResultBuilder]]:
        items, attributes = ({name: self._builder(child) for name, child in part.items()} for part in both)
        return items, attributes

    def _builder(self, x: Any) -> ResultBuilder:
        if isinstance(x, torch.Tensor):
            return self._tensor(x)
        if isinstance(x, torch.SymInt):
            return self._size(x)  # type: ignore[no-any-return]  # a ResultBuilder
        if type(x) in (int, float) or is_constant(x):
            return lambda call: x
        if id(x) in self._containers:
            at = self._containers[id(x)]
            return lambda call: call.arguments.containers[at]
        return self._container(x)

    def _tensor(self, x: torch.Tensor) -> ResultBuilder:
        if id(x) in self._argument_indices:
            index = self._argument_indices[id(x)]
            if index in self._gaps:  # a contiguous copy was traced, which `contiguous()` returns unchanged
                raise CaptureError(
                    "forward returns an argument whose memory has gaps, or a contiguous copy of it",
                    hint='pass x.contiguous(), or use fallback="warn", which leaves this to torch.compile',
                )
            return lambda call: call.arguments.tensors[index]
        at = self._places.setdefault(id(x), len(self._new))
        if at == len(self._new):
            self._new.append(x)
        return lambda call: call.outputs[at]

    def _container(self, x: Any) -> ResultBuilder:
        kind, name = type(x), id(x)
        items, attributes = self._builders(items_and_attributes(x))

        def builder(call: ResultContext) -> Any:
            if name not in call.built:
                call.built[name] = new_container(kind, _build(items, call), _build(attributes, call))
            return call.built[name]

        return builder


def _build(builders: Mapping[Any, ResultBuilder], call: ResultContext) -> dict[Any, Any]:
    return {name: builder(call) for name, builder in builders.items()}


def contents_of_containers(copy: CallCopy) -> list[list[tuple[Any, Any]]]:
    """Return the current contents of each container of a copy, to compare with later."""
    return [_contents(container) for container in copy.containers]


def _contents(container: Any) -> list[tuple[Any, Any]]:
    return [item for part in items_and_attributes(container) for item in part.items()]


def _same_contents(now: Sequence[tuple[Any, Any]], before: Sequence[tuple[Any, Any]]) -> bool:
    """Whether a container has the same objects under the same names."""
    return len(now) == len(before) and all(
        name == other and (child is old or (is_constant(child) and type(child) is type(old) and child == old))
        for (name, child), (other, old) in zip(now, before, strict=True)
    )
