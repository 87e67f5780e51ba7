"""Loss curves: a model is trained eagerly and through sardonyx from one seed; a table and an SVG show both."""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from statistics import median
from typing import TypeAlias

import torch
from torch import nn

Batch: TypeAlias = tuple[torch.Tensor, torch.Tensor]
Batches: TypeAlias = Callable[[int], Iterator[Batch]]


def arguments(what: str | None, output: str, steps: int) -> argparse.Namespace:
    """The flags that such an example has."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--steps", type=int, default=steps, help=f"steps of training (default: {steps})")
    parser.add_argument("--output", type=Path, default=Path(output), help=f"the drawing (default: {output})")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda (default: cpu)")
    return parser.parse_args()


@dataclass
class Curve:
    """What one way of training gave: the loss and the seconds of each step, and the accuracy afterwards."""

    name: str
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    accuracy: float = math.nan

    @property
    def milliseconds(self) -> float:
        """Of a step, in the median; the first, which compiles, is left out."""
        return median(self.seconds[1:] or self.seconds) * 1e3


def compare(
    model: nn.Module,
    batches: Batches,
    optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer],
    steps: int,
    device: str,
) -> list[Curve]:
    """Train two copies of the model on the same batches, one eagerly, one compiled; one batch more is the test."""
    *training, test = batches(steps + 1)
    curves = []
    for name in ("eager", "sardonyx"):
        trained = copy.deepcopy(model).to(device)
        run: Callable[..., torch.Tensor] = trained
        if name == "sardonyx":
            run = torch.compile(trained, backend="sardonyx")
        curve = Curve(name)
        _train(run, optimizer(trained.parameters()), training, device, curve)
        curve.accuracy = _accuracy(trained.eval(), test, device)
        curves.append(curve)
    return curves


def _train(
    run: Callable[..., torch.Tensor],
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Batch],
    device: str,
    curve: Curve,
) -> None:
    for inputs, labels in batches:
        started = time.perf_counter()
        loss = nn.functional.cross_entropy(run(inputs.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        optimizer.step()
        curve.losses.append(loss.item())  # which also waits for an accelerator
        curve.seconds.append(time.perf_counter() - started)


def _accuracy(model: nn.Module, batch: Batch, device: str) -> float:
    with torch.no_grad():
        right = model(batch[0].to(device)).argmax(-1).cpu() == batch[1]
    return float(right.float().mean())


def show(title: str, curves: Sequence[Curve], rows: int = 10) -> None:
    """Print the losses, some steps apart, and what a step costs."""
    eager, ours = curves
    count = len(eager.losses)
    print(f"{title}\n\n{'step':>6}{'eager':>12}{'sardonyx':>12}{'difference':>12}")
    for step in sorted({*range(0, count, max(count // rows, 1)), count - 1}):
        pair = eager.losses[step], ours.losses[step]
        print(f"{step + 1:>6}{pair[0]:>12.6f}{pair[1]:>12.6f}{abs(pair[0] - pair[1]):>12.1e}")
    print(f"\n{'':>10}{'ms a step':>12}{'first step':>12}{'accuracy':>12}")
    for curve in curves:
        print(f"{curve.name:>10}{curve.milliseconds:>12.2f}{curve.seconds[0]:>10.1f} s{curve.accuracy:>12.0%}")


# The drawing

_WIDTH, _HEIGHT, _TOP, _BOTTOM = 840, 340, 62, 48
_STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #475569 }
  .title { font-size: 15px; font-weight: 600; fill: #0f172a }
  .grid { stroke: #e2e8f0 } .page { fill: #ffffff }
  .eager { stroke: #93c5fd; stroke-width: 5 }
  .sardonyx { stroke: #c2410c; stroke-width: 1.6 } .difference { fill: #c2410c }
  polyline { fill: none; stroke-linejoin: round; stroke-linecap: round }
  @media (prefers-color-scheme: dark) {
    text { fill: #94a3b8 } .title { fill: #f1f5f9 } .grid { stroke: #334155 } .page { fill: #0f172a }
    .eager { stroke: #1d4ed8 } .sardonyx { stroke: #fdba74 } .difference { fill: #fdba74 }
  }
"""


@dataclass(frozen=True)
class Panel:
    """A pair of axes: where they lie from left to right, and what they span."""

    left: float
    right: float
    steps: int
    low: float
    high: float
    label: str

    def x(self, step: float) -> float:
        """Where a step lies."""
        return self.left + (self.right - self.left) * step / self.steps

    def y(self, value: float) -> float:
        """Where a value lies."""
        share = (value - self.low) / (self.high - self.low)
        return _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * share

    def line(self, kind: str, values: Sequence[float]) -> str:
        """One curve, from the first step on."""
        points = " ".join(f"{self.x(step):.1f},{self.y(value):.1f}" for step, value in enumerate(values, start=1))
        return f'<polyline class="{kind}" points="{points}"/>'

    def dots(self, kind: str, values: Sequence[float]) -> Iterator[str]:
        """The values alone, for what jumps."""
        for step, value in enumerate(values, start=1):
            yield f'<circle class="{kind}" cx="{self.x(step):.1f}" cy="{self.y(value):.1f}" r="1.8"/>'

    def axes(self, write: Callable[[float], str], *, whole: bool = False) -> Iterator[str]:
        """Lines across at round values, which `write` puts in words, and round steps below."""
        yield _text(self.left, _TOP - 14, self.label)
        yield _text((self.left + self.right) / 2, _HEIGHT - 8, "step", "middle")
        for value in ticks(self.low, self.high, whole=whole):
            y = self.y(value)
            yield f'<line class="grid" x1="{self.left}" x2="{self.right}" y1="{y:.1f}" y2="{y:.1f}"/>'
            yield _text(self.left - 8, y + 4, write(value), "end")
        for step in ticks(0, self.steps, whole=True):
            yield _text(self.x(step), _HEIGHT - _BOTTOM + 18, f"{step:g}", "middle")


def ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Some five round values from one to the other, whole numbers if asked.

    >>> ticks(0, 2.1)
    [0.0, 0.5, 1.0, 1.5, 2.0]
    >>> ticks(-7, -4, whole=True)
    [-7, -6, -5, -4]
    """
    rough = (high - low) / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough * 0.8)
    step = max(round(step), 1) if whole else step
    first = math.ceil(low / step - 1e-9)
    return [round(step * i, 10) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def svg(title: str, curves: Sequence[Curve]) -> str:
    """Both losses in one pair of axes, and beside it how far they are apart, as a drawing for light and dark pages."""
    eager, ours = curves
    steps, top = len(eager.losses), max(eager.losses + ours.losses)
    apart = [abs(a - b) for a, b in zip(eager.losses, ours.losses, strict=True)]
    exponents = [math.log10(gap) for gap in apart if gap] or [-8.0]
    low, high = math.floor(min(exponents)) - 1, math.floor(max(exponents)) + 1
    losses = Panel(60, 400, steps, 0, top * 1.05, "loss")
    gaps = Panel(490, _WIDTH - 20, steps, low, high, "difference of the losses")
    parts = [
        f'<rect class="page" width="{_WIDTH}" height="{_HEIGHT}"/>',
        _text(20, 26, title, kind="title"),
        *losses.axes(lambda value: f"{value:g}"),
        *gaps.axes(lambda value: "0" if value == low else f"1e{value:.0f}", whole=True),
        losses.line("eager", eager.losses),
        losses.line("sardonyx", ours.losses),
        *gaps.dots("difference", [math.log10(gap) if gap else low for gap in apart]),
        *(part for place, curve in enumerate(curves) for part in _key(230 + 90 * place, curve.name)),
    ]
    size = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}"'
    lines = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{_STYLE}</style>\n{lines}\n</svg>\n'


def _key(x: float, name: str) -> Iterator[str]:
    yield f'<polyline class="{name}" points="{x},{_TOP - 18} {x + 22},{_TOP - 18}"/>'
    yield _text(x + 30, _TOP - 14, name)


def _text(x: float, y: float, text: str, anchor: str = "start", kind: str = "") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def report(title: str, curves: Sequence[Curve], output: Path) -> None:
    """Print the table and write the drawing."""
    show(title, curves)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(svg(title, curves))
    print(f"\nboth curves: {output}")
