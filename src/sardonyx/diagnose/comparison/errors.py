"""How far two values are apart, and what in them is no number."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sardonyx.telemetry.verify import TOLERANCES, difference


@dataclass(frozen=True)
class ValueStats:
    """How many elements of a value are no finite numbers, and its range where they are."""

    nan: int = 0
    inf: int = 0
    low: float = 0.0
    high: float = 0.0

    @property
    def finite(self) -> bool:
        """Whether every element is a finite number."""
        return not self.nan and not self.inf

    def __str__(self) -> str:
        words = [f"{count} {name}" for count, name in ((self.nan, "NaN"), (self.inf, "Inf")) if count]
        return ", ".join([f"{self.low:.4g} to {self.high:.4g}", *words])


def value_stats(value: torch.Tensor) -> ValueStats:
    """What is in a value.

    >>> print(health_of(torch.tensor([1.0, -2.0, float("nan")])))
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


def error_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to the largest magnitude expected; infinite where NaN, Inf or sizes differ.

    Real numbers may have different precision: both are compared in double. Complex ones may be pairs, as ONNX has them.

    >>> error_of(torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0], dtype=torch.float64))
    0.25
    """
    found, expected = (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in (found, expected))
    if found.is_floating_point() and expected.is_floating_point():
        found, expected = found.double(), expected.double()
        strange = ~expected.isfinite()
        if found.shape == expected.shape and not torch.equal(
            _encode_nonfinite(found, strange), _encode_nonfinite(expected, strange)
        ):
            return float("inf")
    return difference(found, expected)


def _encode_nonfinite(value: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """What is no finite number, with NaN as a number that is equal to itself."""
    return value[where].nan_to_num(nan=0.5, posinf=1.0, neginf=-1.0)


def tolerance_of(value: torch.Tensor) -> float:
    """What `verify` allows a value of this dtype."""
    return TOLERANCES.get(value.dtype, 0.0)
