"""int8 with an engine that takes layers between QuantizeLinear and DequantizeLinear."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from torch import nn

from sardonyx import OptionError
from sardonyx.engines import Job, Runner, openvino, registry
from sardonyx.engines.reference import Reference
from sardonyx.options import Options
from sardonyx.precision.metric import relative_error
from sardonyx.run import layer_trials
from sardonyx.run.region_precision import QuantizedSubject
from sardonyx.telemetry.report import PrecisionChoice, RegionReport, collecting
from tests.precision.compiling import compiled
from tests.precision.residual_block import Block

pytestmark = pytest.mark.usefixtures("ranked")


class Quantized(Reference):
    """Computes what quantized layers stand for, and the rest in float32 with any precision."""

    name = "quantized"
    takes_quantized_layers = True

    def in_precision(self, precision: str, options: Options) -> Options | None:
        return replace(options) if precision in ("int8", "bf16") else None


def _openvino() -> Any:
    installed = registry.find("openvino").probe().installed
    return pytest.param("openvino", marks=pytest.mark.skipif(not installed, reason="needs the package openvino"))


@pytest.fixture(params=["quantized", _openvino()])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(registry._registered, "quantized", Quantized())
    return str(request.param)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def network() -> nn.Module:
    torch.manual_seed(0)
    stem = [nn.Conv2d(3, 16, 3, stride=2), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*stem, Block(16), Block(16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)).eval()


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), Residual(64), nn.LayerNorm(64), nn.Linear(64, 8)).eval()


def images(count: int = 2) -> torch.Tensor:
    return torch.randn(count, 3, 24, 24, generator=torch.Generator().manual_seed(1))


def rows(count: int = 40) -> torch.Tensor:
    return torch.randn(count, 32, generator=torch.Generator().manual_seed(1))


CASES = pytest.mark.parametrize(("build", "inputs"), [(network, images), (perceptron, rows)])


def run(module: nn.Module, x: torch.Tensor, **options: Any) -> tuple[torch.Tensor, RegionReport, PrecisionChoice]:
    """The result, the report, and the choice."""
    with collecting() as report:
        result = compiled(module, **{"precision": "int8", "max_drop": 0.1, **options})(x)
    (region,) = (region for graph in report.graphs for region in graph.regions)
    assert region.precision is not None
    return result, region, region.precision


def precisions(choice: PrecisionChoice) -> Sequence[str]:
    return [layer.precision for layer in choice.layers]


@CASES
@pytest.mark.parametrize("precision", ["int8", "auto"])
def test_layers_are_quantized_within_the_bound(
    engine: str, build: Callable[[], nn.Module], inputs: Callable[[], torch.Tensor], precision: str
) -> None:
    module, x = build(), inputs()
    result, _, choice = run(module, x, engine=engine, precision=precision)
    error = relative_error(result, module(x))
    assert 1e-3 < error <= 0.1
    assert choice.drop == pytest.approx(error, rel=0.05)
    assert set(precisions(choice)) == {"int8"}


def test_layers_of_one_shape_are_compiled_together(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[int] = []
    load = layer_trials.load_alone

    def counted(engine: Any, model: ir.Model, *args: Any) -> Runner:
        loaded.append(len(model.graph.outputs))
        return load(engine, model, *args)

    monkeypatch.setattr(layer_trials, "load_alone", counted)
    torch.manual_seed(0)
    module, x = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(5))).eval(), rows()
    result, _, choice = run(module, x, engine=engine)
    assert precisions(choice) == ["int8"] * 5
    assert loaded == [9, 5, 5, 1, 1, 1]  # their values; in int8, in bf16; one of them, in float32, int8 and bf16
    errors = [layer.error for layer in choice.layers]
    assert len(set(errors)) == 5
    assert all(1e-3 < error < 0.05 for error in errors)
    assert relative_error(result, module(x)) <= 0.1


def test_values_are_rounded_once_for_convolutions_and_sums(engine: str) -> None:
    _, region, _ = run(network(), images(), engine=engine)
    # the image, before the pooling, between and after two convolutions, the sum, between the last two, the mean
    assert region.operators["QuantizeLinear"] == 7
    assert region.operators["DequantizeLinear"] == 7 + 6


def test_openvino_computes_layers_in_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openvino", reason="needs the package openvino")
    models: list[Any] = []

    class Seen(openvino.OpenVinoRunner):
        def __init__(self, model: Any, memory: Any, job: Job) -> None:
            super().__init__(model, memory, job)
            models.append(model)

    monkeypatch.setattr(openvino, "OpenVinoRunner", Seen)
    monkeypatch.setattr(QuantizedSubject, "alternatives", lambda *_: [])
    run(network(), images(), engine="openvino")
    found = [node.get_rt_info() for node in models[-1].get_runtime_model().get_ordered_ops()]
    layers = [info["runtimePrecision"] for info in found if info["layerType"] in ("Convolution", "FullyConnected")]
    assert layers == ["u8"] * 6
    assert not any(info["layerType"] == "Eltwise" for info in found)  # convolutions compute the sums


def test_a_residual_of_linear_layers_is_not_rounded(engine: str) -> None:
    module, x = Residual(64).eval(), torch.randn(40, 64)
    module.down.weight.data.zero_()
    result, _, _ = run(module, x, engine=engine)
    torch.testing.assert_close(result, module(x), atol=1e-2, rtol=1e-2)


def test_a_layer_with_outliers_goes_back_to_what_the_rest_runs_in(engine: str) -> None:
    module, x = perceptron(), rows()
    with torch.no_grad():
        module[0].weight[:, 3] *= 1e-3
    x[:, 3] *= 1e3
    result, _, choice = run(module, x, engine=engine, max_drop=0.05)
    assert precisions(choice)[0] == "bf16"
    assert "int8" in precisions(choice)
    assert relative_error(result, module(x)) <= 0.05


def test_past_the_bound_the_model_is_in_float32_and_says_so(engine: str, caplog: pytest.LogCaptureFixture) -> None:
    def never(results: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
        return 1.0

    module, x = perceptron(), rows()
    result, region, choice = run(module, x, engine=engine, metric=never)
    assert set(precisions(choice)) == {"float32"}
    assert not region.operators["QuantizeLinear"]
    assert choice.remark in caplog.text
    torch.testing.assert_close(result, module(x))


@CASES
@pytest.mark.parametrize("dynamic", [None, True])
def test_other_batch_sizes_are_right(
    engine: str, build: Callable[[], nn.Module], inputs: Callable[..., torch.Tensor], dynamic: bool | None
) -> None:
    module = build()
    run = compiled(module, dynamic=dynamic, engine=engine, precision="int8", max_drop=0.1)
    for count in (4, 3, 7):
        x = inputs(count)
        assert 1e-4 < relative_error(run(x), module(x)) <= 0.1


@CASES
def test_edited_weights_are_quantized_again(
    engine: str, build: Callable[[], nn.Module], inputs: Callable[[], torch.Tensor]
) -> None:
    module, x = build(), inputs()
    run = compiled(module, engine=engine, precision="int8", max_drop=0.1)
    before = run(x)
    with torch.no_grad():
        module[-1].weight.mul_(-2)
    after = run(x)
    assert relative_error(after, module(x)) <= 0.1
    assert relative_error(before, module(x)) > 0.5


@CASES
def test_a_choice_is_cached_with_its_scales(
    engine: str, build: Callable[[], nn.Module], inputs: Callable[[], torch.Tensor], tmp_path: Path
) -> None:
    found = [run(build(), inputs(), engine=engine, cache_dir=str(tmp_path)) for _ in range(2)]
    (first, _, measured), (second, _, remembered) = found
    assert (measured.remembered, remembered.remembered) == (False, True)
    assert measured.layers == remembered.layers
    torch.testing.assert_close(first, second)


def test_a_weight_that_is_not_finite_is_not_quantized(engine: str) -> None:
    module = perceptron()
    with torch.no_grad():
        module[3].weight[0, 0] = float("nan")
    _, _, choice = run(module, rows(), engine=engine)
    assert precisions(choice) == ["int8", "int8", "int8", "bf16"]


def test_a_model_without_layers_is_computed_as_a_whole(engine: str) -> None:
    _, _, choice = run(nn.Softmax(-1).eval(), rows(), engine=engine)
    assert [(layer.layer, layer.precision) for layer in choice.layers] == [("the whole model", "bf16")]


def test_int4_is_an_error(engine: str) -> None:
    with pytest.raises(OptionError, match="precision='int4' with the engine"):
        run(perceptron(), rows(), engine=engine, precision="int4")
