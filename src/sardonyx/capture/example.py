"""The example call that a module is exported with: its arguments by name, and which numbers become inputs.

Tensors of the call are copied if they share memory: torch.export treats two that do as one. A Python number may become
an input, as a 0-d tensor that `forward` reads by `.item()`: torch.export makes every other number a constant.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from sardonyx.errors import CaptureError

ArgsKwargs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class ExampleCall:
    """A call of a module, with its arguments by name; those of `*args` are `args_0`, `args_1`."""

    model: torch.nn.Module
    arguments: Mapping[str, Any]
    positional: int
    """The number of positional arguments."""
    grouped: Mapping[str, Sequence[str]]
    """The names in `arguments` that belong to each parameter of `forward`."""
    numbers: frozenset[int] = frozenset()
    """The flattened arguments that are numbers and become inputs."""

    @classmethod
    def of(cls, model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ExampleCall:
        """Name the arguments of a call, and copy tensors that share memory."""
        signature = _signature_of(model)
        try:
            bound = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise CaptureError(f"forward cannot be called with the example's arguments: {error}") from error
        arguments: dict[str, Any] = {}
        grouped = {}
        for name, value in bound.items():
            group = _group(name, value, signature.parameters[name].kind)
            grouped[name] = list(group)
            arguments |= group
        order = [*list(arguments)[: len(args)], *(name for name in arguments if name in kwargs)]
        separate = _copy_shared_memory(model, [arguments[name] for name in order])
        return cls(model, dict(zip(order, separate, strict=True)), len(args), grouped)

    @property
    def call(self) -> ArgsKwargs:
        """The arguments, with numbers that are inputs as 0-d tensors."""
        leaves, spec = pytree.tree_flatten(dict(self.arguments))
        for place in self.numbers:
            leaves[place] = number_as_tensor(leaves[place])
        values = pytree.tree_unflatten(leaves, spec)
        names = list(values)
        return (
            tuple(values[name] for name in names[: self.positional]),
            {name: values[name] for name in names[self.positional :]},
        )

    @property
    def leaves(self) -> list[tuple[str, Any]]:
        """The flattened arguments, each with its path: `scale`, `xs[1]`, `options['factor']`."""
        return [(format_path(path), leaf) for path, leaf in pytree.tree_flatten_with_path(dict(self.arguments))[0]]

    def with_numbers(self, places: Collection[int]) -> ExampleCall:
        """Return the same call with these numbers as inputs."""
        return replace(self, numbers=frozenset(places))

    @contextmanager
    def patched_forward(self) -> Iterator[None]:
        """While active, the module's `forward` takes each argument by name, and numbers as tensors."""
        own, instance_forward = self.model.forward, vars(self.model).get("forward")

        @functools.wraps(own)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return own(*_read_numbers(args, self.numbers), **self._keywords(args, kwargs))

        forward.__dict__["__signature__"] = inspect.Signature(list(map(self._parameter, range(len(self.arguments)))))
        vars(self.model)["forward"] = forward
        try:
            yield
        finally:
            del vars(self.model)["forward"]
            if instance_forward is not None:
                vars(self.model)["forward"] = instance_forward

    def _parameter(self, index: int) -> inspect.Parameter:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD if index < self.positional else inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(list(self.arguments)[index], kind)

    def _keywords(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        names = list(self.arguments)[self.positional :]
        before = len(pytree.tree_leaves(args))
        values = [kwargs[name] for name in names]
        read = _read_numbers(values, {place - before for place in self.numbers})
        return dict(zip(names, read, strict=True))


def _group(name: str, value: Any, kind: Any) -> dict[str, Any]:
    """Return the arguments of one parameter by name."""
    if kind is inspect.Parameter.VAR_POSITIONAL:
        return {f"{name}_{index}": item for index, item in enumerate(value)}
    return dict(value) if kind is inspect.Parameter.VAR_KEYWORD else {name: value}


def format_path(path: Sequence[Any]) -> str:
    """Format the path of a leaf, which starts with the name of an argument."""
    return str(path[0].key) + pytree.keystr(tuple(path[1:]))


# Numbers


def is_number(value: Any) -> bool:
    """Whether a value is a Python number that can be an input; bools are not, since they select branches."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def number_as_tensor(value: float) -> torch.Tensor:
    """Return a Python number as a 0-d tensor of the same precision, float64 or int64."""
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)


def _read_numbers(values: Sequence[Any], places: Collection[int]) -> list[Any]:
    """Return the values, with the tensors at these flattened places replaced by their numbers."""
    leaves, spec = pytree.tree_flatten(list(values))
    read = [leaf.item() if place in places else leaf for place, leaf in enumerate(leaves)]
    values_read: list[Any] = pytree.tree_unflatten(read, spec)
    return values_read


# Memory


def _copy_shared_memory(model: torch.nn.Module, values: list[Any]) -> list[Any]:
    """Return the values, with a copy of every tensor that shares memory with another one or with a weight."""
    leaves, spec = pytree.tree_flatten(values)
    used = {_storage(tensor) for tensor in (*model.parameters(), *model.buffers())}
    copied = False
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            if _storage(leaf) in used:
                leaves[place], copied = _clone(leaf), True
            used.add(_storage(leaf))
    return pytree.tree_unflatten(leaves, spec) if copied else values


def _storage(tensor: torch.Tensor) -> int:
    """Return an id of a tensor's storage; of the tensor itself if it has no storage."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse tensors and wrapper subclasses
        return id(tensor)


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def clone_tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> ArgsKwargs:
    """Return the arguments with cloned tensors, which a call may modify in place."""
    copied: ArgsKwargs = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.clone(), (tuple(args), dict(kwargs)))
    return copied


def _signature_of(model: torch.nn.Module) -> inspect.Signature:
    try:
        return inspect.signature(model.forward)
    except ValueError as error:  # torch.sin, and other functions that are not written in Python
        raise CaptureError(
            f"the arguments of a function have no names: {error}", hint="export a function of your own that calls it"
        ) from error


def as_module(function: Any) -> torch.nn.Module:
    """A module that calls a function; one that is a module already."""
    if isinstance(function, torch.nn.Module):
        return function
    module = torch.nn.Module()
    module.forward = function
    return module
