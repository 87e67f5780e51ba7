"""Operators that torch decomposes: their in-place operators become functional ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sardonyx


class Module(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


FUNCTIONS = {
    "circular padding": lambda x: F.pad(x, (1, 2), mode="circular"),
    "quantile": lambda x: torch.quantile(x, 0.3, dim=-1),
    "nanquantile": lambda x: torch.nanquantile(x, torch.tensor([0.1, 0.8])),
    "vander": lambda x: torch.vander(x[0, 0], 4, increasing=True),
    "block_diag": lambda x: torch.block_diag(x[0], x[1]),
    "circular convolution": nn.Conv1d(3, 4, 3, padding=1, padding_mode="circular"),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_wrapper_and_an_export_give_eagers_results(name: str) -> None:
    model, x = Module(FUNCTIONS[name]).eval(), torch.randn(2, 3, 5)
    for run in (sardonyx.compile(model), sardonyx.export(model, (x,))):
        torch.testing.assert_close(run(x), model(x))


def test_a_dynamic_batch_of_circular_convolutions() -> None:
    model = nn.Conv1d(3, 4, 3, padding=1, padding_mode="circular").eval()
    program = sardonyx.export(model, (torch.randn(2, 3, 5),), dynamic_shapes=({0: "batch"},))
    for batch in (0, 1, 7):
        x = torch.randn(batch, 3, 5)
        torch.testing.assert_close(program(x), model(x))


def test_batch_norm_in_eval_mode_takes_any_batch() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
    program = sardonyx.export(model, (torch.randn(2, 2, 6, 6),), dynamic_shapes=({0: "batch"},))
    for batch in (0, 1, 5):
        x = torch.randn(batch, 2, 6, 6)
        torch.testing.assert_close(program(x), model(x))


def test_an_operator_that_reads_a_tensor_while_it_is_decomposed_is_left_to_torch() -> None:
    class Split(nn.Module):
        def forward(self, x: Tensor, indices: Tensor) -> Sequence[Tensor]:
            return torch.tensor_split(x, indices)

    x, indices = torch.arange(6.0), torch.tensor([1, 3])
    for got, want in zip(
        sardonyx.compile(Split().eval(), fallback="quiet")(x, indices), Split()(x, indices), strict=True
    ):
        torch.testing.assert_close(got, want)
    with pytest.raises(sardonyx.errors.CaptureError, match="tensor_split"):
        sardonyx.export(Split().eval(), (x, indices))
