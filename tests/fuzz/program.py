"""Random programs: Python functions of a few tensors, whose every line runs in eager."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F  # the name in the programs
from hypothesis import strategies as st
from torch import Tensor

from .steps import DTYPE_WEIGHTS, DTYPES, NoOperand, draw_template, fill

SIZES = (1, 2, 3, 3, 4, 5)
OTHER_SIZES = (0, 1, 2, 3, 6, 9)
MOST_ELEMENTS = 2000
FEWEST_STEPS, MOST_STEPS = 5, 30
_ATTEMPTS = 12
_REFUSALS = (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError, ZeroDivisionError, AttributeError)


@dataclass(frozen=True)
class Input:
    """A tensor that a program is called with: its sizes by name or number, and what it holds."""

    name: str
    sizes: tuple[int | str, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    edges: bool = False
    """Whether infinities, NaN, negative zeros and the limits of an integer are among its numbers."""
    transposed: bool = False

    def make(self, sizes: Mapping[str, int], seed: int) -> Tensor:
        """The tensor for these sizes."""
        shape = [size if isinstance(size, int) else sizes[size] for size in self.sizes]
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(shape[::-1] if self.transposed else shape, generator=generator, dtype=torch.float64) * 2
        made = _in_dtype(drawn, self.dtype)
        if self.edges:
            _sprinkle(made, generator)
        made = made.permute(tuple(reversed(range(made.dim())))) if self.transposed else made
        return made.requires_grad_(self.requires_grad)

    def __str__(self) -> str:
        """All that it is made of: `x0: float32['a', 2] edges transposed`."""
        flags = [name for name in ("edges", "transposed") if getattr(self, name)]
        return " ".join([f"{self.name}: {str(self.dtype)[6:]}{list(self.sizes)}", *flags])


def _in_dtype(drawn: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.bool:
        return drawn > 0
    if dtype.is_floating_point:
        return drawn.to(dtype)
    return (drawn.abs() if dtype == torch.uint8 else drawn).mul(3).round().to(dtype)


def _sprinkle(x: Tensor, generator: torch.Generator) -> None:
    """Replace about a tenth of the elements by numbers at the edges of the dtype."""
    if x.dtype == torch.bool:
        return
    if x.is_floating_point():
        edges = torch.tensor([float("inf"), -float("inf"), float("nan"), -0.0, 0.0], dtype=x.dtype)
    else:
        limits = torch.iinfo(x.dtype)
        edges = torch.tensor([limits.min, limits.max, 0, limits.max - 1], dtype=x.dtype)
    chosen = torch.rand(x.shape, generator=generator) < 0.1
    x[chosen] = edges[torch.randint(len(edges), x.shape, generator=generator)][chosen]


@dataclass(frozen=True)
class Program:
    """A function in source, its inputs, and the sizes it was drawn with."""

    inputs: tuple[Input, ...]
    sizes: Mapping[str, int]
    lines: tuple[str, ...]
    results: tuple[str, ...]
    seed: int
    other_sizes: tuple[Mapping[str, int], ...] = ()
    """Further calls."""
    alias: bool = False
    """Whether the last two inputs are one tensor."""

    @property
    def trains(self) -> bool:
        """Whether gradients are compared."""
        return any(given.requires_grad for given in self.inputs)

    def source(self, prologue: Sequence[str] = ()) -> str:
        """A function called `program`."""
        body = [*prologue, *self.lines, f"return {', '.join(self.results)},"]
        return "\n    ".join([f"def program({', '.join(given.name for given in self.inputs)}):", *body]) + "\n"

    def function(self, prologue: Sequence[str] = ()) -> Callable[..., tuple[Tensor, ...]]:
        """The function."""
        scope: dict[str, Any] = {"torch": torch, "F": F}
        exec(self.source(prologue), scope)
        function: Callable[..., tuple[Tensor, ...]] = scope["program"]
        return function

    def arguments(self, sizes: Mapping[str, int] | None = None) -> list[Tensor]:
        """Tensors to call it with."""
        made = [given.make(sizes or self.sizes, self.seed + at) for at, given in enumerate(self.inputs)]
        return [*made[:-1], made[-2]] if self.alias else made

    @property
    def calls(self) -> tuple[Mapping[str, int], ...]:
        """The sizes of every call."""
        return (self.sizes, *self.other_sizes)

    def __str__(self) -> str:
        given = ", ".join(map(str, self.inputs))
        flags = [name for name in ("trains", "alias") if getattr(self, name)]
        return f"# {given}; calls {[dict(sizes) for sizes in self.calls]}; seed {self.seed} {flags}\n{self.source()}"


def programs(*, trains: bool | None = None, alias: bool = True) -> st.SearchStrategy[Program]:
    """Hypothesis' strategy for programs: those that are trained, those that are not, or both."""
    return st.randoms(use_true_random=False).map(lambda rng: draw(rng, trains, alias))


def draw(rng: random.Random, trains: bool | None = None, alias: bool = True) -> Program:
    """Draw a program line by line, keeping the lines that eager runs."""
    trains = rng.random() < 0.4 if trains is None else trains
    sizes = {name: rng.choice(SIZES) for name in "abc"}
    inputs = tuple(_draw_input(rng, f"x{at}", trains and at == 0) for at in range(rng.randint(1, 3)))
    others = tuple({name: rng.choice(OTHER_SIZES) for name in "abc"} for _ in range(rng.randint(0, 2)))
    alias = alias and not trains and len(inputs) > 1 and rng.random() < 0.1
    inputs = (*inputs[:-1], replace(inputs[-2], name=inputs[-1].name)) if alias else inputs
    program = Program(inputs, sizes, (), (), rng.randrange(2**31), others, alias)
    lines, variables = _draw_lines(rng, program)
    last = list(variables)[-1]
    results = [name for name in variables if name == last or rng.random() < 0.5]
    return replace(program, lines=tuple(lines), results=tuple(results))


def _draw_input(rng: random.Random, name: str, requires_grad: bool) -> Input:
    sizes = tuple(rng.choice(("a", "b", "c", "a", "b", 2)) for _ in range(rng.choice((0, 1, 2, 2, 2, 3, 3, 4))))
    (dtype,) = rng.choices(DTYPES, DTYPE_WEIGHTS)
    dtype = torch.float32 if requires_grad and not dtype.is_floating_point else dtype
    return Input(name, sizes, dtype, requires_grad, not requires_grad and rng.random() < 0.3, rng.random() < 0.2)


def _draw_lines(rng: random.Random, program: Program) -> tuple[list[str], dict[str, Tensor]]:
    names = [given.name for given in program.inputs]
    variables = dict(zip(names, program.arguments(), strict=True))
    lines: list[str] = []
    wanted = rng.randint(FEWEST_STEPS, MOST_STEPS)
    for _ in range(_ATTEMPTS * wanted):
        if len(lines) >= wanted:
            break
        family, template = draw_template(rng)
        try:
            text = fill(template, variables, rng)
        except NoOperand:
            continue
        line = text if family == "write" else f"v{len(lines)} = {text}"
        if _runs(line, variables):
            lines.append(line)
    return lines, variables


def _runs(line: str, variables: dict[str, Tensor]) -> bool:
    """Run a line in eager; whether it runs, and gives a tensor that is not too large."""
    scope: dict[str, Any] = {"torch": torch, "F": F, **variables}
    try:
        exec(line, scope)
    except _REFUSALS:
        return False
    name, assigned, _ = line.partition(" = ")
    if assigned and name.startswith("v"):
        made = scope[name]
        if not isinstance(made, Tensor) or made.is_complex() or made.numel() > MOST_ELEMENTS or made.dim() > 6:
            return False
        variables[name] = made
    return True
