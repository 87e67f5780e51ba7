"""Compare an operator on the device with the CPU, for arguments generated from its schema."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from sardonyx.eager.dispatch import NotMapped
from sardonyx.eager.memory import DEVICE, is_on_device
from sardonyx.translate.table import operator_of

_SHAPES: tuple[tuple[tuple[int, ...], ...], ...] = (
    ((3, 4), (3, 4), (3, 4)),
    ((3, 4), (4,), (3, 1)),
    ((4, 4), (4, 4), (4, 4)),
    ((2, 3, 4), (2, 4, 3), (2, 3, 3)),
    ((), (), ()),
    ((0, 4), (0, 4), (0, 4)),
    ((5,), (5,), (5,)),
)
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.bool,
)
_NUMBERS: dict[str, Sequence[Any]] = {
    "int": (1, 2),
    "float": (0.5, 2.0),
    "bool": (False, True),
    "number": (1, 0.5),
    "List[int]": ((0,), (1, 2)),
}
_REPEATS = 3
"""Repeated calls take the cached path."""


def check(name: str, *samples: Sequence[Any]) -> int:
    """Compare an operator on the device with the CPU, for given or generated arguments; return the number of calls.

    Generated arguments cover every dtype, and for float32 several shapes, among them broadcast and empty ones, both
    contiguous and transposed in memory. Arguments that the CPU rejects are skipped, and dtypes that the device rejects.
    It is an error if no call was compared.

    >>> from sardonyx import eager
    >>> eager.enable(fallback="error")
    >>> eager.check("aten::relu") > 10
    True
    """
    operator = operator_of(name)
    compared, unsupported = 0, None
    for args in samples or _generate_arguments(operator):
        try:
            expected = operator(*_clone(args))
        except (RuntimeError, TypeError, IndexError, ValueError, NotImplementedError):
            continue
        for view in (_contiguous, _transposed_in_memory):
            moved = [pytree.tree_map_only(torch.Tensor, view, x) for x in args]
            try:
                for _ in range(_REPEATS):
                    _compare(operator, args, operator(*_clone(moved)), expected)
                    compared += 1
            except NotMapped as error:
                unsupported = error
    if not compared:
        raise unsupported or AssertionError(f"{name}: the CPU accepts none of the generated arguments; pass samples")
    return compared


def _compare(operator: Any, args: Any, results: Any, expected: Any) -> None:
    for actual, wanted in zip(pytree.tree_leaves(results), pytree.tree_leaves(expected), strict=True):
        if not isinstance(wanted, torch.Tensor):
            same = actual == wanted
        else:
            if not is_on_device(actual):
                raise AssertionError(f"{operator.name()}: a result is on {actual.device}")
            same = True
            torch.testing.assert_close(
                actual.cpu(), wanted, equal_nan=True, msg=lambda text: f"{operator.name()}{_format_args(args)}: {text}"
            )
        if not same:
            raise AssertionError(f"{operator.name()}{_format_args(args)}: {actual} is not equal to {wanted}")


def _format_args(args: Any) -> str:
    return str(pytree.tree_map_only(torch.Tensor, lambda x: f"{x.dtype}{list(x.shape)}", tuple(args)))


def _clone(args: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, torch.clone, tuple(args))


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(DEVICE)


def _transposed_in_memory(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(DEVICE).mT.contiguous().mT if tensor.dim() > 1 else tensor.to(DEVICE)


def _generate_arguments(operator: Any) -> Iterator[list[Any]]:
    arguments = [a for a in operator._schema.arguments if not (a.has_default_value() and str(a.type) != "Tensor")]
    others = ((dtype, _SHAPES[2]) for dtype in _DTYPES[1:])
    for dtype, shapes in (*((_DTYPES[0], shapes) for shapes in _SHAPES), *others):
        shape = iter(shapes)
        choices: list[Sequence[Any]] = []
        for argument in arguments:
            kind = str(argument.type)
            if kind == "Tensor":
                choices.append([_tensor(next(shape, shapes[-1]), dtype)])
            elif kind == "List[Tensor]":
                choices.append([[_tensor(shapes[0], dtype) for _ in range(2)]])
            else:
                choices.append(_NUMBERS.get(kind, (None,)))
        yield from map(list, itertools.product(*choices))


def _tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    values = torch.linspace(-2.5, 3, torch.Size(shape).numel() or 1)[: torch.Size(shape).numel()].reshape(shape)
    return values.to(dtype)
