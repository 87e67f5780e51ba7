"""Dynamic sizes of one in exports: torch.export traces them as two or more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import sardonyx

X = torch.arange(24.0).view(4, 6) / 7


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.eye(x[:2].shape[0]) * x.sum(),
        lambda x: x * 2 if x.shape[0] == 1 else x + 1,
        lambda x: x.sum() if x.shape[0] > 1 else x,
    ],
)
def test_one_that_gives_other_results_is_an_error(function: Any) -> None:
    program = sardonyx.export(function, (X,), dynamic_shapes=({0: "rows"},))
    for rows in (2, 3):
        torch.testing.assert_close(program(X[:rows]), function(X[:rows]))
    with pytest.raises(ValueError, match=r"the model was exported for calls with .*rows.*decided at"):
        program(X[:1])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[:2] * 2,
        lambda x: x + (x if x.shape[0] == 1 else x[: x.shape[0]]),
        lambda x: x.expand(x.shape[0], -1) if x.shape[0] == 1 else x.clone(),
    ],
)
def test_one_that_makes_no_difference_is_taken(function: Any) -> None:
    program = sardonyx.export(function, (X,), dynamic_shapes=({0: "rows"},))
    for rows in (1, 2, 3):
        torch.testing.assert_close(program(X[:rows]), function(X[:rows]))


def test_state_is_as_before_and_numbers_are_inputs() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(6)

        def forward(self, x: torch.Tensor, factor: float) -> torch.Tensor:
            return self.norm(x) * factor if x.shape[0] != 1 else x

    model = Counting().eval()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    program = sardonyx.export(model, (X, 2.0), dynamic_shapes=({0: "rows"}, None))
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    torch.testing.assert_close(program(X[:3], 5.0), model(X[:3], 5.0))
    with pytest.raises(ValueError, match="decided at"):
        program(X[:1], 5.0)


def test_random_numbers_of_the_caller_are_as_before() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    sardonyx.export(lambda x: x * 2 if x.shape[0] == 1 else x + 1, (X,), dynamic_shapes=({0: "rows"},))
    assert torch.equal(torch.get_rng_state(), before)
