"""The search for a plan, with drops that are sums of the errors of layers."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from sardonyx.precision.plan import Plan
from sardonyx.precision.search import Found, LayerTrials, Trial, search

INT8 = ("int8", "bf16")


def layer(
    name: str, int8: float = 0.05, bf16: float = 0.005, *, seconds: tuple[float, float] = (0.25, 0.5)
) -> LayerTrials:
    return LayerTrials(name, 1.0, {"int8": Trial(int8, seconds[0]), "bf16": Trial(bf16, seconds[1])})


def found(layers: list[LayerTrials], max_drop: float) -> Found:
    errors: Mapping[str, LayerTrials] = {trials.layer: trials for trials in layers}

    def drop(plan: Plan) -> float:
        return sum(errors[name].error(precision) for name, precision in plan.layers.items())

    return search(layers, INT8, drop, max_drop)


def test_every_layer_is_in_the_fastest_precision_within_the_bound() -> None:
    result = found([layer("a"), layer("b")], 0.2)
    assert result.plan.layers == {"a": "int8", "b": "int8"}
    assert (result.evaluations, result.demoted) == (1, ())


def test_the_most_sensitive_layer_goes_back_first() -> None:
    result = found([layer("a", 0.01), layer("b", 0.9), layer("c", 0.02)], 0.1)
    assert result.plan.layers == {"a": "int8", "b": "bf16", "c": "int8"}
    assert result.demoted == ("b",)


def test_a_layer_that_is_still_too_far_runs_in_float32() -> None:
    result = found([layer("a", 0.9, 0.8), layer("b", 0.001, 0.0005)], 0.01)
    assert result.plan.layers == {"a": "float32", "b": "int8"}
    assert result.drop <= 0.01


def test_a_slower_precision_is_not_used() -> None:
    slow = layer("a", seconds=(1.5, 0.5))
    assert found([slow], 1.0).plan.layers == {"a": "bf16"}
    assert found([layer("a", seconds=(0.5, 1.0))], 0.01).plan.layers == {"a": "float32"}


def test_without_any_precision_everything_is_float32() -> None:
    result = search([LayerTrials("a", 1.0)], INT8, lambda plan: pytest.fail("nothing to evaluate"), 0.0)
    assert result.plan.is_float32
    assert result.drop == 0.0


def test_a_bound_of_zero_leaves_float32() -> None:
    assert found([layer(name) for name in "abcdefgh"], 0.0).plan.is_float32


def test_few_evaluations_are_enough() -> None:
    result = found([layer(f"layer{i}", 0.01 + 0.001 * i) for i in range(64)], 0.5)
    assert result.evaluations <= 9
    assert 0 < result.plan.counts()["int8"] < 64


def chained(name: str, bf16: float, error: float = 0.001) -> LayerTrials:
    return LayerTrials(name, 1.0, {"bf16": Trial(error, bf16)}, chained=True)


def test_a_chain_is_in_lower_precision_together_or_not_at_all() -> None:
    assert found([chained("a", 0.2), chained("b", 1.3)], 1.0).plan.layers == {"a": "bf16", "b": "bf16"}
    assert found([chained("a", 0.9), chained("b", 1.3)], 1.0).plan.is_float32
    mixed = found([chained("a", 0.9), chained("b", 1.3), layer("c", seconds=(1.5, 0.5))], 1.0)
    assert mixed.plan.layers == {"a": "float32", "b": "float32", "c": "bf16"}


def test_a_layer_of_a_chain_goes_back_for_the_bound() -> None:
    assert found([chained("a", 0.2), chained("b", 0.5, error=0.9)], 0.1).plan.layers == {"a": "bf16", "b": "float32"}
