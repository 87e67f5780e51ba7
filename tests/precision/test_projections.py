"""Layers of one x are computed by one node: projections side by side, and the two of a gated network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sardonyx.native.linear import PRECISIONS
from sardonyx.precision.metric import relative_error
from sardonyx.telemetry.report import collecting
from tests.precision.compiling import compiled

ERRORS = {"bf16": 0.02, "int8": 0.03, "int4": 0.25}

pytestmark = [
    pytest.mark.usefixtures("ranked"),
    pytest.mark.skipif(any(p.missing() for p in PRECISIONS.values()), reason="no AVX512 for bfloat16 and int8"),
]


def operators(module: nn.Module, *args: torch.Tensor, precision: str = "bf16", **options: str) -> Mapping[str, int]:
    """Check each result, and return the operators that ran but for views."""
    with collecting() as report:
        results = compiled(module, precision=precision, max_drop=1.0, **options)(*args)
    expected = module(*args)
    pairs = zip(results, expected, strict=True) if isinstance(expected, tuple) else [(results, expected)]
    for result, reference in pairs:
        assert 0 < relative_error(result, reference) < ERRORS[precision]
    (region,) = (region for graph in report.graphs for region in graph.regions)
    return {name: count for name, count in region.operators.items() if name != "Reshape"}


class Projections(nn.Module):
    """Layers of the same rows, whose results have these columns."""

    def __init__(self, *columns: int, biases: bool = True, depth: int = 72) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(depth, n, bias=biases and n % 2 == 0) for n in columns)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(layer(x) for layer in self.layers)


@pytest.mark.parametrize("precision", list(ERRORS))
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 13, 60])
def test_projections_of_any_columns_are_one_node(rows: int, precision: str) -> None:
    assert operators(Projections(160, 33, 96), torch.randn(rows, 72), precision=precision) == {"Linear": 1}


def test_more_than_three_are_two_nodes() -> None:
    assert operators(Projections(32, 8, 64, 40, 33), torch.randn(4, 72)) == {"Linear": 2}


def test_projections_are_divided_among_threads() -> None:
    wide = Projections(1024, 96, 1056, depth=256)
    assert operators(wide, torch.randn(1, 256)) == {"Linear": 1}
    assert operators(wide, torch.randn(300, 256)) == {"Linear": 1}


def test_sizes_may_be_symbolic() -> None:
    module = Projections(48, 48, 16)
    call = compiled(module, dynamic=True, precision="bf16", max_drop=0.05)
    for rows in (20, 33, 2):
        x = torch.randn(2, rows, 72)
        for result, expected in zip(call(x), module(x), strict=True):
            assert relative_error(result, expected) < 0.02


def test_edited_weights_are_seen() -> None:
    module, x = Projections(48, 48, 16), torch.randn(4, 72)
    call = compiled(module, precision="int8", max_drop=0.1)
    call(x)
    module.layers[1].weight.mul_(-2)
    for result, expected in zip(call(x), module(x), strict=True):
        assert relative_error(result, expected) < 0.03


class Gated(nn.Module):
    """activation(gate(x)) · up(x), as language models have it."""

    def __init__(self, activation: str = "silu", *, biases: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.activation = activation
        self.gate, self.up = nn.Linear(72, 100, bias=biases), nn.Linear(72, 100, bias=biases)
        self.down = nn.Linear(100, 72)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        gate = getattr(F, self.activation)(self.gate(x)) if self.activation else self.gate(x)
        return gate * self.up(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.gated(x))


@pytest.mark.parametrize("precision", list(ERRORS))
@pytest.mark.parametrize("rows", [1, 2, 4, 13, 60])
def test_a_gated_network_is_two_nodes(rows: int, precision: str) -> None:
    found = operators(Gated(), torch.randn(rows, 72), precision=precision)
    assert found == {"LinearToBfloat16": 1, "LinearToFloat32": 1}


@pytest.mark.parametrize("activation", ["gelu", "relu", ""])
def test_gates_have_other_activations_and_biases(activation: str) -> None:
    found = operators(Gated(activation, biases=True), torch.randn(2, 7, 72))
    assert found == {"LinearToBfloat16": 1, "LinearToFloat32": 1}


class ReadTwice(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = self.up(x)
        return self.down(F.silu(self.gate(x)) * up) + up.sum()


class Squared(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = self.up(x)
        return self.down(up * up)


class OfOthers(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x.flip(0)))


@pytest.mark.parametrize("model", [ReadTwice(), Squared(), OfOthers()], ids=lambda model: type(model).__name__)
def test_other_products_are_not_folded(model: nn.Module) -> None:
    assert operators(model, torch.randn(5, 72))["Mul"] == 1


def outliers() -> torch.Tensor:
    x = torch.randn(64, 72)
    x[:, 3] *= 1e3
    return x


def test_layers_of_one_x_with_outliers_share_what_its_channels_are_multiplied_by(tmp_path: Path) -> None:
    model, x = Projections(48, 33, 96), outliers()
    for _ in range(2):  # chosen, and then as the disk cache has it
        assert operators(model, x, precision="int8", cache_dir=str(tmp_path)) == {"Linear": 1}
    with collecting() as report:
        compiled(model, precision="int8", max_drop=1.0)(x)
    (choice,) = (region.precision for graph in report.graphs for region in graph.regions)
    assert [layer.method for layer in choice.layers] == ["smoothed"] * 3


def test_a_gated_network_of_outliers_is_two_nodes() -> None:
    assert operators(Gated(), outliers(), precision="int8") == {"LinearToBfloat16": 1, "LinearToFloat32": 1}
