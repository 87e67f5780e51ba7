"""`bisect_rules` finds the rule that changes a result, or the rules that do so together."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir
import pytest
import torch

from sardonyx.diagnose import bisect_rules
from sardonyx.optimize.optimizer import all_rules
from sardonyx.optimize.pattern import P
from sardonyx.optimize.rule import RULES, Match, rule


@pytest.fixture
def wrong_rules() -> Iterator[None]:
    """Rules that are wrong on purpose, known to the test alone."""
    known = all_rules()

    @rule(P.Sin("x"))
    def sine_as_cosine(m: Match) -> ir.Value:
        return m.g.Cos(m.x)

    @rule(P.Tanh("x"))
    def half_an_error(m: Match) -> ir.Value:
        return m.g.Div(m.g.Sinh(m.x), m.g.Cosh(m.x))

    @rule(P.Div(P.Sinh("x"), P.Cosh("x")))
    def the_other_half(m: Match) -> ir.Value:
        return m.g.Neg(m.x)

    yield
    RULES[:] = known


def model(x: torch.Tensor) -> torch.Tensor:
    y = torch.nn.functional.silu(x @ x.T + 1.0) * 1.0
    return (y.sin() + y).reshape(-1).reshape(4, 4)


@pytest.mark.usefixtures("wrong_rules")
def test_the_rule_that_changes_the_result_is_found() -> None:
    found = bisect_rules(model, torch.randn(4, 4))
    (culprit,) = found.culprits
    assert culprit.rules == found.rules == ("SineAsCosine",)
    assert culprit.hits == 1
    assert culprit.error > 1e-2
    assert found.error > 1e-2
    assert found.error_without < 1e-5
    assert "SineAsCosine ×1" in str(found)
    assert '"default-SineAsCosine"' in str(found)


@pytest.mark.usefixtures("wrong_rules")
def test_rules_that_change_the_result_together_are_found_together() -> None:
    found = bisect_rules(lambda x: model(x).tanh(), torch.randn(4, 4) / 4)
    assert {frozenset(culprit.rules) for culprit in found.culprits} == {
        frozenset({"SineAsCosine"}),
        frozenset({"HalfAnError", "TheOtherHalf"}),
    }
    assert found.error_without < 1e-5


@pytest.mark.usefixtures("wrong_rules")
def test_a_tolerance_can_be_given() -> None:
    assert not bisect_rules(model, torch.randn(4, 4), tolerance=100.0).culprits


@pytest.mark.usefixtures("wrong_rules")
def test_rules_that_the_options_leave_out_are_no_suspects() -> None:
    found = bisect_rules(model, torch.randn(4, 4), options={"optimize": "default-SineAsCosine"})
    assert not found.culprits


def test_it_says_when_no_rule_changes_the_result() -> None:
    found = bisect_rules(model, torch.randn(4, 4))
    assert not found.culprits
    assert found.hits["Silu"] == 1
    assert "no rule changes the result" in str(found)
