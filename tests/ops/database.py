"""PyTorch's operator database: its operators, their samples, and each sample as a function of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeAlias

import torch
from torch.testing._internal import common_methods_invocations
from torch.utils._pytree import tree_leaves

from sardonyx.capture.aot import decompositions
from sardonyx.translate import table

from .edges import edge_samples

SEED = 0

Arguments: TypeAlias = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""Of a sample: the first, those by position, those by name."""


@cache
def operators() -> dict[str, Any]:
    """Every entry of the database by name, variants as `name.variant`."""
    common_methods_invocations.wrapper_set_seed = _as_it_is
    return {".".join(filter(None, (op.name, op.variant_test_name))): op for op in common_methods_invocations.op_db}


def _as_it_is(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """In place of the database's own wrapper, which seeds the generator where dynamo cannot follow; we seed before."""
    return function(*args, **kwargs)


def warm_up() -> None:
    """Load what the first sample would wait for, and leave out what dynamo measures for its own logs only."""
    operators()
    decompositions()
    torch._dynamo.guards.profile_guard_manager = lambda *ignored: 0.0  # it empties the processor's caches each time


def in_own_table(op: Any) -> bool:
    """Whether our own table has an operator of this name, in any overload."""
    own = {name.split("::")[1].split(".")[0].lstrip("_") for name in table.names()}
    known = (op.name.split(".")[-1], op.aten_name, *(alias.name for alias in op.aliases))
    return any(name.lstrip("_") in own for name in known)


def samples(op: Any, dtype: torch.dtype, count: int | None = None) -> list[Any]:
    """All samples the database gives, or `count` of them, evenly spread; then those at the edges of the dtype."""
    return [*database_samples(op, dtype, count), *edge_samples(op, dtype)]


def database_samples(op: Any, dtype: torch.dtype, count: int | None = None) -> list[Any]:
    """Those of the database alone."""
    if dtype not in op.supported_dtypes("cpu") or count == 0:
        return []
    torch.manual_seed(SEED)
    found = list(op.sample_inputs("cpu", dtype, requires_grad=False))
    if count is None or len(found) <= count:
        return found
    return [found[i * (len(found) - 1) // max(count - 1, 1)] for i in range(count)]


def over_tensors(op: Any, arguments: Arguments) -> Callable[..., Any]:
    """The operator as a function of the tensors among its arguments alone, written out so that dynamo is quick.

    They are copied first: a view of an input would never leave torch, and so prove nothing.
    """
    return _function(op, [arguments], "{}")


def over_tensors_of_all(op: Any, several: Sequence[Arguments]) -> Callable[..., Any]:
    """Several calls of the operator as one function of all their tensors, which gives a list of their results."""
    return _function(op, several, "[{}]")


def _function(op: Any, several: Sequence[Arguments], returned: str) -> Callable[..., Any]:
    held: dict[str, Any] = {"op": op.op}
    count = len([leaf for leaf in tree_leaves(several) if isinstance(leaf, torch.Tensor)])
    tensors = (f"t{i}" for i in range(count))

    def written(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return f"{next(tensors)}.clone()"
        if type(value) in (list, tuple) and _has_tensors(value):
            return f"{type(value).__name__}([{', '.join(map(written, value))}])"
        if type(value) is dict and _has_tensors(value):
            return "{" + ", ".join(f"{key!r}: {written(item)}" for key, item in value.items()) + "}"
        if _has_tensors(value):
            raise TypeError(f"tensors inside a {type(value).__name__}")
        name = f"c{len(held)}"
        held[name] = value
        return name

    def call(arguments: Arguments) -> str:
        first, args, kwargs = arguments
        given = [*map(written, (first, *args)), *(f"{key}={written(value)}" for key, value in kwargs.items())]
        return f"op({', '.join(given)})"

    parameters = ", ".join(f"t{i}" for i in range(count))
    exec(f"def function({parameters}):\n    return {returned.format(', '.join(map(call, several)))}\n", held)
    function: Callable[..., Any] = held["function"]
    return function


def _has_tensors(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value))
