"""Convolutions in the option `precision`: folded batch norms, channels last, and what stays in float32."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sardonyx.native.linear import PRECISIONS
from sardonyx.precision.metric import relative_error
from sardonyx.telemetry.report import RegionReport, collecting

pytestmark = [
    pytest.mark.usefixtures("ranked"),
    pytest.mark.skipif(
        any(PRECISIONS[name].missing() for name in ("bf16", "int8")), reason="no AVX512 for bfloat16 and int8"
    ),
]
BOUNDS = {"bf16": 0.02, "int8": 0.1}


class Block(nn.Module):
    """Two convolutions with batch norms, and a shortcut."""

    def __init__(self, channels: int, stride: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, 2 * channels, 3, stride, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(2 * channels)
        self.second = nn.Conv2d(2 * channels, 2 * channels, 3, padding=1)
        self.shortcut = nn.Conv2d(channels, 2 * channels, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.second(F.relu(self.norm(self.first(x)))) + self.shortcut(x))


def seeded(module: nn.Module) -> nn.Module:
    """Give batch norms statistics that matter."""
    for norm in module.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.uniform_(norm.weight, 0.5, 2.0)
            nn.init.normal_(norm.bias)
            nn.init.normal_(norm.running_mean)
            nn.init.uniform_(norm.running_var, 0.5, 2.0)
    return module.eval()


def network() -> nn.Module:
    torch.manual_seed(0)
    stem = nn.Sequential(nn.Conv2d(3, 16, 7, 2, padding=3, bias=False), nn.BatchNorm2d(16), nn.ReLU())
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    return seeded(nn.Sequential(stem, nn.MaxPool2d(3, 2, padding=1), Block(16), Block(32, stride=2), head))


def images(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def compiled(module: nn.Module, **options: Any) -> Callable[..., torch.Tensor]:
    torch._dynamo.reset()
    call: Callable[..., torch.Tensor] = torch.compile(
        module, backend="sardonyx", options={"cache_dir": "", "precision": "bf16", "max_drop": 0.05, **options}
    )
    return call


def run(module: nn.Module, *args: torch.Tensor, **options: Any) -> tuple[torch.Tensor, RegionReport]:
    with collecting() as report:
        result = compiled(module, **options)(*args)
    (region,) = (region for graph in report.graphs for region in graph.regions)
    return result, region


def layers(region: RegionReport) -> dict[str, str]:
    assert region.precision is not None
    return {layer.layer: layer.precision for layer in region.precision.layers}


def operators(region: RegionReport) -> Counter[str]:
    return Counter(region.operators)


@pytest.mark.parametrize("precision", BOUNDS)
def test_a_network_runs_in_lower_precision_within_the_bound(precision: str) -> None:
    module, x = network(), images(2, 3, 33, 29)
    result, region = run(module, x, precision=precision, max_drop=BOUNDS[precision])
    assert 0 < relative_error(result, module(x)) <= BOUNDS[precision]
    assert set(layers(region).values()) == {precision}
    assert len(layers(region)) == 8


def test_batch_norms_activations_and_sums_are_computed_by_their_convolutions() -> None:
    _, region = run(network(), images(2, 3, 33, 29))
    found = operators(region)
    assert not {"BatchNormalization", "Relu", "Add"} & set(found)
    assert len([name for name in found if name.startswith("MaxPool")]) == 1


def test_values_between_convolutions_are_in_bfloat16() -> None:
    _, region = run(network(), images(2, 3, 33, 29))
    found = operators(region)
    assert found["MaxPoolBfloat16"] == 1
    assert found["ConvBfloat16"] == 4
    assert (found["ConvToBfloat16"], found["ConvToFloat32"]) == (1, 2)  # of the image, and of a sum before a mean


def test_only_the_image_is_transposed() -> None:
    _, region = run(network(), images(2, 3, 33, 29))
    assert operators(region)["Transpose"] == 1


def test_edited_weights_and_statistics_are_used() -> None:
    module, x = network(), images(1, 3, 32, 32)
    call = compiled(module)
    call(x)
    norm = module[2].norm
    norm.running_mean.add_(1.0)
    assert relative_error(call(x), module(x)) < 0.02
    norm.weight.data.mul_(-2.0)  # the version counter does not show it
    module[2].first.weight.data[0] *= 3
    assert relative_error(call(x), module(x)) < 0.02


def test_batches_and_images_of_other_sizes() -> None:
    module = network()
    call = torch.compile(
        module, backend="sardonyx", dynamic=True, options={"cache_dir": "", "precision": "bf16", "max_drop": 0.05}
    )
    for shape in ((2, 3, 32, 32), (1, 3, 40, 24), (5, 3, 17, 19)):
        assert relative_error(call(images(*shape)), module(images(*shape))) < 0.02


WINDOWS: dict[str, tuple[Callable[[], nn.Module], Sequence[int]]] = {
    "of a pixel": (lambda: nn.Conv2d(5, 7, 1), (2, 5, 6, 5)),
    "of a pixel with strides": (lambda: nn.Conv2d(5, 7, 1, 2), (2, 5, 7, 6)),
    "with dilation": (lambda: nn.Conv2d(4, 6, 3, padding=2, dilation=2), (1, 4, 9, 8)),
    "with other strides along each axis": (lambda: nn.Conv2d(4, 6, (3, 2), (2, 3), (1, 0)), (1, 4, 9, 8)),
    "larger than the image": (lambda: nn.Conv2d(4, 6, 7, padding=3), (1, 4, 2, 3)),
    "beside the image": (lambda: nn.Conv2d(2, 3, 1, padding=2), (1, 2, 3, 3)),
    "of one channel": (lambda: nn.Conv2d(1, 8, 5, padding="same"), (3, 1, 8, 8)),
    "padded on one side": (lambda: nn.Sequential(nn.ZeroPad2d((1, 0, 2, 0)), nn.Conv2d(3, 8, 3)), (1, 3, 8, 8)),
    "before a norm without weights": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, affine=False)),
        (1, 3, 8, 8),
    ),
}


@pytest.mark.parametrize("precision", BOUNDS)
@pytest.mark.parametrize("name", WINDOWS)
def test_windows(name: str, precision: str) -> None:
    torch.manual_seed(0)
    make, shape = WINDOWS[name]
    module, x = make().eval(), images(*shape)
    result, region = run(module, x, precision=precision, max_drop=0.1)
    assert 0 < relative_error(result, module(x)) <= BOUNDS[precision]
    assert set(layers(region).values()) == {precision}


def test_depthwise_convolutions_have_channels_last_between_layers() -> None:
    torch.manual_seed(0)
    depthwise = nn.Conv2d(24, 24, 7, padding=3, groups=24)
    module = nn.Sequential(nn.Conv2d(3, 24, 1), depthwise, nn.SiLU(), nn.Conv2d(24, 8, 1)).eval()
    x = images(2, 3, 9, 10)
    result, region = run(module, x)
    assert relative_error(result, module(x)) < 0.02
    assert len(layers(region)) == 2
    assert {"DepthwiseConv", "DepthwiseConvBfloat16"} & set(operators(region))


@pytest.mark.parametrize("bias", [False, True])
def test_a_depthwise_convolution_takes_its_norm(bias: bool) -> None:
    torch.manual_seed(0)
    depthwise = nn.Conv2d(24, 24, 3, 2, padding=1, groups=24, bias=bias)
    module = seeded(nn.Sequential(nn.Conv2d(3, 24, 1), depthwise, nn.BatchNorm2d(24), nn.ReLU6(), nn.Conv2d(24, 8, 1)))
    x = images(2, 3, 9, 10)
    call = compiled(module)
    with collecting() as report:
        assert relative_error(call(x), module(x)) < 0.02
    (region,) = (region for graph in report.graphs for region in graph.regions)
    assert operators(region)["Transpose"] <= 3  # one of them of the weight
    module[2].running_mean.add_(1.0)
    assert relative_error(call(x), module(x)) < 0.02


@pytest.mark.parametrize(
    "other",
    [
        lambda: nn.Conv2d(8, 8, 3, groups=2),
        lambda: nn.ConvTranspose2d(8, 8, 3),
        lambda: nn.Conv2d(8, 8, 3, groups=8),
        lambda: nn.Conv2d(8, 16, 3, groups=8),
        lambda: nn.AvgPool2d(3, padding=1),
        lambda: nn.AvgPool2d(3, 2, padding=1, count_include_pad=False, ceil_mode=True),
        lambda: nn.MaxPool2d(3, 2, ceil_mode=True),
        lambda: nn.MaxPool2d(2, dilation=2),
        lambda: nn.Upsample(scale_factor=2),
        lambda: nn.GroupNorm(2, 8),
        lambda: nn.BatchNorm2d(8),
        lambda: nn.PixelShuffle(2),
        lambda: nn.Softmax(1),
        lambda: nn.Flatten(2),
    ],
)
def test_what_stands_between_convolutions(other: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    between = other()
    x = images(2, 3, 10, 12)
    first = nn.Sequential(nn.Conv2d(3, 8, 3), between)
    after = first(x)
    module = seeded(nn.Sequential(first, nn.Conv2d(after.shape[1], 5, 1))) if after.dim() == 4 else seeded(first)
    result, _ = run(module, x, max_drop=1.0)
    assert relative_error(result, module(x)) < 0.02


def test_a_norm_before_a_convolution_has_channels_last() -> None:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    module = seeded(nn.Sequential(first, nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 5, 3)))
    x = images(2, 3, 10, 12)
    result, region = run(module, x)
    assert relative_error(result, module(x)) < 0.02
    assert "BatchNormalization" not in operators(region)
    assert operators(region)["Transpose"] <= 2


def test_squeezes_and_excitations() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.leave = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 4, 1)
            self.squeeze, self.excite = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = F.silu(self.enter(x))
            gate = self.excite(F.relu(self.squeeze(y.mean((2, 3), keepdim=True))))
            return self.leave(y * gate.sigmoid())

    torch.manual_seed(0)
    module, x = Gated().eval(), images(2, 3, 8, 9)
    result, region = run(module, x)
    assert relative_error(result, module(x)) < 0.02
    assert operators(region)["Transpose"] <= 2


@pytest.mark.parametrize("relu", [False, True])
def test_pooling_keeps_nan_and_infinity(relu: bool) -> None:
    torch.manual_seed(0)
    between = [nn.ReLU()] if relu else []
    module = nn.Sequential(nn.Conv2d(1, 4, 1), *between, nn.MaxPool2d(3, 2, padding=1), nn.Conv2d(4, 2, 1)).eval()
    x = images(1, 1, 9, 9)
    call = compiled(module)
    call(x)
    x[0, 0, 2, 3] = torch.nan
    assert torch.equal(call(x).isnan(), module(x).isnan())


def test_a_chain_that_does_not_pay_stays_in_float32_and_linear_layers_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from sardonyx.run import precision_choice

    def in_turns(calls: Sequence[Callable[[], Any]], **_: Any) -> list[list[float]]:
        return [[2.0], [3.0], [1.0]][: len(calls)]

    monkeypatch.setattr(precision_choice, "in_turns", in_turns)
    module, x = network(), images(2, 3, 33, 29)
    result, region = run(module, x)
    assert Counter(layers(region).values()) == {"float32": 7, "bf16": 1}
    assert relative_error(result, module(x)) < 0.02
