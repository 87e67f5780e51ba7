"""Half precision and bfloat16: operators that torch computes in float32, rounded once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sardonyx


class Model(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Tensor:
        return self.function(*args)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("function", [torch.addcmul, torch.addcdiv])
def test_a_product_and_a_sum_round_once(function: Callable[..., Tensor], dtype: torch.dtype) -> None:
    x, a, b = (torch.randn(50, 50).to(dtype) for _ in range(3))
    model = Model(lambda x, a, b: function(x, a, b, value=3.14))
    result = sardonyx.export(model, (x, a, b))(x, a, b)
    truth = function(x.double(), a.double(), b.double(), value=3.14)
    torch.testing.assert_close(result, truth.to(dtype), rtol=torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_histogram_counts_by_exact_intervals(dtype: torch.dtype) -> None:
    x = (torch.randn(500) * 4).to(dtype)
    run = torch.compile(lambda x: torch.histc(x, 100, -10, 10), backend="sardonyx", options={"fallback": "error"})
    torch.testing.assert_close(run(x), torch.histc(x.double(), 100, -10, 10).to(dtype))


@pytest.mark.parametrize("align_corners", [False, True])
def test_halves_between_reflected_pixels_round_as_in_torch(align_corners: bool) -> None:
    """ONNX Runtime rounds before it reflects: -1.5 gives the second pixel instead of the first."""
    x = torch.arange(40.0).reshape(1, 1, 5, 8)
    ys, xs = torch.meshgrid(torch.arange(-3, 3.01, 0.1), torch.arange(-3, 3.01, 0.125), indexing="ij")
    grid = torch.stack([xs, ys], -1)[None]

    def sample(x: Tensor, grid: Tensor) -> Tensor:
        return F.grid_sample(x, grid, "nearest", "reflection", align_corners)

    run = torch.compile(sample, backend="sardonyx", options={"fallback": "error"})
    torch.testing.assert_close(run(x, grid), sample(x, grid))


def test_complex_numbers_of_halves_stay_in_torch() -> None:
    x = torch.zeros(0, 3, dtype=torch.float16)
    run = torch.compile(torch.complex, backend="sardonyx", options={"fallback": "quiet"})
    assert run(x, x).dtype == torch.complex32
