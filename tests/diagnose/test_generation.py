"""Two generations compared token by token, and what a generation tells of time and memory."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from sardonyx.diagnose.generation import Generation, compare_generations


def generation(*logits: Sequence[Sequence[float]]) -> Generation:
    """Greedy tokens of these logits: one for each position, a row for each prompt."""
    positions = tuple(torch.tensor(position) for position in logits)
    tokens = torch.stack([position.argmax(1) for position in positions], 1)
    return Generation(tokens, positions, tuple(float(i + 1) for i in range(len(positions))), 0)


NAMES = ("eager", "ours")


def test_equal_tokens_have_the_largest_difference_of_logits() -> None:
    expected = generation([[0.0, 4.0]], [[2.0, 0.0]])
    found = generation([[0.0, 4.0]], [[2.0, 0.5]])
    comparison = compare_generations(NAMES, expected, found)
    assert not comparison.differs
    assert comparison.error == pytest.approx(0.25)
    assert (
        str(comparison)
        == "ours against eager: 2 tokens, all tokens equal; logits differ by 2.50e-01 of their magnitude"
    )


def test_the_first_token_that_differs_has_both_logits() -> None:
    expected = generation([[0.0, 4.0, 1.0]], [[2.0, 1.0, 0.0]], [[9.0, 0.0, 0.0]])
    found = generation([[0.0, 4.0, 1.0]], [[1.0, 3.0, 0.0]], [[0.0, 0.0, 9.0]])
    (x,) = compare_generations(NAMES, expected, found).divergences
    assert (x.row, x.position, x.expected, x.found) == (0, 1, 0, 1)
    assert x.top == ((0, 2.0, 1.0), (1, 1.0, 3.0), (2, 0.0, 0.0))
    assert (x.margin, x.error, x.by_rounding) == (1.0, 1.0, False)


def test_a_tie_is_decided_by_rounding() -> None:
    (x,) = compare_generations(NAMES, generation([[2.0, 1.99999]]), generation([[1.99999, 2.0]])).divergences
    assert x.by_rounding
    assert (x.margin, x.error) == (pytest.approx(1e-5, rel=0.1), pytest.approx(5e-6, rel=0.1))


def test_logits_in_two_dtypes_are_compared_in_the_less_precise() -> None:
    expected, found = generation([[1.0, 0.5]]), generation([[1.0, 0.5]])
    wide = Generation(expected.tokens, tuple(x.double() + 1e-12 for x in expected.logits), expected.seconds, 0)
    assert compare_generations(NAMES, wide, found).error == 0.0


def test_logits_after_the_first_difference_do_not_count() -> None:
    expected = generation([[1.0, 0.0]], [[1.0, 0.0]])
    found = generation([[1.0, 1.5]], [[1.0, 90.0]])
    assert compare_generations(NAMES, expected, found).error == pytest.approx(1.5)


def test_rows_are_compared_one_by_one() -> None:
    expected = generation([[1.0, 0.0], [1.0, 0.0]], [[0.0, 1.0], [0.0, 1.0]])
    found = generation([[1.0, 0.0], [1.0, 0.0]], [[0.0, 1.0], [2.0, 1.0]])
    comparison = compare_generations(NAMES, expected, found)
    assert [(x.row, x.position) for x in comparison.divergences] == [(1, 1)]
    assert str(comparison).splitlines()[0].startswith("ours against eager: 2 rows of 2 tokens, 1 of 2 rows differ")


def test_tokens_a_second_are_those_of_all_rows_after_the_first() -> None:
    found = Generation(torch.zeros(4, 3), (), (2.0, 2.5, 3.0), 0)
    assert (found.first_token, found.total) == (2.0, 3.0)
    assert found.tokens_per_second == 8.0
