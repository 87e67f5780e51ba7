"""Dynamic sizes of zero and one in exports: torch.export traces them as two or more."""

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


@pytest.mark.parametrize(
    "function",
    [lambda x: torch.full_like(x[:2], 3), lambda x: x[:2].sort(0).values, lambda x: torch.cat([x[:2], x]).mean(0)],
)
def test_one_for_which_a_translation_would_rely_on_two_rows_is_an_error(function: Any) -> None:
    program = sardonyx.export(function, (X,), dynamic_shapes=({0: "rows"},))
    torch.testing.assert_close(program(X[:2]), function(X[:2]))
    with pytest.raises(ValueError, match="the model was exported for calls with"):
        program(X[:1])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[1:].mean(0),
        lambda x: torch.full_like(x[1:], 3),
        lambda x: x[:-1].sort(0).values,
        lambda x: torch.slice_scatter(x, torch.zeros_like(x[1:]), 0, 1),
        lambda x: torch.ones_like(torch.cat([x[1:], x, torch.zeros(5, 6)])),
    ],
)
def test_zero_rows_that_would_be_minus_one_after_a_slice_are_an_error(function: Any) -> None:
    program = sardonyx.export(function, (X,), dynamic_shapes=({0: "rows"},))
    for rows in (1, 3):
        torch.testing.assert_close(program(X[:rows]), function(X[:rows]), equal_nan=True)
    with pytest.raises(ValueError, match=r"the model was exported for calls with .*rows.*0"):
        program(X[:0])


def test_zero_rows_of_which_elementwise_operators_take_a_slice_are_taken() -> None:
    program = sardonyx.export(lambda x: x[1:].double() * 2 + 1, (X,), dynamic_shapes=({0: "rows"},))
    for rows in (0, 1, 3):
        torch.testing.assert_close(program(X[:rows]), X[:rows][1:].double() * 2 + 1)


def test_sizes_that_depend_on_a_small_one_are_small_too() -> None:
    program = sardonyx.export(
        lambda x, y: (x[:2] * 2, y.sort(0).values),
        (X[:2], X),
        dynamic_shapes=({0: (rows := torch.export.Dim("rows"))}, {0: 2 * rows}),
    )
    for result, expected in zip(program(X[:1], X[:2]), (X[:1] * 2, X[:2]), strict=True):
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("flat", [lambda x: x.reshape(-1), lambda x: x.contiguous().view(-1), torch.ravel])
def test_one_row_that_would_be_edited_through_a_view_is_an_error(flat: Any) -> None:
    """Of more rows it is a copy that is edited."""

    def edited(x: torch.Tensor) -> torch.Tensor:
        y = x.mT * 2
        flat(y)[0] = 7
        return y

    program = sardonyx.export(edited, (X,), dynamic_shapes=({0: "rows"},))
    torch.testing.assert_close(program(X[:3]), edited(X[:3]))
    with pytest.raises(ValueError, match="the model was exported for calls with"):
        program(X[:1])


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


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sum() + 1 if x.shape[0] == 0 else x.sum(),
        lambda x: x.sum() if x.shape[0] else x.sum() + 1,
        lambda x: x.sum() + (3 if x.numel() > 0 else 5),
        lambda x: x.sum() + (2 if x.size(0) >= 1 else 3),
    ],
)
def test_zero_that_the_code_asks_for_is_an_error_with_its_line(function: Any) -> None:
    program = sardonyx.export(function, (X,), dynamic_shapes=({0: "rows"},))
    for rows in (1, 3):
        torch.testing.assert_close(program(X[:rows]), function(X[:rows]))
    with pytest.raises(ValueError, match=r"the model was exported for calls with .*rows.*decided at .*lambda"):
        program(X[:0])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sum() / max(1, x.shape[1]),
        lambda x: x.new_ones(max(1, x.shape[1])).sum(),
        lambda x: nn.functional.cross_entropy(x, torch.softmax(x, 1)),
    ],
)
def test_zero_that_operators_ask_for_is_an_error(function: Any) -> None:
    program = sardonyx.export(function, (X,), dynamic_shapes=({1: "classes"},))
    torch.testing.assert_close(program(X[:, :1]), function(X[:, :1]))
    with pytest.raises(ValueError, match=r"the model was exported for calls with .*classes"):
        program(X[:, :0])


def test_zero_that_makes_no_difference_is_taken() -> None:
    layer = nn.Linear(6, 3)
    program = sardonyx.export(layer.eval(), (X,), dynamic_shapes=({0: "rows"},))
    with torch.no_grad():
        torch.testing.assert_close(program(X[:0]), layer(X[:0]))
