"""Choose a precision for each layer: the fastest for which results stay within a bound."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

from sardonyx.precision.plan import FALLBACKS, FLOAT32, Plan, Type
from sardonyx.precision.storage import Storage

FASTER, AS_FAST = 0.97, 1.03
"""Shares of the time in float32, apart by what equal calls differ by: what is faster, and what is not slower."""


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
    chained: bool = False
    """Whether it is one of the layers that are worthwhile only together, as their results have another layout."""
    share: float = FASTER
    """The share of its time in float32 that a layer may take."""

    def possible(self, wanted: Sequence[Type]) -> list[Type]:
        """Return those of these precisions that it can run in."""
        return [t for t in wanted if t in self.trials]

    def worthwhile(self, wanted: Sequence[Type]) -> list[Type]:
        """Return those of these precisions that are fast enough."""
        return [t for t in self.possible(wanted) if self.trials[t].seconds < self.float32_seconds * self.share]

    def fastest(self, wanted: Sequence[Type]) -> Type:
        """Return the fastest of these precisions that it can run in, else float32."""
        return min(self.possible(wanted), key=lambda t: self.trials[t].seconds, default=FLOAT32)

    def fastest_seconds(self, wanted: Sequence[Type]) -> float:
        """Return the time in the fastest of these precisions that it can run in, else in float32."""
        fastest = self.fastest(wanted)
        return self.float32_seconds if fastest == FLOAT32 else self.trials[fastest].seconds

    def error(self, precision: Type) -> float:
        """Return the error in a precision."""
        return self.trials[precision].error if precision in self.trials else 0.0


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


def search(
    layers: Sequence[LayerTrials],
    wanted: Sequence[Type],
    evaluate: Evaluate,
    max_drop: float,
    *,
    in_order: bool = False,
) -> Found:
    """Return the plan that keeps the drop within the bound with the fewest steps back to a higher precision.

    `wanted` are the precisions that may be used. Each layer starts in the fastest of them, or with `in_order` in the
    first; steps back are ordered by the error that each removes, largest first, and their least number is found by
    bisection.
    """
    allowed = worthwhile(layers, wanted)
    paths = {trials.layer: path(trials, allowed[trials.layer], in_order=in_order) for trials in layers}
    start = Plan({layer: types[0] for layer, types in paths.items()}, _storages(layers))
    steps = _steps(layers, paths)
    tried: dict[int, float] = {}

    def drop_after(count: int) -> float:
        if count not in tried:
            plan = after(start, steps[:count])
            tried[count] = 0.0 if plan.is_float32 else evaluate(plan)
        return tried[count]

    count = _least(len(steps), lambda n: drop_after(n) <= max_drop)
    demoted = tuple(dict.fromkeys(layer for layer, _ in steps[:count]))
    return Found(after(start, steps[:count]), drop_after(count), len(tried), demoted)


def worthwhile(layers: Sequence[LayerTrials], wanted: Sequence[Type]) -> Mapping[str, list[Type]]:
    """Return the precisions in which each layer is faster than in float32; in a chain, in which all are together."""
    chain = [trials for trials in layers if trials.chained]
    together = sum(trials.fastest_seconds(wanted) for trials in chain)
    wins = together < sum(trials.float32_seconds * trials.share for trials in chain)
    in_chain = {trials.layer: trials.possible(wanted) if wins else [] for trials in chain}
    return {trials.layer: in_chain.get(trials.layer, trials.worthwhile(wanted)) for trials in layers}


_Step: TypeAlias = tuple[str, Type]
"""A layer, and the precision that it gets."""


def after(plan: Plan, steps: Sequence[_Step]) -> Plan:
    """Return the plan after steps back."""
    for layer, precision in steps:
        plan = plan.with_layer(layer, precision)
    return plan


def path(trials: LayerTrials, allowed: Sequence[Type], *, in_order: bool = False) -> Sequence[Type]:
    """Return the precision that a layer starts in, and those that it goes back to; the last is float32."""
    fastest = min(allowed, key=lambda t: trials.trials[t].seconds, default=FLOAT32)
    types = [next(iter(allowed), FLOAT32) if in_order else fastest]
    while types[-1] != FLOAT32:
        types.append(_next(types[-1], allowed))
    return types


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


def _next(precision: Type, allowed: Sequence[Type]) -> Type:
    """Return the next higher precision that a layer may have."""
    following = FALLBACKS[precision]
    while following != FLOAT32 and following not in allowed:
        following = FALLBACKS[following]
    return following


def _least(most: int, holds: Callable[[int], bool]) -> int:
    """Return a number up to `most` for which `holds`, and not for the one before; at most, it is taken to hold."""
    if holds(0):
        return 0
    low, high = 0, most  # it does not hold for low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
