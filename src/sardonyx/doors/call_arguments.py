"""Check the arguments of a call of an exported model against those of the example call."""

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
    """Its path: `scale`, `xs[1]`."""
    kind: ArgumentKind
    """A `number` is fed as a 0-d tensor, a `size` as an integer."""
    example: Any = None
    """The value of a number or a constant in the example call."""
    dtype: torch.dtype | None = None
    """The required dtype of a tensor; None for any."""
    sizes: Sequence[int | None] | None = None
    """The required sizes of a tensor, None for a dynamic one; None for any shape."""

    def feed(self, value: Any) -> Any:
        """Return the model's input for a value; raises if the value does not match the example."""
        if self.kind == "tensor":
            return self._feed_tensor(value)
        if self.kind == "constant":
            return self._check_constant(value)
        return self._feed_number(value)

    def _feed_tensor(self, value: Any) -> torch.Tensor:
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
                    f"{self.path}.shape[{axis}] is {size}, and the model was exported with {constant}, "
                    "which is a constant of it: export it again with that size, or declare it in dynamic_shapes"
                )

    def _check_constant(self, value: Any) -> None:
        if not _is_equal(value, self.example):
            raise ValueError(
                f"{self.path} is {_format_value(value)}, and the model was exported with "
                f"{_format_value(self.example)}, which is a constant of it: export it again with that value"
            )

    def _feed_number(self, value: Any) -> Any:
        is_float = isinstance(self.example, float)
        wanted: Any = Real if is_float else Integral
        if not isinstance(value, wanted) or isinstance(value, bool) or (is_float and isinstance(value, Integral)):
            raise TypeError(
                f"{self.path} is {_format_value(value)}, where the model was exported with {self.example!r}: pass "
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
    """Format a value for an error: only its type if it may be large."""
    is_plain = value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device))
    return repr(value) if is_plain else f"a {type(value).__name__}"


# Structure of arguments


def structure_difference(
    names: Sequence[str], call: tuple[tuple[Any, ...], dict[str, Any]], spec: pytree.TreeSpec
) -> str:
    """Return the first structural difference: `xs is a list of 3, and the model was exported with a list of 2`."""
    values = [*call[0], *call[1].values()]
    wanted = [part for group in spec.children() for part in group.children()]
    arguments = zip(names, values, wanted, strict=True)
    differences = (difference for path, value, part in arguments for difference in _differences(path, value, part))
    return next(differences, f"the structure of the arguments differs from {spec}")


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
