"""The option `precision` with an engine that computes whole models in another precision by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sardonyx
from sardonyx import OptionError
from sardonyx.engines import Job, Runner, registry
from sardonyx.engines.reference import Reference
from sardonyx.options import Options
from sardonyx.precision.metric import relative_error
from sardonyx.run import region_precision
from sardonyx.telemetry.report import PrecisionChoice, collecting

pytestmark = pytest.mark.usefixtures("ranked")


class Rounding(Reference):
    """Rounds the results of a model to bfloat16 if its option says so."""

    name = "rounding"

    def in_precision(self, precision: str, options: Options) -> Options | None:
        return replace(options, engine_options={"rounds": True}) if precision == "bf16" else None

    def load(self, job: Job, artifact: Path | None) -> Runner:
        runner = super().load(job, artifact)
        return Rounded(runner) if job.options.engine_options else runner


class Rounded(Runner):
    def __init__(self, exact: Runner) -> None:
        self._exact = exact

    def __call__(self, inputs: Sequence[torch.Tensor | int]) -> list[torch.Tensor]:
        return [result.bfloat16().float() for result in self._exact(inputs)]


@pytest.fixture(autouse=True)
def rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._registered, "rounding", Rounding())
    monkeypatch.setitem(registry._registered, "coarse", Coarse())


class Coarse(Rounding):
    """Computes in int8 by itself, with an error of a tenth."""

    name = "coarse"

    def in_precision(self, precision: str, options: Options) -> Options | None:
        if precision == "int8":
            return replace(options, engine_options={"scales": 1.1})
        return super().in_precision(precision, options)

    def load(self, job: Job, artifact: Path | None) -> Runner:
        runner = super().load(job, artifact)
        return Scaled(runner) if "scales" in (job.options.engine_options or {}) else runner


class Scaled(Rounded):
    def __call__(self, inputs: Sequence[torch.Tensor | int]) -> list[torch.Tensor]:
        return [1.1 * result for result in super().__call__(inputs)]


X = torch.linspace(-2, 2, 60).reshape(5, 12)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 8)).eval()


def compiled(**options: Any) -> Any:
    return sardonyx.compile(model(), **{"engine": "rounding", "cache_dir": "", **options})


def run(**options: Any) -> tuple[float, PrecisionChoice]:
    """The error of the results, and the choice."""
    wrapped = compiled(**options)
    error = relative_error(wrapped(X), model()(X))
    (choice,) = (region.precision for graph in wrapped.report.graphs for region in graph.regions)
    return error, choice


@pytest.mark.parametrize("precision", ["bf16", "auto"])
def test_the_model_is_one_layer_within_the_bound(precision: str) -> None:
    error, choice = run(precision=precision, max_drop=0.01)
    assert 1e-4 < error <= 0.01
    assert choice.drop == pytest.approx(error, rel=1e-2)
    (layer,) = choice.layers
    assert (layer.layer, layer.precision) == ("the whole model", "bf16")
    assert "the whole model: bf16, error" in str(choice)


@pytest.mark.parametrize("metric", [None, lambda results, expected: 0.0])
def test_auto_compares_engines_within_the_bound(metric: Any, caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    options = {"engine": "auto", "engine_options": {"engines": ["rounding", "reference"]}, "cache_dir": ""}
    lowered = {"precision": "bf16", "max_drop": 0.01, "metric": metric}
    with collecting() as report, torch.no_grad():
        result = torch.compile(model(), backend="sardonyx", options={**options, **lowered})(X)
    assert 1e-4 < relative_error(result, model()(X)) <= 0.01
    (region,) = (region for graph in report.graphs for region in graph.regions)
    assert region.choice.engine == "rounding"
    assert list(region.choice.discarded) == ["reference"], "it has no lower precision"
    assert [layer.precision for layer in region.precision.layers] == ["bf16"]
    assert "differ" not in caplog.text


@pytest.mark.parametrize(("bound", "precision"), [(0.2, "int8"), (0.01, "bf16"), (1e-5, "float32")])
def test_int8_goes_back_to_bf16_and_float32(bound: float, precision: str) -> None:
    error, choice = run(engine="coarse", precision="int8", max_drop=bound)
    assert error <= bound
    assert [layer.precision for layer in choice.layers] == [precision]


def test_past_the_bound_it_is_float32_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    error, choice = run(precision="bf16", max_drop=1e-5)
    assert error < 1e-6
    assert "keeps the drop within max_drop=1e-05" in choice.remark
    assert choice.remark in caplog.text


def test_a_slower_model_is_float32_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_precision, "in_turns", lambda calls, **_: [[1.0], [2.0]][: len(calls)])
    error, choice = run(precision="bf16", max_drop=0.01)
    assert error < 1e-6
    assert "no layer is faster in lower precision" in choice.remark


def test_a_precision_that_it_does_not_have_is_an_error() -> None:
    with pytest.raises(OptionError, match="precision='int8' with the engine 'rounding'"):
        run(precision="int8")


def test_a_choice_is_cached(tmp_path: Path) -> None:
    first, second = (run(precision="bf16", max_drop=0.01, cache_dir=str(tmp_path))[1] for _ in range(2))
    assert (first.remembered, second.remembered) == (False, True)
    assert first.layers == second.layers
