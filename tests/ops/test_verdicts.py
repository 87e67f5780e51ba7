"""How samples become a verdict, and verdicts a page."""

from __future__ import annotations

import pytest
import torch

from .check import Outcome, difference, operators, samples
from .page import page


@pytest.mark.parametrize(
    ("outcome", "verdict"),
    [
        (Outcome("add", "float32", passed=3), "passes"),
        (Outcome("add", "float32", passed=2, refused=1), "partly"),
        (Outcome("add", "float32", refused=3), "in torch"),
        (Outcome("add", "float32", refused=3, empty=1), "in torch"),
        (Outcome("add", "float32", passed=2, wrong=["sample 0"]), "WRONG"),
        (Outcome("add", "float32", passed=2, crashed=["sample 0"]), "crash"),
        (Outcome("add", "float32"), "no samples"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_one_bad_sample_spoils_an_operator(outcome: Outcome, verdict: str) -> None:
    assert outcome.verdict == verdict


def test_values_dtypes_shapes_and_counts_are_compared() -> None:
    one = torch.ones(2)
    assert difference(one, one.clone()) == ""
    assert "dtype" in difference(one, one.double())
    assert "shape" in difference(one, one[:1])
    assert "close" in difference(one, one + 1)
    assert "results" in difference((one, one), (one,))


def test_samples_are_spread_over_the_database() -> None:
    op = operators()["nn.functional.conv2d"]
    few, all_of_them = samples(op, torch.float32, 2), samples(op, torch.float32, 400)
    assert len(few) == 2 < len(all_of_them)
    assert few[-1].input.shape == all_of_them[-1].input.shape


def test_the_page_has_a_row_for_each_operator_and_the_reason_for_each_refusal() -> None:
    outcomes = [
        Outcome("add", "float32", passed=3).as_json(),
        Outcome("svd", "float32", refused=1, reasons={"no translation": 1}).as_json(),
    ]
    text = page({"date": "2026-01-01", "versions": {"torch": "2.13"}, "samples": 3, "outcomes": outcomes})
    assert "| `add` | ✓ |  |" in text
    assert "| `svd` | in torch | no translation |" in text
