"""The error between two values, and statistics of a value: NaN, Inf, range."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sardonyx.telemetry.verify import TOLERANCES, difference


@dataclass(frozen=True)
class ValueStats:
    """Counts of NaN and Inf in a value, and the range of its finite elements."""

    nan: int = 0
    inf: int = 0
    low: float = 0.0
    high: float = 0.0

    @property
    def finite(self) -> bool:
        """Whether every element is a finite number."""
        return not self.nan and not self.inf

    def __str__(self) -> str:
        counts = [f"{count} {name}" for count, name in ((self.nan, "NaN"), (self.inf, "Inf")) if count]
        return ", ".join([f"{self.low:.4g} to {self.high:.4g}", *counts])


def value_stats(value: torch.Tensor) -> ValueStats:
    """Return the statistics of a value.

    >>> print(value_stats(torch.tensor([1.0, -2.0, float("nan")])))
    -2 to 1, 1 NaN
    """
    value = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
    if not value.numel():
        return ValueStats()
    if not value.is_floating_point():
        return ValueStats(low=float(value.min().item()), high=float(value.max().item()))
    nan, inf = int(value.isnan().sum()), int(value.isinf().sum())
    finite = value[value.isfinite()] if nan or inf else value
    low, high = (x.item() for x in finite.aminmax()) if finite.numel() else (0.0, 0.0)
    return ValueStats(nan, inf, low, high)


def error_of(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest expected magnitude; infinite if NaN, Inf or sizes differ.

    Floats of different precision are compared in double. Complex numbers may be pairs of floats, as in ONNX.

    >>> error_of(torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0], dtype=torch.float64))
    0.25
    """
    result, expected = (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in (result, expected))
    if result.is_floating_point() and expected.is_floating_point():
        result, expected = result.double(), expected.double()
        nonfinite = ~expected.isfinite()
        same_shape = result.shape == expected.shape
        if same_shape and not torch.equal(_nonfinite(result, nonfinite), _nonfinite(expected, nonfinite)):
            return float("inf")
    return difference(result, expected)


def _nonfinite(value: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """Return the selected elements with NaN and Inf encoded as numbers, so that they compare equal."""
    return value[where].nan_to_num(nan=0.5, posinf=1.0, neginf=-1.0)


def tolerance_of(value: torch.Tensor) -> float:
    """Return the tolerance of `verify` for a value's dtype."""
    return TOLERANCES.get(value.dtype, 0.0)
