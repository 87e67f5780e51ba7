"""A test that every operator of the device comes with: the CPU's results, for arguments made up from its schema."""

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
_CALLS_ALIKE = 3
"""A call goes another way once it has been made before."""


def check(name: str, *samples: Sequence[Any]) -> int:
    """Compare an operator on the device with torch's on the CPU: for arguments given, or made up from its schema.

    Made-up ones are of every dtype, and in float32 of several shapes, among them broadcast ones and such without
    elements, in order and as views; what the CPU refuses is left out, and what the device refuses for a dtype. The
    number of calls that were compared; none is an error.

    >>> from sardonyx import eager
    >>> eager.enable(fallback="error")
    >>> eager.check("aten::relu") > 10
    True
    """
    operator = operator_of(name)
    compared, refused = 0, None
    for args in samples or _made_up(operator):
        try:
            expected = operator(*_copied(args))
        except (RuntimeError, TypeError, IndexError, ValueError, NotImplementedError):
            continue
        for view in (_as_it_is, _as_a_view):
            moved = [pytree.tree_map_only(torch.Tensor, view, x) for x in args]
            try:
                for _ in range(_CALLS_ALIKE):
                    _compare(operator, args, operator(*_copied(moved)), expected)
                    compared += 1
            except NotMapped as error:
                refused = error
    if not compared:
        raise refused or AssertionError(f"{name}: the CPU took none of the arguments that were made up; give some")
    return compared


def _compare(operator: Any, args: Any, found: Any, expected: Any) -> None:
    for one, other in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True):
        if not isinstance(other, torch.Tensor):
            same = one == other
        else:
            if not is_on_device(one):
                raise AssertionError(f"{operator.name()}: a result is on {one.device}")
            same = True
            torch.testing.assert_close(
                one.cpu(), other, equal_nan=True, msg=lambda text: f"{operator.name()}{_shown(args)}: {text}"
            )
        if not same:
            raise AssertionError(f"{operator.name()}{_shown(args)}: {one} is not {other}")


def _shown(args: Any) -> str:
    return str(pytree.tree_map_only(torch.Tensor, lambda x: f"{x.dtype}{list(x.shape)}", tuple(args)))


def _copied(args: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, torch.clone, tuple(args))


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(DEVICE)


def _as_a_view(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, lying in memory the other way round."""
    return tensor.to(DEVICE).mT.contiguous().mT if tensor.dim() > 1 else tensor.to(DEVICE)


def _made_up(operator: Any) -> Iterator[list[Any]]:
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
    made = torch.linspace(-2.5, 3, torch.Size(shape).numel() or 1)[: torch.Size(shape).numel()].reshape(shape)
    return made.to(dtype)
