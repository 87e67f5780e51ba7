"""What follows a layer in lower precision, computed by its node."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sardonyx.native.linear import PRECISIONS
from sardonyx.precision.metric import relative_error
from sardonyx.telemetry.report import collecting
from tests.precision.compiling import compiled

pytestmark = [
    pytest.mark.usefixtures("ranked"),
    pytest.mark.skipif(bool(PRECISIONS["bf16"].missing()), reason="no AVX512 for bfloat16"),
]


class Ended(nn.Module):
    """Two layers, and a function of their results and of x."""

    def __init__(self, end: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.end = nn.Linear(48, 48), nn.Linear(48, 48, bias=False), end

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.end(self.first(x), self.second(x), x)


def nodes(module: nn.Module, *args: torch.Tensor) -> Mapping[str, int]:
    """Check the results in bf16, and return the operators that ran."""
    with collecting() as report:
        result = compiled(module, precision="bf16", max_drop=0.05)(*args)
    assert 0 < relative_error(result, module(*args)) < 0.02
    (region,) = (region for graph in report.graphs for region in graph.regions)
    return region.operators


@pytest.mark.parametrize(
    "activate",
    [F.relu, F.gelu, lambda x: F.gelu(x, approximate="tanh"), F.silu, lambda x: x * torch.sigmoid(x)],
    ids=["relu", "gelu", "tanh_gelu", "silu", "x * sigmoid"],
)
@pytest.mark.parametrize("shape", [(20, 48), (2, 7, 48)])
def test_an_activation_is_folded(activate: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, ...]) -> None:
    found = nodes(nn.Sequential(nn.Linear(48, 48), Function(activate)), torch.randn(shape))
    assert {name for name in found if name != "Reshape"} == {"Linear"}


class Function(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


@pytest.mark.parametrize("shape", [(20, 48), (2, 7, 48)])
def test_residuals_are_folded_before_and_after_an_activation(shape: tuple[int, ...]) -> None:
    found = nodes(Ended(lambda a, b, x: torch.cat([F.relu(a + x), F.gelu(b) + x])), torch.randn(shape))
    assert {name for name in found if name != "Reshape"} == {"Linear", "Concat"}


def test_a_second_activation_is_not_folded() -> None:
    found = nodes(Ended(lambda a, b, x: F.gelu(F.relu(a)) + b), torch.randn(20, 48))
    assert found["Gelu"] == 1


def test_a_sum_that_broadcasts_is_not_folded() -> None:
    found = nodes(Ended(lambda a, b, x: a + x[:1] * b.sum()), torch.randn(20, 48))
    assert found["Add"] == 1


def test_a_result_that_is_read_twice_is_not_folded() -> None:
    found = nodes(Ended(lambda a, b, x: torch.cat([F.relu(a), a, b])), torch.randn(20, 48))
    assert found["Relu"] == 1


def test_a_sum_of_a_result_with_itself_is_not_folded() -> None:
    found = nodes(Ended(lambda a, b, x: torch.cat([a + a, b])), torch.randn(20, 48))
    assert found["Add"] == 1


def test_sizes_may_be_symbolic() -> None:
    module = Ended(lambda a, b, x: F.gelu(b) + x + a)
    call = compiled(module, dynamic=True, precision="bf16", max_drop=0.05)
    for rows in (20, 33, 2):
        x = torch.randn(rows, 48)
        assert relative_error(call(x), module(x)) < 0.02


# Values between layers


def test_values_that_only_layers_read_are_stored_in_bfloat16() -> None:
    found = nodes(nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 48)), torch.randn(20, 48))
    assert found == {"LinearToBfloat16": 1, "LinearToFloat32": 1}


def test_values_that_others_read_stay_in_float32() -> None:
    torch.manual_seed(0)
    found = nodes(Chain(), torch.randn(20, 48))
    assert found["Linear"] == 2


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(48, 48), nn.Linear(48, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return torch.cat([self.second(y), torch.softmax(y, -1)])


def test_results_are_float32() -> None:
    module = nn.Sequential(nn.Linear(48, 48))
    assert compiled(module, precision="bf16", max_drop=0.05)(torch.randn(4, 48)).dtype == torch.float32


# Norms before layers


@pytest.mark.parametrize("norm", [nn.LayerNorm(48), nn.RMSNorm(48), nn.LayerNorm(48, elementwise_affine=False)])
def test_a_norm_that_layers_read_gives_them_bfloat16(norm: nn.Module) -> None:
    found = nodes(nn.Sequential(norm, nn.Linear(48, 48)), torch.randn(20, 48))
    assert found == {"NormToBfloat16": 1, "LinearToFloat32": 1}


def test_a_norm_that_others_read_gives_float32() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.norm, self.layer = nn.LayerNorm(48), nn.Linear(48, 48)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm(x)
            return y + self.layer(y)

    assert nodes(Residual(), torch.randn(20, 48)) == {"Norm": 1, "Linear": 1}


@pytest.mark.parametrize("norm", [nn.LayerNorm((4, 48)), nn.GroupNorm(2, 4)])
def test_other_norms_stay(norm: nn.Module) -> None:
    found = nodes(nn.Sequential(norm, nn.Linear(48, 48)), torch.randn(20, 4, 48))
    assert not [name for name in found if name.startswith("Norm")]
