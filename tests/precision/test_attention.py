"""Attention with the option `precision`: one more layer that is measured, and bounded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sardonyx.native.linear import PRECISIONS
from sardonyx.precision.metric import relative_error
from sardonyx.telemetry.report import LayerPrecision, collecting
from tests.precision.compiling import compiled

pytestmark = [
    pytest.mark.usefixtures("ranked"),
    pytest.mark.skipif(bool(PRECISIONS["bf16"].missing()), reason="no AVX512 for bfloat16"),
]


class SelfAttention(nn.Module):
    """Attention of four heads, with its projections."""

    def __init__(self, *, scaled_queries: bool = False, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
        self.options, self.scaled_queries = options, scaled_queries

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = (y.unflatten(-1, (4, 16)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q * 0.25 if self.scaled_queries else q, k, v, mask, **self.options)
        return self.out(y.transpose(1, 2).flatten(-2))


def run(module: nn.Module, *args: torch.Tensor, **options: Any) -> tuple[LayerPrecision, set[str]]:
    """Check the results in bf16, and return what the report says of attention, and the operators that ran."""
    with collecting() as report:
        result = compiled(module, **{"precision": "bf16", "max_drop": 0.05, **options})(*args)
    assert relative_error(result, module(*args)) < 0.02
    (region,) = (region for graph in report.graphs for region in graph.regions)
    assert region.precision is not None
    *_, row = region.precision.layers
    return row, set(region.operators)


def test_it_is_in_bf16_between_layers() -> None:
    row, operators = run(SelfAttention(), torch.randn(2, 20, 64))
    assert (row.layer, row.precision) == ("(attention 1)", "bf16")
    assert 0 < row.error < 0.02
    assert any(name.startswith("Attention") for name in operators - {"Attention"})


@pytest.mark.parametrize("options", [{"is_causal": True}, {"scale": 0.7}, {"scale": 1.0, "scaled_queries": True}])
def test_its_options_are_kept(options: dict[str, Any]) -> None:
    row, _ = run(SelfAttention(**options), torch.randn(2, 20, 64))
    assert row.precision == "bf16"


@pytest.mark.parametrize("shape", [(20, 20), (2, 1, 20, 20), (2, 4, 20, 20), (2, 1, 1, 20)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_masks_are_kept(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    mask = torch.rand(shape) < 0.7
    mask[..., 0] = True
    run(SelfAttention(), torch.randn(2, 20, 64), mask if dtype == torch.bool else torch.randn(shape))


def test_int8_has_it_in_bf16() -> None:
    row, _ = run(SelfAttention(), torch.randn(2, 20, 64), precision="int8", max_drop=0.2)
    assert row.precision == "bf16"


def test_a_bound_of_zero_leaves_it_in_float32() -> None:
    row, operators = run(SelfAttention(), torch.randn(2, 20, 64), max_drop=0.0)
    assert row.precision == "float32"
    assert "Attention" in operators


def test_sizes_may_be_symbolic() -> None:
    module = SelfAttention(is_causal=True)
    call = compiled(module, dynamic=True, precision="bf16", max_drop=0.05)
    for length in (20, 33, 2):
        x = torch.randn(2, length, 64)
        assert relative_error(call(x), module(x)) < 0.02
