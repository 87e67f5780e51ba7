"""Weights in four bits: scales of the least error, and rounding with error feedback."""

from __future__ import annotations

import math

import pytest
import torch

from sardonyx.native.linear import quantize_int4
from sardonyx.precision import rounding
from sardonyx.precision.metric import relative_error
from sardonyx.precision.rounding import nearest_int4, round_int4, usable_rows

DEPTH, COLUMNS = 192, 80
each_symmetry = pytest.mark.parametrize("symmetric", [True, False])


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weight() -> torch.Tensor:
    return random(DEPTH, COLUMNS) + 0.3


def correlated(rows: int, seed: int) -> torch.Tensor:
    """Activations in few directions, as those of trained models."""
    directions = random(DEPTH, DEPTH, seed=7) * torch.logspace(0, -2, DEPTH)[:, None]
    return random(rows, DEPTH, seed=seed) @ directions


@each_symmetry
@pytest.mark.parametrize("block", [32, 64, 128])
def test_error_feedback_leaves_less_error_for_correlated_activations(block: int, symmetric: bool) -> None:
    w, unseen = weight(), correlated(300, seed=2)
    rounded, method = round_int4(w, correlated(400, seed=1), block, symmetric=symmetric)
    nearest = quantize_int4(w, block, symmetric=symmetric)
    errors = [relative_error(unseen @ x.dequantized(), unseen @ w) for x in (rounded, nearest)]
    assert errors[0] < 0.8 * errors[1]
    assert method == "GPTQ"
    assert (rounded.zero_points is None) == symmetric


@each_symmetry
def test_scales_are_those_of_the_least_error(symmetric: bool) -> None:
    w = weight()[:180]  # the last block is cut off
    best, plain = (f(w, 64, symmetric=symmetric) for f in (nearest_int4, quantize_int4))
    errors = [(x.dequantized() - w).norm() for x in (best, plain)]
    assert errors[0] < 0.98 * errors[1]
    assert best.codes.shape == w.shape
    assert int(best.codes.max()) <= 15


@pytest.mark.parametrize("x", [correlated(8, seed=1), torch.zeros(500, DEPTH), torch.full((500, DEPTH), math.nan)])
def test_few_rows_do_not_decide(x: torch.Tensor) -> None:
    rounded, method = round_int4(weight(), x, 64, symmetric=True)
    assert method == "least squares"
    assert torch.equal(rounded.codes, nearest_int4(weight(), 64, symmetric=True).codes)


def test_feedback_that_does_not_carry_over_is_not_used() -> None:
    _, method = round_int4(weight(), random(40, DEPTH, seed=3), 64, symmetric=True)  # fewer rows than channels
    assert method == "least squares"


def test_fewer_rows_than_channels_help_where_they_are_alike() -> None:
    w, unseen = weight(), correlated(300, seed=2)
    rounded, method = round_int4(w, correlated(DEPTH // 2, seed=1), 64, symmetric=True)
    nearest = nearest_int4(w, 64, symmetric=True)
    errors = [relative_error(unseen @ x.dequantized(), unseen @ w) for x in (rounded, nearest)]
    assert method == "GPTQ"
    assert errors[0] < 0.9 * errors[1]


def test_rounding_is_reproducible_and_leaves_its_arguments() -> None:
    w, x = weight(), correlated(200, seed=1)
    first, second = (round_int4(w, x, 32, symmetric=False)[0] for _ in range(2))
    assert torch.equal(first.codes, second.codes)
    assert torch.equal(w, weight())
    assert torch.equal(x, correlated(200, seed=1))


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_activations_may_have_any_magnitude(scale: float) -> None:
    w, x = weight(), correlated(400, seed=1)
    usual, _ = round_int4(w, x, 32, symmetric=True)
    scaled, method = round_int4(w, x * scale, 32, symmetric=True)
    assert method == "GPTQ"
    assert (usual.codes != scaled.codes).float().mean() < 0.05


def test_columns_are_rounded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    w, x = weight(), correlated(300, seed=1)
    whole, _ = round_int4(w, x, 32, symmetric=True)
    monkeypatch.setattr(rounding, "_COLUMNS", 33)
    parts, _ = round_int4(w, x, 32, symmetric=True)
    assert (whole.codes != parts.codes).float().mean() < 0.01  # sums in another order


def test_rows_that_are_not_finite_or_zero_are_left_out() -> None:
    x = random(6, DEPTH)
    x[1, 3], x[2, 5], x[4] = math.inf, math.nan, 0.0
    assert torch.equal(usable_rows(x.view(2, 3, DEPTH)), x[[0, 3, 5]])
    assert usable_rows(x[:0]).shape == (0, DEPTH)
