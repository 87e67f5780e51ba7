"""The doors a program goes through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

import sardonyx

from .program import Program

Function: TypeAlias = Callable[..., Sequence[Tensor]]


class _Module(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Sequence[Tensor]:
        return self.function(*args)


def compiled(program: Program) -> Function:
    """`torch.compile`."""
    return _compiled(program)


def native(program: Program) -> Function:
    """`torch.compile` with every group of operators compiled to kernels of their own."""
    return _compiled(program, native=True)


def _compiled(program: Program, **options: Any) -> Function:
    torch._dynamo.reset()
    chosen = {"fallback": "quiet", **options}
    return torch.compile(program.function(), backend="sardonyx", dynamic=dynamic(program), options=chosen)


def dynamic(program: Program) -> bool | None:
    """What `torch.compile` is told: symbolic sizes at once where several are coming."""
    return True if program.other_sizes else None


def wrapped(program: Program) -> Function:
    """`sardonyx.compile` of a module."""
    return sardonyx.compile(_Module(program.function()).eval(), fallback="quiet")


def exported(program: Program) -> Function:
    """`sardonyx.export`, in which sizes that may differ are dynamic. A file cannot edit the caller's tensors."""
    copies = [f"{given.name} = {given.name}.clone()" for given in program.inputs]
    auto = torch.export.Dim.AUTO
    sizes = [{at: auto for at, size in enumerate(given.sizes) if isinstance(size, str)} for given in program.inputs]
    shapes = (tuple(sizes),) if program.other_sizes else None
    with torch.no_grad():
        exported = sardonyx.export(
            _Module(program.function(copies)).eval(), tuple(program.arguments()), dynamic_shapes=shapes
        )

    def call(*args: Tensor) -> Sequence[Tensor]:
        results = exported(*(x.detach() for x in args))
        return results if isinstance(results, (tuple, list)) else (results,)

    return call


DOORS: dict[str, Callable[[Program], Function]] = {
    "compile": compiled,
    "wrapper": wrapped,
    "export": exported,
    "native": native,
}
DOOR_WEIGHTS = {"compile": 12, "wrapper": 3, "export": 3, "native": 2}
TRAINING_DOORS = frozenset({"compile", "native"})
"""Doors through which gradients, strides and aliases are eager's."""
