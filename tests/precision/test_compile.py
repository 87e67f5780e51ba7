"""The option `precision` in torch.compile and sardonyx.compile."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sardonyx
from sardonyx import OptionError
from sardonyx.native.linear import PRECISIONS
from sardonyx.precision import packing
from sardonyx.precision.metric import relative_error
from sardonyx.run import layer_trials, precision_choice, region
from sardonyx.telemetry.report import PrecisionChoice, Report, collecting

pytestmark = [
    pytest.mark.usefixtures("ranked"),
    pytest.mark.skipif(
        any(PRECISIONS[name].missing() for name in ("bf16", "int8")), reason="no AVX512 for bfloat16 and int8"
    ),
]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64), nn.LayerNorm(64), nn.Linear(64, 48)).eval()


def inputs(rows: int = 20) -> torch.Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(1))


def compiled(module: nn.Module, **options: Any) -> Callable[..., torch.Tensor]:
    torch._dynamo.reset()
    run: Callable[..., torch.Tensor] = torch.compile(module, backend="sardonyx", options={"cache_dir": "", **options})
    return run


def choice_of(report: Report) -> PrecisionChoice:
    (choice,) = (region.precision for graph in report.graphs for region in graph.regions if region.precision)
    return choice


def run(module: nn.Module, x: torch.Tensor, **options: Any) -> tuple[torch.Tensor, PrecisionChoice]:
    with collecting() as report:
        result = compiled(module, **options)(x)
    return result, choice_of(report)


def precisions(choice: PrecisionChoice) -> Sequence[str]:
    return [layer.precision for layer in choice.layers]


# Within the bound


@pytest.mark.parametrize(("precision", "bound"), [("bf16", 0.02), ("int8", 0.1), ("auto", 0.03)])
def test_layers_run_in_lower_precision_within_the_bound(precision: str, bound: float) -> None:
    module, x = model(), inputs()
    result, choice = run(module, x, precision=precision, max_drop=bound)
    expected = module(x)
    assert 0 < relative_error(result, expected) <= bound
    assert choice.drop == pytest.approx(relative_error(result, expected), rel=1e-3)
    assert precisions(choice) == ["bf16" if precision == "bf16" else "int8"] * 3
    assert [layer.layer for layer in choice.layers] == ["0", "2", "4"]


def test_a_layer_with_outliers_stays_in_a_higher_precision() -> None:
    module, x = model(), inputs()
    with torch.no_grad():
        module[0].weight[:, 3] *= 1e-3  # what it multiplies is as large as before
    x[:, 3] *= 1e3  # and leaves the other channels two codes of 255; too few rows to move its scale into the weight
    result, choice = run(module, x, precision="int8", max_drop=0.05)
    assert relative_error(result, module(x)) <= 0.05
    assert precisions(choice) == ["bf16", "int8", "int8"]
    assert choice.layers[0].layer == "0"


def test_a_bound_of_zero_is_float32_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    module, x = model(), inputs()
    with caplog.at_level(logging.WARNING):
        result, choice = run(module, x, precision="int8", max_drop=0.0)
    torch.testing.assert_close(result, module(x))
    assert "no layer in lower precision keeps the drop within max_drop=0.0" in choice.remark
    assert choice.remark in caplog.text


def test_the_drop_may_be_the_users_own(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[int] = []

    def metric(results: Sequence[Any], references: Sequence[Any]) -> float:
        seen.append(len(results))
        return 0.0 if torch.equal(results[0], references[0]) else 7.0

    _, strict = run(model(), inputs(), precision="bf16", max_drop=1.0, metric=metric)
    _, loose = run(model(), inputs(), precision="bf16", max_drop=8.0, metric=metric)
    assert set(precisions(strict)) == {"float32"}
    assert set(precisions(loose)) == {"bf16"}
    assert seen


def test_the_default_is_float32() -> None:
    with collecting() as report:
        compiled(model())(inputs())
    assert not any(region.precision for graph in report.graphs for region in graph.regions)


def test_gradients_are_computed_in_float32() -> None:
    module, x = model(), inputs()
    with torch.enable_grad():
        result = compiled(module, precision="bf16")(x)
        torch.testing.assert_close(result, module(x))


# Weights and sizes that change


def test_edited_weights_are_used() -> None:
    module, x = model(), inputs()
    call = compiled(module, precision="bf16", max_drop=0.05)
    call(x)
    module[0].weight.mul_(2.0)
    assert relative_error(call(x), module(x)) < 0.05
    module[4].weight.data.mul_(-3.0)  # the version counter does not show it
    assert relative_error(call(x), module(x)) < 0.05


def test_sessions_of_other_shapes_share_packed_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    module, packed = model(), []
    pack = PRECISIONS["bf16"].pack
    call = compiled(module, precision="bf16", max_drop=0.05)
    call(inputs(20))
    monkeypatch.setitem(PRECISIONS, "bf16", _noting(PRECISIONS["bf16"], packed, pack))
    for rows in (5, 7):
        assert relative_error(call(inputs(rows)), module(inputs(rows))) < 0.05
    assert not [weight for weight in packed if not weight.is_meta]


def _noting(precision: Any, packed: list[torch.Tensor], pack: Callable[[torch.Tensor], Any]) -> Any:
    changed = copy.copy(precision)

    def noting(weight: torch.Tensor) -> Any:
        packed.append(weight)
        return pack(weight)

    object.__setattr__(changed, "pack", noting)
    return changed


def test_packed_weights_are_freed_with_their_session() -> None:
    before = len(packing._packed)
    module = model()
    call = compiled(module, precision="int8", max_drop=0.5)
    call(inputs())
    assert len(packing._packed) > before
    del call, module
    torch._dynamo.reset()
    assert len(packing._packed) == before


def test_the_wrapper_takes_the_option() -> None:
    module, x = model(), inputs()
    wrapped = sardonyx.compile(module, precision="int8", max_drop=0.1, cache_dir="")
    assert 0 < relative_error(wrapped(x), module(x)) <= 0.1
    assert set(precisions(choice_of(wrapped.report))) == {"int8"}


# The cache


def test_a_choice_is_cached_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = model(), inputs()
    result, first = run(module, x, precision="int8", max_drop=0.1, cache_dir=str(tmp_path))
    monkeypatch.setattr(layer_trials, "in_turns", lambda *_, **__: pytest.fail("layers are measured again"))
    again, second = run(module, x, precision="int8", max_drop=0.1, cache_dir=str(tmp_path))
    assert torch.equal(again, result)
    assert (first.remembered, second.remembered) == (False, True)
    assert precisions(second) == precisions(first)


def test_other_weights_are_another_choice(tmp_path: Path) -> None:
    module, x = model(), inputs()
    run(module, x, precision="bf16", max_drop=0.1, cache_dir=str(tmp_path))
    module[2].weight.mul_(1.5)
    _, second = run(module, x, precision="bf16", max_drop=0.1, cache_dir=str(tmp_path))
    assert not second.remembered


def test_a_cached_choice_that_exceeds_the_bound_for_these_inputs_is_made_again(tmp_path: Path) -> None:
    module, x = model(), inputs()
    outliers = x.clone()
    outliers[:, 3] *= 1e3
    module[0].weight[:, 3] *= 1e-3
    _, first = run(module, x, precision="int8", max_drop=0.05, cache_dir=str(tmp_path))
    result, again = run(module, outliers, precision="int8", max_drop=0.05, cache_dir=str(tmp_path))
    assert precisions(first) == ["int8"] * 3
    assert precisions(again) != precisions(first)
    assert relative_error(result, module(outliers)) <= 0.05


def test_a_damaged_choice_is_measured_again(tmp_path: Path) -> None:
    module, x = model(), inputs()
    run(module, x, precision="bf16", max_drop=0.1, cache_dir=str(tmp_path))
    (file,) = tmp_path.rglob("precision.json")
    file.write_text("{}")
    _, second = run(module, x, precision="bf16", max_drop=0.1, cache_dir=str(tmp_path))
    assert not second.remembered
    assert set(precisions(second)) == {"bf16"}


@pytest.mark.parametrize("where", ["search", "cache_choice"])
def test_after_a_first_call_that_was_interrupted_the_next_one_chooses(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    module, x = model(), inputs()
    call = sardonyx.compile(module, precision="bf16", max_drop=0.1, cache_dir=str(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr(precision_choice, where, interrupt)
        with pytest.raises(KeyboardInterrupt):
            call(x)
    assert not list(tmp_path.rglob("precision.json"))
    assert 1e-4 < relative_error(call(x), module(x)) <= 0.1
    assert len(list(tmp_path.rglob("precision.json"))) == 1


# What is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "int16"}, "precision is 'int16'"),
        ({"precision": "bf16", "max_drop": -1.0}, "max_drop is -1.0"),
        ({"precision": "bf16", "max_drop": math.nan}, "max_drop is nan"),
        ({"precision": "float32", "max_drop": 0.1}, "max_drop= without a precision"),
        ({"int4_block": 128}, "int4_block= without a precision"),
        ({"precision": "bf16", "freeze": False}, "freeze=False"),
        ({"precision": "bf16", "metric": "accuracy"}, "metric is 'accuracy'"),
        ({"precision": "bf16", "engine": "reference"}, "the engine 'reference'"),
    ],
)
def test_what_cannot_be_is_an_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message) as raised:
        compiled(model(), **options)(inputs())
    error: BaseException | None = raised.value
    while error is not None and not isinstance(error, OptionError):
        error = getattr(error, "inner_exception", None) or error.__cause__
    assert isinstance(error, OptionError)


def test_results_that_cannot_be_compared_are_an_error() -> None:
    with pytest.raises(OptionError, match=r"integers or empty\n  next: .* or give a metric of your own"):
        compiled(nn.Sequential(nn.Linear(64, 8), nn.Flatten(), Argmax()).eval(), precision="bf16")(inputs())
    with pytest.raises(OptionError, match="NaN or infinite throughout"):
        compiled(model(), precision="bf16")(torch.full((3, 64), math.nan))


def test_a_call_without_elements_runs_in_float32_and_the_next_one_chooses() -> None:
    module = model()
    run = torch.compile(module, backend="sardonyx", dynamic=True, options={"precision": "bf16", "max_drop": 0.02})
    assert run(inputs(0)).shape == (0, 48)
    with collecting() as report:
        assert relative_error(run(inputs()), module(inputs())) > 1e-4
    assert precisions(choice_of(report)) == ["bf16"] * 3
    assert run(inputs(0)).shape == (0, 48)


class Argmax(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.argmax(-1)


def test_an_argument_that_is_always_empty_does_not_put_off_the_choice() -> None:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = model()
            self.register_buffer("cache", torch.empty(0, 64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(torch.cat([self.cache, x]))

    _, choice = run(Cached(), inputs(), precision="int8", max_drop=0.05)
    assert precisions(choice) == ["int8"] * 3


def test_a_piece_without_layers_may_return_integers() -> None:
    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = model()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x)
            torch._dynamo.graph_break()
            return y.argmax(-1)

    module = Chosen()
    assert torch.equal(compiled(module, precision="bf16", max_drop=0.05)(inputs()), module(inputs()))


def test_a_metric_may_compare_integers() -> None:
    class Chosen(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return layers(x).argmax(-1)

    layers = model()
    _, choice = run(
        Chosen(),
        inputs(),
        precision="bf16",
        metric=lambda got, expected: 1 - got[0].eq(expected[0]).mean(dtype=torch.float32),
    )
    assert precisions(choice) == ["bf16"] * 3


def test_weights_that_are_edited_often_keep_their_precision() -> None:
    module, x = model(), inputs()
    call = compiled(module, precision="int8", max_drop=0.05)
    for _ in range(5):
        assert 1e-3 < relative_error(call(x), module(x)) < 0.05
        module[0].weight.mul_(-1.1)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_become_nan_are_used_in_float32(value: float) -> None:
    module, x = model(), inputs()
    call = compiled(module, precision="int8", max_drop=0.05)
    call(x)
    before = module[4].weight[2].clone()
    module[4].weight[2] = value
    torch.testing.assert_close(call(x), module(x), equal_nan=True)
    module[4].weight[2] = before
    assert 1e-3 < relative_error(call(x), module(x)) < 0.05


def test_choosing_leaves_random_numbers_as_they_are() -> None:
    module = nn.Sequential(nn.Linear(64, 96), nn.Dropout(0.5), nn.Linear(96, 64)).train()
    call, drawn = compiled(module, precision="int8", max_drop=1.0), []
    for _ in range(2):
        torch.manual_seed(5)
        drawn.append((call(inputs()), torch.rand(1)))
    torch.testing.assert_close(*drawn)


def test_a_training_step_says_that_it_is_float32(caplog: pytest.LogCaptureFixture) -> None:
    region._warn_of_training.cache_clear()
    with torch.enable_grad():
        compiled(model(), precision="int8")(inputs())
    assert "training steps run in float32: precision='int8'" in caplog.text


def test_a_model_without_layers_is_float32() -> None:
    _, choice = run(nn.Sequential(nn.LayerNorm(64), nn.GELU()).eval(), inputs(), precision="int8")
    assert "no linear layers" in choice.remark


def test_without_instructions_it_is_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(PRECISIONS["bf16"]), "missing", lambda self: ["avx512_bf16"])
    module, x = model(), inputs()
    result, choice = run(module, x, precision="bf16")
    torch.testing.assert_close(result, module(x))
    assert "no instructions" in choice.remark


def test_a_slower_model_is_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision_choice, "in_turns", lambda calls, **_: [[1.0], [2.0]][: len(calls)])
    _, choice = run(model(), inputs(), precision="bf16", max_drop=0.1)
    assert "in float32" in choice.remark
    assert set(precisions(choice)) == {"float32"}


def test_the_report_shows_each_layer() -> None:
    with collecting() as report:
        compiled(model(), precision="bf16", max_drop=0.1)(inputs())
    text = str(report)
    assert "precision bf16: bf16 ×3; drop" in text
    assert "    4: bf16, error" in text
