"""The arguments of a call of an exported model, checked against those that it was exported with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, TypeAlias

import torch
from torch.utils import _pytree as pytree

from sardonyx.capture.example import number_as_tensor

ArgumentKind: TypeAlias = Literal["tensor", "number", "size", "constant"]


@dataclass(frozen=True)
class Argument:
    """One flattened argument: an input of the model, or a constant of it."""

    path: str
    """Where it is: `scale`, `xs[1]`."""
    kind: ArgumentKind
    """A `number` is fed as a tensor without dimensions, a `size` as the integer that it is."""
    example: Any = None
    """What a number or a constant was in the call that the model was exported with."""
    dtype: torch.dtype | None = None
    """The dtype that a tensor must have; None for any."""
    sizes: Sequence[int | None] | None = None
    """The sizes that a tensor must have, None for one that may change; None for any."""

    def feed(self, value: Any) -> Any:
        """What the model is fed with for a value; an error if it cannot be."""
        if self.kind == "tensor":
            return self._tensor(value)
        if self.kind == "constant":
            return self._constant(value)
        return self._number(value)

    def _tensor(self, value: Any) -> torch.Tensor:
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{self.path} is {_format_value(value)}, where the model was exported with a tensor")
        if self.dtype not in (None, value.dtype):
            raise TypeError(f"{self.path} has {value.dtype}, where the model was exported with {self.dtype}")
        if self.sizes is not None:
            self._check_sizes(value.shape, self.sizes)
        return torch.view_as_real(value.resolve_conj()) if value.is_complex() else value

    def _check_sizes(self, sizes: Sequence[int], wanted: Sequence[int | None]) -> None:
        if len(sizes) != len(wanted):
            raise ValueError(
                f"{self.path} has {len(sizes)} dimensions, where the model was exported with {len(wanted)}"
            )
        for axis, (size, constant) in enumerate(zip(sizes, wanted, strict=True)):
            if constant not in (None, size):
                raise ValueError(
                    f"{self.path}.shape[{axis}] is {size}, and the model was exported with {constant}, which is a "
                    "constant of it: export it again with that size, or with dynamic_shapes if the model allows it"
                )

    def _constant(self, value: Any) -> None:
        if not _is_equal(value, self.example):
            raise ValueError(
                f"{self.path} is {_format_value(value)}, and the model was exported with {_format_value(self.example)}, which is a "
                "constant of it: export it again with the other value"
            )

    def _number(self, value: Any) -> Any:
        is_float = isinstance(self.example, float)
        wanted: Any = Real if is_float else Integral
        if not isinstance(value, wanted) or isinstance(value, bool) or (is_float and isinstance(value, Integral)):
            raise TypeError(
                f"{self.path} is {_format_value(value)}, where the model was exported with {self.example!r}: give "
                + ("a float" if is_float else "an integer")
            )
        if self.kind == "size":
            return int(value)
        return number_as_tensor(float(value) if is_float else int(value))


def _is_equal(value: Any, example: Any) -> bool:
    if value is example:
        return True
    try:
        return type(value) is type(example) and bool(value == example)
    except Exception:  # objects that cannot be compared
        return False


def _format_value(value: Any) -> str:
    """A value in an error: of anything that may be large, its type."""
    is_plain = value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device))
    return repr(value) if is_plain else f"a {type(value).__name__}"


# How arguments are arranged


def structure_difference(
    names: Sequence[str], call: tuple[tuple[Any, ...], dict[str, Any]], spec: pytree.TreeSpec
) -> str:
    """What is arranged in another way than it was: `xs is a list of 3, and the model was exported with a list of 2`."""
    values = [*call[0], *call[1].values()]
    wanted = [part for group in spec.children() for part in group.children()]
    given = zip(names, values, wanted, strict=True)
    found = (difference for path, value, part in given for difference in _differences(path, value, part))
    return next(found, f"the arguments are arranged in another way than {spec}")


def _differences(path: str, value: Any, wanted: pytree.TreeSpec) -> Iterator[str]:
    parts, spec = pytree.tree_flatten(value, is_leaf=lambda x: x is not value)
    if _format_structure(spec) != _format_structure(wanted):
        yield f"{path} is {_format_structure(spec)}, and the model was exported with {_format_structure(wanted)}"
    elif not spec.is_leaf():
        keys: Sequence[Any] = spec.context if spec.type is dict else range(len(parts))
        for key, part, inner in zip(keys, parts, wanted.children(), strict=True):
            yield from _differences(f"{path}[{key!r}]", part, inner)


def _format_structure(spec: pytree.TreeSpec) -> str:
    if spec.is_leaf():
        return "one value"
    if spec.type is dict:
        return f"a dict of {', '.join(map(repr, spec.context))}"
    return f"a {spec.type.__name__} of {spec.num_children}"
