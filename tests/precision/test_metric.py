"""How far results are from those in float32."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from sardonyx import OptionError
from sardonyx.precision.metric import checked, differ, divergence, relative_error


def test_the_error_is_relative_to_the_norm() -> None:
    x = torch.randn(5, 7)
    assert relative_error(x * 1.01, x) == pytest.approx(0.01, rel=1e-4)
    assert relative_error(x, x) == 0.0


def test_numbers_that_are_not_finite_must_be_equal() -> None:
    x = torch.tensor([1.0, math.inf, math.nan])
    assert relative_error(x, x) == 0.0
    assert relative_error(torch.tensor([1.0, 5.0, math.nan]), x) == math.inf
    assert relative_error(torch.tensor([math.nan, math.inf, math.nan]), x) == math.inf


def test_a_result_of_zeros_must_be_zeros() -> None:
    zeros = torch.zeros(3)
    assert relative_error(zeros, zeros) == 0.0
    assert relative_error(zeros + 1e-9, zeros) == math.inf


def test_the_worst_result_counts() -> None:
    x, y = torch.randn(4, 3), torch.randn(9)
    assert differ([x, y * 1.1], [x, y]).drop == pytest.approx(0.1, rel=1e-4)


def test_integers_and_empty_results_are_not_compared() -> None:
    assert (
        differ(
            [torch.ones(2, dtype=torch.int64), torch.ones(0)], [torch.zeros(2, dtype=torch.int64), torch.ones(0)]
        ).drop
        == 0.0
    )


def test_logits_are_compared_as_distributions() -> None:
    reference = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 2.0]])
    flipped = torch.tensor([[1.0, 2.0, 0.0], [0.0, 1.0, 2.0]])
    found = differ([flipped], [reference], frozenset({0}))
    assert found.agreement == 0.5
    assert found.divergence == pytest.approx(divergence(flipped, reference))
    assert divergence(reference + 5, reference) == pytest.approx(0.0, abs=1e-12)
    masked = torch.tensor([[1.0, -math.inf]])
    assert divergence(masked, masked) == 0.0


def test_rows_without_a_distribution_are_compared_as_numbers() -> None:
    reference = torch.tensor([[2.0, 1.0], [math.nan, math.nan]])
    near = torch.tensor([[2.0, 1.001], [math.nan, math.nan]])
    assert differ([near], [reference], frozenset({0})).drop < 0.001
    assert differ([torch.nan_to_num(near)], [reference], frozenset({0})).drop == math.inf
    assert divergence(reference[1:], reference[1:]) == 0.0


def test_a_metric_that_raises_or_returns_nan_is_an_error() -> None:
    with pytest.raises(OptionError, match="ZeroDivisionError"):
        checked(lambda results, references: 1 / 0)([], [])
    with pytest.raises(OptionError, match="NaN"):
        checked(lambda results, references: math.nan)([], [])


def test_a_metric_may_edit_what_it_is_given() -> None:
    def metric(results: Sequence[Any], references: Sequence[Any]) -> float:
        return float(results[0].sub_(references[0]).abs_().div_(references[0].abs_()).amax())

    references = [torch.tensor([-1.0, 2.0])]
    for _ in range(2):
        assert checked(metric)([torch.tensor([-1.5, 2.0])], references) == 0.5
    assert references[0].tolist() == [-1.0, 2.0]
