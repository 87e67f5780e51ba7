"""How far results in lower precision are from those in float32, without labels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from sardonyx.errors import OptionError

Metric: TypeAlias = Callable[[Sequence[Any], Sequence[Any]], float]
"""Takes results and those in float32; returns the drop, 0 for equal results."""


@dataclass(frozen=True)
class Difference:
    """The drop, which is compared with `max_drop`, and what it was computed from."""

    drop: float
    relative_error: float = 0.0
    """The largest of any result: the Frobenius norm of the difference by that of the result in float32."""
    divergence: float = 0.0
    """The largest mean Kullback-Leibler divergence, in nats, of the distributions that logits stand for."""
    agreement: float = 1.0
    """The least share of rows of logits whose largest number is at the same place."""


def relative_error(result: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the norm of the difference, relative to that of the reference; infinite if one is not finite.

    >>> relative_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0]))
    0.1
    """
    if result.shape != reference.shape:
        return math.inf
    error, norm = _norm(result - reference), _norm(reference)
    if not math.isfinite(norm):
        same = (result == reference) | (result.isnan() & reference.isnan())
        result, reference = (x.masked_fill(same & ~reference.isfinite(), 0.0) for x in (result, reference))
        error, norm = _norm(result - reference), _norm(reference)
    if not math.isfinite(error):
        return math.inf
    return error / norm if norm else (math.inf if error else 0.0)


def _norm(x: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64))


def divergence(result: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the mean divergence of the distributions over the last axis, of those that the reference has."""
    logs, expected = (torch.log_softmax(x.double(), -1) for x in (result, reference))
    valid = ~expected.isnan().any(-1)
    if not bool(valid.any()):
        return 0.0
    logs, expected = logs[valid], expected[valid]
    terms = torch.where(expected.isneginf(), 0.0, expected.exp() * (expected - logs))
    mean = float(terms.sum(-1).mean())
    return max(mean, 0.0) if math.isfinite(mean) else math.inf


def agreement(result: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the share of rows whose largest number is at the same place."""
    return float((result.argmax(-1) == reference.argmax(-1)).double().mean())


def differ(results: Sequence[Any], references: Sequence[Any], logits: frozenset[int] = frozenset()) -> Difference:
    """Return how results differ; `logits` are the places of those whose last axis stands for a distribution."""
    pairs = {i: pair for i, pair in enumerate(zip(results, references, strict=True)) if _is_compared(pair[1])}
    errors = [relative_error(got, expected) for got, expected in pairs.values()]
    rows = [pairs[i] for i in sorted(logits) if i in pairs and pairs[i][1].dim() and pairs[i][1].shape[-1] > 1]
    divergences = [divergence(got, expected) for got, expected in rows]
    error, diverged = max(errors, default=0.0), max(divergences, default=0.0)
    agreed = min((agreement(got, expected) for got, expected in rows), default=1.0)
    return Difference(max(error, diverged), error, diverged, agreed)


_ROUNDING = 1e-4
"""What engines may differ by in float32."""


def within(bound: float, metric: Metric | None) -> Callable[[Sequence[Any], Sequence[Any]], bool]:
    """Return whether results are within a bound of those of torch in float32."""

    def agree(results: Sequence[Any], references: Sequence[Any]) -> bool:
        drop = differ(results, references).drop if metric is None else checked(metric)(results, references)
        return drop <= bound + _ROUNDING

    return agree


def _is_compared(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype.is_floating_point and x.numel() > 0


def checked(metric: Metric) -> Metric:
    """Return a metric of the user with errors that say what it did; it may edit what it is given."""

    def measure(results: Sequence[Any], references: Sequence[Any]) -> float:
        copies = [x.clone() if isinstance(x, torch.Tensor) else x for x in references]  # others are compared with them
        try:
            drop = float(metric(results, copies))
        except Exception as error:
            raise OptionError(
                f"the metric raised {type(error).__name__}: {error}",
                hint="it takes the results and those in float32, two lists of tensors, and returns a number",
            ) from error
        if math.isnan(drop):
            raise OptionError("the metric returned NaN", hint="it returns the drop: 0 for equal results")
        return drop

    return measure
