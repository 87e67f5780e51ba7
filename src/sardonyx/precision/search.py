"""Choose a precision for each layer: the fastest for which results stay within a bound."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

from sardonyx.precision.plan import FALLBACKS, FLOAT32, Plan, Type
from sardonyx.precision.storage import Storage


@dataclass(frozen=True)
class Wanted:
    """The precisions that layers may have."""

    types: Sequence[Type]
    first: Type | None = None
    """The one that a layer starts in wherever it is faster than float32, if not the fastest."""

    def without(self, precision: Type) -> Wanted:
        """Return what is wanted without a precision."""
        return Wanted([t for t in self.types if t != precision], None if self.first == precision else self.first)


@dataclass(frozen=True)
class Trial:
    """A layer in one precision, by itself: its relative error, and the seconds of a call."""

    error: float
    seconds: float
    storage: Storage | None = None
    """How the weight is stored, if not as usual."""


@dataclass(frozen=True)
class LayerTrials:
    """What was measured of a layer: in float32, and in each precision that it can run in."""

    layer: str
    float32_seconds: float
    trials: Mapping[Type, Trial] = field(default_factory=dict)

    def worthwhile(self, wanted: Sequence[Type]) -> list[Type]:
        """Return those of these precisions that are faster than float32."""
        return [t for t in wanted if t in self.trials and self.trials[t].seconds < self.float32_seconds * _WINS]

    def path(self, wanted: Wanted) -> list[Type]:
        """Return the precision that the layer starts in and those that it goes back to; the last is float32."""
        allowed = self.worthwhile(wanted.types)
        fastest = min(allowed, key=lambda t: self.trials[t].seconds, default=FLOAT32)
        path = [wanted.first if wanted.first is not None and wanted.first in allowed else fastest]
        while path[-1] != FLOAT32:
            following = FALLBACKS[path[-1]]
            while following != FLOAT32 and following not in allowed:
                following = FALLBACKS[following]
            path.append(following)
        return path

    def error(self, precision: Type) -> float:
        """Return the error in a precision."""
        return self.trials[precision].error if precision in self.trials else 0.0


_WINS = 0.97
"""A layer must take at most this share of its time in float32: what equal calls differ by."""

Evaluate: TypeAlias = Callable[[Plan], float]
"""Returns the drop of the results of the whole model."""


@dataclass(frozen=True)
class Found:
    """The plan, and the drop of its results."""

    plan: Plan
    drop: float
    evaluations: int
    demoted: Sequence[str] = ()
    """Layers that run in a higher precision than they would by speed alone, most sensitive first."""


def search(layers: Sequence[LayerTrials], wanted: Wanted, evaluate: Evaluate, max_drop: float) -> Found:
    """Return the plan that keeps the drop within the bound with the fewest steps back to a higher precision.

    Steps back are ordered by the error that each removes, largest first, and their least number is found by bisection.
    """
    paths = {trials.layer: trials.path(wanted) for trials in layers}
    steps = _steps(layers, paths)
    start = Plan({layer: path[0] for layer, path in paths.items()}, _storages(layers))
    tried: dict[int, float] = {}

    def drop_after(count: int) -> float:
        if count not in tried:
            plan = after(start, steps[:count])
            tried[count] = 0.0 if plan.is_float32 else evaluate(plan)
        return tried[count]

    count = _least(len(steps), lambda n: drop_after(n) <= max_drop)
    demoted = tuple(dict.fromkeys(layer for layer, _ in steps[:count]))
    return Found(after(start, steps[:count]), drop_after(count), len(tried), demoted)


_Step: TypeAlias = tuple[str, Type]
"""A layer, and the precision that it gets."""


def after(plan: Plan, steps: Sequence[_Step]) -> Plan:
    """Return the plan after steps back."""
    for layer, precision in steps:
        plan = plan.with_layer(layer, precision)
    return plan


def _storages(layers: Sequence[LayerTrials]) -> Mapping[tuple[str, Type], Storage]:
    found = {(trials.layer, t): trial.storage for trials in layers for t, trial in trials.trials.items()}
    return {key: storage for key, storage in found.items() if storage is not None}


def _steps(layers: Sequence[LayerTrials], paths: Mapping[str, Sequence[Type]]) -> list[_Step]:
    """Return every step back of every layer, ordered by the error that it removes; those of one layer stay in order."""
    found: list[tuple[float, str, Type]] = []
    for trials in layers:
        least = float("inf")
        for precision, following in pairwise(paths[trials.layer]):
            least = min(least, trials.error(precision) - trials.error(following))
            found.append((least, trials.layer, following))
    return [(layer, precision) for _, layer, precision in sorted(found, key=lambda step: -step[0])]


def _least(most: int, holds: Callable[[int], bool]) -> int:
    """Return a number up to `most` for which `holds`, and not for the one before; at most, it is taken to hold."""
    if holds(0):
        return 0
    low, high = 0, most  # it does not hold for low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
