"""Symbolic sizes: one compilation, several shapes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from sardonyx.sizes import symbol_of
from sardonyx.translate.inference import broadcast

from .agreement import agrees_at


def at(*shapes: tuple[int, ...]) -> list[tuple[torch.Tensor]]:
    return [(torch.randn(shape),) for shape in shapes]


SHAPES = ((2, 6), (3, 8), (5, 4))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x + 1).view(-1),
        lambda x: (x + 1).view(x.shape[0], 2, -1),
        lambda x: (x + 1).view(2, x.shape[0], x.shape[1] // 2),
        lambda x: (x * 2).flatten().unflatten(0, (x.shape[1], x.shape[0])),
        lambda x: (x * 2).t().reshape(-1, 2),
        lambda x: (x + 1).unsqueeze(1).squeeze(1),
    ],
    ids=["flat", "split in two", "product", "swapped", "transposed", "squeezed"],
)
def test_views(function: object) -> None:
    agrees_at(function, *at(*SHAPES))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x + 1)[:, 1:],
        lambda x: (x + 1)[:, :-1],
        lambda x: (x + 1)[..., -2:],
        lambda x: (x + 1)[:, : x.shape[1] // 2],
        lambda x: (x + 1)[:, ::2],
        lambda x: (x + 1)[-1],
        lambda x: (x + 1)[:, x.shape[1] - 1],
    ],
    ids=["from", "to", "last two", "half", "step", "last", "at a size"],
)
def test_slices(function: object) -> None:
    agrees_at(function, *at(*SHAPES))  # type: ignore[arg-type]


def test_joins() -> None:
    agrees_at(lambda x: (torch.cat([x, x * 2], 1), torch.stack([x, x + 1])), *at(*SHAPES))


def test_splits() -> None:
    agrees_at(lambda x: (x * 2).split(x.shape[1] // 2, 1), *at(*SHAPES))


@pytest.mark.parametrize(
    "function",
    [torch.fmod, torch.remainder, torch.lerp, torch.hypot, torch.atan2, torch.nextafter, torch.floor_divide],
)
def test_operands_of_which_the_first_is_half_as_wide_and_that_is_one(function: Callable[..., torch.Tensor]) -> None:
    """Which of the sizes s and s // 2 is that of the result depends on a guard: s is 2 or 3."""
    further = (0.3,) if function is torch.lerp else ()
    agrees_at(lambda x: function(x.tensor_split(2, 1)[1], x, *further), *at((4, 2), (5, 3), (7, 3)))


def test_sizes_of_which_any_may_be_one_have_no_broadcast_size() -> None:
    s, t = map(symbol_of, "st")
    assert broadcast((s, 3), (1, t)) == (s, 3)
    assert broadcast((s, s), (t, s)) is None
    assert broadcast((s, s), (t, s), equal=lambda x, y: x == y or (x, y) == (t, 1)) == (s, s)
    assert broadcast((s,), (t,), equal=lambda x, y: {x, y} <= {s, t}) == (s,)


def test_expansion() -> None:
    agrees_at(lambda x: (x[:, :1] + 1).expand(-1, x.shape[1]) * x, *at(*SHAPES))


def test_repetition() -> None:
    agrees_at(lambda x: ((x + 1).repeat(2, x.shape[0]), x.repeat_interleave(2, 0)), *at(*SHAPES))


def test_reductions() -> None:
    agrees_at(lambda x: (x.sum(), x.mean(0), x.var(1), x.amax(1), x.std(), x.argmax(1), x.logsumexp(0)), *at(*SHAPES))


def test_ranges() -> None:
    agrees_at(lambda x: x + torch.arange(x.shape[1]) + torch.arange(0, 2 * x.shape[1], 2), *at(*SHAPES))


def test_new_tensors() -> None:
    agrees_at(lambda x: (torch.zeros(x.shape), torch.full((x.shape[0],), 2.0), torch.ones(x.shape[1])), *at(*SHAPES))


def test_triangles() -> None:
    agrees_at(lambda x: (x.tril(), x.triu(1), torch.ones(x.shape[1], x.shape[1]).tril()), *at(*SHAPES))


def test_indices() -> None:
    index = torch.tensor([1, 0, 1])
    agrees_at(lambda x: ((x + 1)[index], (x + 1)[:, index], x.gather(1, index.expand(x.shape[0], 3))), *at(*SHAPES))


def test_padding_by_a_size() -> None:
    agrees_at(lambda x: F.pad(x, (0, 10 - x.shape[1])), *at(*SHAPES))


def test_sizes_as_numbers() -> None:
    agrees_at(lambda x: x * x.shape[1] + x.shape[0] // 2, *at(*SHAPES))


def test_products() -> None:
    agrees_at(lambda x: (x @ x.t(), torch.einsum("ij,kj->ik", x, x)), *at(*SHAPES))


def test_attention() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    agrees_at(function, *at((2, 2, 5, 4), (3, 2, 7, 4)))


def test_convolution_and_pooling() -> None:
    weight = torch.randn(3, 2, 3, 3)

    def function(x: torch.Tensor) -> torch.Tensor:
        return F.max_pool2d(F.conv2d(x, weight.to(x), padding=1), 2)

    agrees_at(function, *at((1, 2, 8, 8), (2, 2, 12, 10)))


def test_normalisation() -> None:
    agrees_at(lambda x: (F.layer_norm(x, (4,)), F.rms_norm(x, (4,)), F.group_norm(x, 2)), *at((3, 4, 4), (2, 6, 4)))


@torch.enable_grad()
def test_a_symbolic_size_that_torch_takes_for_one_is_squeezed() -> None:
    """As that of a diagonal, min(rows, columns − 1)."""

    def products(x: torch.Tensor) -> torch.Tensor:
        rows = x.tanh().diagonal(1, 0, -1)
        return torch.einsum("...ij,...kj->...ik", rows.mT @ rows, rows.mT @ rows)

    run = torch.compile(products, backend="sardonyx", dynamic=True)
    for sizes in ((4, 1, 2), (2, 9, 2), (1, 2, 2)):
        x = torch.randn(sizes, requires_grad=True)
        got, want = (torch.autograd.grad(function(x).sum(), x) for function in (run, products))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
