"""Dynamic sizes of zero, one and many: what an exported model gives there, and what raises."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sardonyx
from tests.sizes import agrees_at_the_edges

EXAMPLE = {"b": 3, "s": 4, "t": 5}


class Function(nn.Module):
    """A function, and the modules that it takes before its arguments."""

    def __init__(self, function: Callable[..., Any], *modules: nn.Module) -> None:
        super().__init__()
        self.function, self.inner = function, nn.ModuleList(modules)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        return self.function(*self.inner, x) if y is None else self.function(*self.inner, x, y)


def check(function: Callable[..., Any], *shapes: tuple[Any, ...], modules: tuple[nn.Module, ...] = ()) -> Any:
    """Export at the example's sizes, where a letter is a dynamic size, and compare at the edges."""
    model = Function(function, *modules).eval()
    names = dict.fromkeys(dim for shape in shapes for dim in shape if isinstance(dim, str))
    example = {name: EXAMPLE[name] for name in names}

    def make(**sizes: int) -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        return tuple(torch.randn([sizes.get(dim, dim) for dim in shape]) for shape in shapes)

    dynamic = [{i: dim for i, dim in enumerate(shape) if isinstance(dim, str)} for shape in shapes]
    program = sardonyx.export(model, make(**example), dynamic_shapes=dict(zip(("x", "y"), dynamic, strict=False)))
    agrees_at_the_edges(program, model, make, example)
    return program


def test_linear_layers() -> None:
    check(lambda f, x: f(x), ("b", "s", 3), modules=(nn.Linear(3, 3),))
    norm = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4), nn.RMSNorm(4))
    check(lambda f, x: x + f(x), ("b", "s", 4), modules=(norm,))


def test_views() -> None:
    def views(x: Tensor) -> Any:
        flat = (x.reshape(-1), x.flatten(0, 1), x.reshape(x.shape[0], 3, x.shape[1]), x.unflatten(-1, (3, 1)))
        return *flat, x.permute(2, 0, 1).reshape(3, -1), (x + 1)[:, 1:], x.unsqueeze(1).expand(-1, 4, -1, -1)

    check(views, ("b", "s", 3))


def test_what_becomes_empty_inside() -> None:
    def narrowed(x: Tensor) -> Any:
        y = x[..., 1:]
        return F.scaled_dot_product_attention(y, y, y), y @ y.mT

    program = sardonyx.export(narrowed, (torch.randn(2, 3, 5, 6),), dynamic_shapes=({3: "w"},))
    for width in (6, 2, 1):
        x = torch.randn(2, 3, 5, width)
        for got, expected in zip(program(x), narrowed(x), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_rows_that_are_rolled_repeated_and_flipped() -> None:
    def moved(x: Tensor) -> Any:
        rolled = (x.roll(1), x.roll(1, 0), x.roll((1, 2), (0, 1)))
        return *rolled, x.repeat(2, 3, 1), x.repeat_interleave(2, 1), x.flip(0, 1), F.glu(x, 2), torch.cat([x, x], 1)

    check(moved, ("b", "s", 4))
    check(lambda x: (F.glu(torch.cat([x, x], 1), 1), F.glu(x.double().repeat(2, 1), 0)), ("b", "s"))


def test_products() -> None:
    def products(x: Tensor, y: Tensor) -> Any:
        by_rows = (x @ y.mT, x.mT @ x, torch.einsum("bsi,bti->bi", x, y), x @ torch.ones(3, 4, 2)[0])
        return *by_rows, (x @ y.mT) * 0.5 @ y, x.unsqueeze(1) @ torch.ones(2, 4, 3)

    check(products, ("b", "s", 4), ("b", "t", 4))


def test_a_product_whose_stacks_are_transposed() -> None:
    check(lambda x: (x.transpose(0, 1) @ x.permute(1, 2, 0)).softmax(-1) @ x.transpose(0, 1), ("s", "b", 4))


def test_attention_over_nothing() -> None:
    check(lambda x, y: F.scaled_dot_product_attention(x, y, y), ("b", 2, "s", 4), ("b", 2, "t", 4))
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    check(lambda f, x, y: f(x, y, y), ("b", "s", 8), ("b", "t", 8), modules=(attention,))
    check(lambda f, x: f(x, x, x, need_weights=False)[0], ("b", "s", 8), modules=(attention,))


def test_group_normalisation() -> None:
    check(lambda f, x: F.silu(f(x)), ("b", 4, "s"), modules=(nn.GroupNorm(2, 4),))


def test_normalisation_over_a_dynamic_size() -> None:
    check(lambda x: (F.layer_norm(x, x.shape[-1:]), F.rms_norm(x, x.shape[-1:])), ("b", "s"))


def test_pooling_of_no_images() -> None:
    pools = [
        nn.AdaptiveAvgPool2d(6),
        nn.AdaptiveAvgPool2d(1),
        nn.AdaptiveMaxPool2d(3),
        nn.MaxPool2d(2),
        nn.AvgPool2d(2),
    ]
    check(lambda *given: tuple(pool(given[-1]) for pool in given[:-1]), ("b", 4, 9, 9), modules=tuple(pools))


def test_convolutions_of_no_images() -> None:
    layers = (nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.ConvTranspose2d(4, 2, 2), nn.Flatten())
    check(lambda f, x: f(x), ("b", 2, 6, 6), modules=(nn.Sequential(*layers, nn.Linear(50, 3)),))


def test_rows_that_are_filled() -> None:
    check(lambda x: torch.index_fill(x, -2, torch.tensor([0]), 1.0), ("b", 3, "s"))
    program = sardonyx.export(
        lambda x: x.index_fill(1, torch.tensor([0]), 1.0), (torch.randn(3, 4),), dynamic_shapes=({1: "s"},)
    )
    assert program(torch.randn(3, 0)).shape == (3, 0)
    assert (program(torch.zeros(3, 2)).sum(0) == torch.tensor([3.0, 0.0])).all()


def test_reductions() -> None:
    def reduced(x: Tensor) -> Any:
        sums = (
            x.sum(),
            x.sum(1),
            x.mean(),
            x.mean((0, 1)),
            x.prod(1),
            x.var(1),
            x.std(),
            x.logsumexp(1),
            x.norm(dim=1),
        )
        last = (x.amax(-1), x.argmax(-1), *x.min(-1), x.sum(-1), x.mean(-1, keepdim=True))
        return *sums, *last, (x > 0).any(), (x > 0).any(1), (x > 0).all(1), x.cumsum(1), x.sort(-1)[0]

    check(reduced, ("b", "s", 3))


@pytest.mark.parametrize("function", [lambda x: x.amax(1), lambda x: x.argmax(1), lambda x: x.min()])
def test_the_largest_of_nothing_is_an_error(function: Any) -> None:
    check(function, ("b", "s", 3))


def test_losses() -> None:
    def losses(x: Tensor, y: Tensor) -> Any:
        return F.mse_loss(x, y), F.l1_loss(x, y, reduction="sum"), F.binary_cross_entropy_with_logits(x, y.sigmoid())

    check(losses, ("b", "s"), ("b", "s"))
    check(lambda x: F.nll_loss(x.log_softmax(1), x.argmax(1)), ("b", 5, "s"))


def test_a_model_has_guards_where_they_are_asked_for_and_sizes_may_be_zero() -> None:
    model = Function(lambda x: F.scaled_dot_product_attention(x, x, x)).eval()
    guarded = {}
    for least, asked in ((0, True), (1, True), (0, False)):
        dims = {0: torch.export.Dim("b", min=least), 2: torch.export.Dim("s", min=least)}
        example = (torch.randn(3, 2, 4, 4),)
        program = sardonyx.export(model, example, dynamic_shapes={"x": dims}, empty_sizes=asked)
        guarded[least, asked] = "If" in {node.op_type for node in program.model.graph}
    assert guarded == {(0, True): True, (1, True): False, (0, False): False}


def test_a_guarded_model_takes_nothing_in_a_session_of_its_own(tmp_path: Path) -> None:
    attention = Function(lambda x: F.scaled_dot_product_attention(x, x, x)).eval()
    dims = {0: torch.export.Dim("b"), 2: torch.export.Dim("s")}
    program = sardonyx.export(attention, (torch.randn(3, 2, 4, 4),), dynamic_shapes={"x": dims}, empty_sizes=True)
    session = onnxruntime.InferenceSession(program.save(tmp_path / "model.onnx"))
    (result,) = session.run(None, {"x": np.ones((0, 2, 5, 4), np.float32)})
    assert result.shape == (0, 2, 5, 4)


@pytest.mark.parametrize("shape", [(3, 0), (0, 4), (3, 0, 4)])
def test_a_size_of_zero_beside_dynamic_ones(shape: tuple[int, ...]) -> None:
    def function(x: Tensor) -> Any:
        return F.rms_norm(x, x.shape[-1:]), x.roll(1), x.softmax(-1), x.sum(-1), x.unsqueeze(1) + 1

    run = torch.compile(function, backend="sardonyx", dynamic=True, options={"fallback": "error"})
    x = torch.ones(shape)
    for got, wanted in zip(run(x), function(x), strict=True):
        assert got.shape == wanted.shape
        assert torch.equal(got, wanted)


def test_a_product_of_sizes_that_are_only_known_as_computed() -> None:
    def halves(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x[::2]  # torch's view, so that the rest is not told the size of x
        return y, torch.softmax(y @ y.mT, 1)

    run = torch.compile(halves, backend="sardonyx", dynamic=True, options={"fallback": "error"})
    for rows in (6, 0, 3, 1):
        x = torch.randn(rows, 5, 4)
        torch.testing.assert_close(run(x), halves(x))
