"""Weights in four bits in torch.compile, and scales of channels in int8."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sardonyx.errors import OptionError
from sardonyx.native.linear import PRECISIONS
from sardonyx.options import Options
from sardonyx.precision import calibration
from sardonyx.precision.metric import relative_error
from sardonyx.run import layer_trials, precision_choice, precision_subject
from tests.precision.test_compile import compiled, inputs, model, precisions, run

pytestmark = [
    pytest.mark.usefixtures("ranked"),
    pytest.mark.skipif(any(p.missing() for p in PRECISIONS.values()), reason="no AVX512 for bfloat16 and int8"),
]


def correlated(rows: int, seed: int = 1) -> torch.Tensor:
    directions = torch.randn(64, 64, generator=torch.Generator().manual_seed(5)) * torch.logspace(0, -2, 64)[:, None]
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed)) @ directions


# int4


@pytest.mark.parametrize("bound", [0.005, 0.03, 0.3])
def test_layers_go_back_as_far_as_the_bound_asks(bound: float) -> None:
    module, x = model(), inputs()
    result, choice = run(module, x, precision="int4", max_drop=bound)
    assert relative_error(result, module(x)) <= bound
    assert {0.005: "bf16", 0.03: "int8", 0.3: "int4"}[bound] in precisions(choice)
    assert choice.drop <= bound


@pytest.fixture
def int8_is_fastest(ranked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def in_turns(calls: Sequence[Callable[[], Any]], **_: Any) -> list[list[float]]:
        return [[time] for time in ([1.0, 0.5, 0.2, 0.4] if len(calls) == 4 else [1.0, 0.5])]

    monkeypatch.setattr(layer_trials, "in_turns", in_turns)


@pytest.mark.usefixtures("int8_is_fastest")
def test_auto_has_four_bits_only_where_they_are_the_fastest() -> None:
    for precision, expected in (("auto", "int8"), ("int4", "int4")):
        _, choice = run(model(), inputs(), precision=precision, max_drop=0.5)
        assert precisions(choice) == [expected] * 3


@pytest.mark.usefixtures("int8_is_fastest")
def test_weights_are_not_rounded_to_four_bits_where_these_are_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "round_int4", lambda *_, **__: pytest.fail("a weight is rounded to int4"))
    tried: Counter[str] = Counter()
    call_with = layer_trials.LayerBench._call_with

    def counted(bench: Any, layer: Any, x: Any, precision: str, storage: Any) -> Any:
        tried[precision] += 1
        return call_with(bench, layer, x, precision, storage)

    monkeypatch.setattr(layer_trials.LayerBench, "_call_with", counted)
    module = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).eval()
    _, choice = run(module, correlated(400), precision="auto", max_drop=0.5)
    assert precisions(choice) == ["int8"] * 3
    assert (tried["int4"], tried["bf16"]) == (1, 3)  # of one shape, the first shows it


def test_auto_rounds_weights_by_activations_where_four_bits_are_the_fastest() -> None:
    _, choice = run(model(), correlated(400), precision="auto", max_drop=0.5)
    assert (choice.layers[0].precision, choice.layers[0].method) == ("int4", "GPTQ")


@pytest.mark.usefixtures("int8_is_fastest")
def test_a_model_that_is_slower_in_int8_is_not_tried_in_int4(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([[1.0, 1.5], [1.0, 0.5]])
    monkeypatch.setattr(precision_choice, "in_turns", lambda calls, **_: [[t] for t in next(times)])
    _, choice = run(model(), inputs(), precision="auto", max_drop=0.5)
    assert precisions(choice) == ["bf16"] * 3


def test_smaller_blocks_are_more_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(precision_subject.WANTED, "int4", ("int4",))  # fewer libraries to compile
    module, x = nn.Linear(256, 48).eval(), torch.randn(3, 256)
    module.weight.normal_()
    errors = [
        relative_error(run(module, x, precision="int4", max_drop=1.0, int4_block=block)[0], module(x))
        for block in (32, 64, 128)
    ]
    assert 0 < errors[0] < errors[1] < errors[2] < 0.2


def test_blocks_of_other_sizes_are_an_error() -> None:
    with pytest.raises(OptionError, match="use 32, 64 or 128"):
        Options.of(precision="int4", int4_block=48)


def test_error_feedback_is_measured_for_each_layer_and_reported() -> None:
    x = correlated(400)
    _, choice = run(model(), x, precision="int4", max_drop=0.5)
    assert choice.layers[0].method == "GPTQ"
    _, few = run(model(), correlated(8), precision="int4", max_drop=0.5)
    assert few.layers[0].method == "least squares"
    assert choice.layers[0].error < 0.8 * few.layers[0].error
    assert "0: int4 (GPTQ), error" in str(choice)


def test_rounded_weights_are_kept_with_the_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(precision_subject.WANTED, "int4", ("int4",))  # fewer libraries to compile
    module, x = model(), correlated(400)
    result, _ = run(module, x, precision="int4", max_drop=0.5, cache_dir=str(tmp_path))
    monkeypatch.setattr(layer_trials, "calibrated", lambda *_: pytest.fail("weights are rounded again"))
    again, choice = run(module, x, precision="int4", max_drop=0.5, cache_dir=str(tmp_path))
    assert torch.equal(again, result)
    assert choice.remembered


def test_edited_weights_are_rounded_to_the_nearest() -> None:
    module, x = model(), correlated(400)
    call = compiled(module, precision="int4", max_drop=0.5)
    call(x)
    for edit in (lambda: module[0].weight.mul_(-2.0), lambda: module[4].weight.data.add_(0.1)):
        edit()
        assert relative_error(call(x), module(x)) < 0.3


def test_a_slower_model_is_tried_without_the_lowest_precision(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    times = iter([[1.0, 2.0], [1.0, 1.5], [1.0, 0.5]])
    monkeypatch.setattr(precision_choice, "in_turns", lambda calls, **_: [[t] for t in next(times)])
    with caplog.at_level(logging.INFO):
        _, choice = run(model(), inputs(), precision="auto", max_drop=0.5)
    assert precisions(choice) == ["bf16"] * 3
    assert "3 layers in int4" in caplog.text
    assert "3 layers in int8" in caplog.text
    assert choice.seconds < choice.float32_seconds


# Outliers


class Outliers(nn.Module):
    """A norm that makes some channels a thousand times as large as the others, which its linear layer makes up for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 48)
        with torch.no_grad():
            self.norm.weight[[3, 40]] *= 1e3
            self.last.weight[:, [3, 40]] *= 1e-3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.norm(self.first(x)))
        return y


def test_channels_of_outliers_stay_in_int8_with_scales() -> None:
    module, x = Outliers().eval(), inputs(200)
    result, choice = run(module, x, precision="int8", max_drop=0.04)
    assert relative_error(result, module(x)) <= 0.04
    assert precisions(choice) == ["int8", "int8"]
    assert [layer.method for layer in choice.layers] == ["", "smoothed"]


@pytest.mark.parametrize("precision", ["int8", "int4", "auto"])
def test_a_model_that_int8_would_ruin_keeps_its_accuracy_and_says_which_layers_stayed(precision: str) -> None:
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 48)).eval(), inputs(200)
    x[torch.arange(200), torch.arange(200) % 64] = 1e3  # each row has its own, so that no scales of channels help
    with torch.no_grad():
        module[0].weight.copy_(torch.nn.functional.normalize(module[0].weight) * 1e-2)
    result, choice = run(module, x, precision=precision, max_drop=0.01)
    assert relative_error(result, module(x)) <= 0.01
    assert choice.drop <= 0.01
    assert "bf16" in precisions(choice)


def test_weights_that_are_not_finite_stay_in_floating_point() -> None:
    module, x = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 48), nn.GELU()).eval(), inputs()
    with torch.no_grad():
        module[2].weight[0, 0] = torch.nan
    for precision in ("int8", "int4"):
        _, choice = run(module, x, precision=precision, max_drop=0.5)
        assert precisions(choice) == [precision, "bf16"]


def test_the_report_names_what_was_done_to_weights() -> None:
    module, x = Outliers().eval(), inputs(200)
    _, choice = run(module, x, precision="int8", max_drop=0.04)
    assert "last: int8 (smoothed), error" in str(choice)


def test_calibration_inputs_with_nan_in_some_rows_still_decide() -> None:
    module, x = model(), correlated(200)
    x[7, 3] = torch.nan
    for precision, method in (("int8", ""), ("int4", "GPTQ")):
        _, choice = run(module, x, precision=precision, max_drop=0.5)
        assert precisions(choice) == [precision] * 3
        assert choice.layers[0].method == method
