"""What `precision="auto"` promises, on twenty small transformers and a model that int8 would ruin.

`python -m benchmarks.precision_guard` fails if a model is slower than in float32, by more than what equal models differ
by, or past `max_drop`. Both builds of a model take turns in one process.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.machine import describe
from benchmarks.models import Case, make
from benchmarks.precision import relative_error
from benchmarks.small_transformers import TRANSFORMERS, outliers
from benchmarks.tables import Table, milliseconds, progress, say
from sardonyx.telemetry.report import PrecisionChoice, collecting
from sardonyx.timing import in_turns

MODELS: Mapping[str, Callable[[], Case]] = {**TRANSFORMERS, "outliers": outliers}
TOLERANCE = 1.05
"""Equal builds of a small model differ by as much."""
_ROUND_SECONDS = 0.03


@dataclass(frozen=True)
class Guarded:
    """A model in float32 and as chosen."""

    model: str
    float32_seconds: float
    seconds: float
    error: float
    max_drop: float
    layers: Mapping[str, int]
    kept: Sequence[str]
    """Layers that are in float32 or bfloat16 where others are in int8."""
    smoothed: Sequence[str]
    """Layers in int8 with their channels scaled."""
    remark: str

    @property
    def holds(self) -> bool:
        """Whether it is as fast as in float32, and within the bound."""
        return self.seconds <= self.float32_seconds * TOLERANCE and self.error <= self.max_drop


def guard(name: str, precision: str, max_drop: float, rounds: int, rows: int | None = None) -> Guarded:
    """Compile a model with the option and without, and let the two take turns; with the first rows only, if given."""
    torch._dynamo.reset()
    model, args = make(MODELS[name])
    args = tuple(x[:rows] for x in args)
    options = {"precision": precision, "max_drop": max_drop}
    with collecting() as report:
        calls = [partial(_compiled(model, **how), *args) for how in ({}, options)]
        exact, result = (call() for call in calls)
    float32, chosen = in_turns(calls, rounds=rounds, round_seconds=_ROUND_SECONDS)
    (choice,) = (region.precision for graph in report.graphs for region in graph.regions if region.precision)
    layers = Counter(layer.precision for layer in choice.layers)
    error = relative_error(result, exact)
    times = median(float32), median(chosen)
    return Guarded(name, *times, error, max_drop, dict(layers), _kept(choice), _smoothed(choice), choice.remark)


def _compiled(model: torch.nn.Module, **options: Any) -> Callable[..., torch.Tensor]:
    run: Callable[..., torch.Tensor] = torch.compile(
        model, backend="sardonyx", options={"fallback": "error", "cache_dir": "", **options}
    )
    return run


def _kept(choice: PrecisionChoice) -> list[str]:
    return [layer.layer for layer in choice.layers if layer.precision in ("float32", "bf16")]


def _smoothed(choice: PrecisionChoice) -> list[str]:
    return [layer.layer for layer in choice.layers if layer.method == "smoothed"]


def table(results: Sequence[Guarded]) -> Table:
    """A row for each model."""
    made = Table("precision", ["model", "float32 ms", "ms", "× float32", "error", "layers", "holds"])
    for m in results:
        layers = ", ".join(f"{count} {name}" for name, count in m.layers.items())
        times = (milliseconds(m.float32_seconds), milliseconds(m.seconds), f"{m.float32_seconds / m.seconds:.2f}")
        made.add(m.model, *times, f"{m.error:.1e}", layers, "yes" if m.holds else "NO")
    return made


def main() -> int:
    """Measure, show, and write what was measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.precision_guard", description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS), help="names, with commas between them")
    parser.add_argument("--precision", default="auto", help="the option's value")
    parser.add_argument("--max-drop", type=float, default=0.01, help="the bound")
    parser.add_argument("--rounds", type=int, default=15, help="turns that each build gets")
    parser.add_argument("--json", type=Path, help="where to write everything measured")
    given = parser.parse_args()
    torch.set_grad_enabled(False)
    results, names = [], given.models.split(",")
    with progress(len(names)) as shown:
        for name in names:
            shown.step(name)
            results.append(guard(name, given.precision, given.max_drop, given.rounds))
    table(results).show()
    for m in results:
        if m.model == "outliers":
            say(f"of the model with outliers these layers are not in int8: {', '.join(m.kept) or 'none'}")
            say(f"and these have their channels scaled: {', '.join(m.smoothed) or 'none'}")
    if given.json:
        content = {**describe(), "results": [{**asdict(m), "holds": m.holds} for m in results]}
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0 if all(m.holds for m in results) else 1


if __name__ == "__main__":
    sys.exit(main())
