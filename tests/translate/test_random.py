"""Random operators: numbers from torch's generator, with the distribution that eager has."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import onnx_ir as ir
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sardonyx.translate.translator import translate

from ..ops.distribution import distributions_differ
from .agreement import onnx

X = torch.linspace(-2, 2, 35).reshape(5, 7)
Draws = Callable[[torch.Tensor], torch.Tensor]

LIKE_EAGER: dict[str, Draws] = {
    "rand": lambda x: torch.rand(3, 100),
    "rand of half precision": lambda x: torch.rand(40, dtype=torch.float16),
    "rand_like": torch.rand_like,
    "randn": lambda x: torch.randn(3, 100),
    "randn of few": lambda x: torch.randn(3),
    "randn without dimensions": lambda x: torch.randn(()),
    "randn of double precision": lambda x: torch.randn(40, dtype=torch.float64),
    "randn_like": torch.randn_like,
    "uniform": lambda x: x.clone().uniform_(2, 5),
    "normal": lambda x: torch.normal(1.0, 2.0, (4, 50)),
    "normal in place": lambda x: x.clone().normal_(2, 5),
    "normal of tensors": lambda x: torch.normal(x, x.abs()),
    "normal of a mean": lambda x: torch.normal(x, 2.0),
    "normal of a deviation": lambda x: torch.normal(2.0, x.abs()),
    "bernoulli of tensors": lambda x: torch.bernoulli(x.sigmoid()),
    "exponential": lambda x: x.clone().exponential_(2.0),
    "multinomial without replacement": lambda x: torch.multinomial(x.sigmoid(), 3),
}

LIKE_DISTRIBUTED: dict[str, Draws] = {
    "bernoulli": lambda x: x.clone().bernoulli_(0.3),
    "cauchy": lambda x: x.clone().cauchy_(1.0, 3.0),
    "geometric": lambda x: x.clone().geometric_(0.3),
    "log_normal": lambda x: x.clone().log_normal_(0.5, 0.7),
    "randint": lambda x: torch.randint(-3, 9, (35,)),
    "randint of half precision": lambda x: torch.randint(0, 9, (35,), dtype=torch.float16),
    "randint_like": lambda x: torch.randint_like(x, 3, 9),
    "randperm": lambda x: torch.randperm(11),
    "multinomial with replacement": lambda x: torch.multinomial(x.sigmoid(), 9, replacement=True),
    "multinomial of one vector": lambda x: torch.multinomial(x[0].sigmoid(), 2),
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout of half precision": lambda x: F.dropout(x.half(), 0.3),
    "dropout of channels": lambda x: F.dropout1d(x[None], 0.4),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "alpha dropout of channels": lambda x: F.feature_alpha_dropout(x[None], 0.4, training=True),
    "rrelu": lambda x: F.rrelu(x, 0.1, 0.5, training=True),
    "attention with dropout": lambda x: F.scaled_dot_product_attention(*[x[None, None]] * 3, dropout_p=0.2),
}


def of(table: dict[str, Draws]) -> Any:
    return pytest.mark.parametrize("draws", table.values(), ids=table.keys())


def seeded(function: Callable[..., Any], *args: Any, seed: int = 7) -> Any:
    torch.manual_seed(seed)
    return function(*args)


@of(LIKE_EAGER)
def test_the_numbers_are_eagers_own_under_the_same_seed(draws: Draws) -> None:
    torch.testing.assert_close(seeded(onnx(draws), X), seeded(draws, X))


@of(LIKE_DISTRIBUTED)
def test_the_distribution_is_eagers(draws: Draws) -> None:
    compiled = onnx(draws)
    result, expected = compiled(X), draws(X)
    assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
    assert distributions_differ(lambda: compiled(X), lambda: draws(X), (1e-3, 1e-3), calls=600) == ""


@of(LIKE_EAGER | LIKE_DISTRIBUTED)
def test_a_seed_repeats_the_numbers_and_without_one_they_change(draws: Draws) -> None:
    compiled = onnx(draws)
    first, second = seeded(compiled, X), compiled(X)
    assert torch.equal(seeded(compiled, X), first)
    assert not torch.equal(first, second) or first.numel() < 3


@of(
    {
        "rand": torch.rand_like,
        "normal": lambda x: x.clone().normal_(),
        "uniform": lambda x: x.clone().uniform_(),
        "exponential": lambda x: x.clone().exponential_(),
        "randint": lambda x: torch.randint_like(x, 100),
        "dropout": F.dropout,
    }
)
def test_two_calls_in_one_graph_draw_apart(draws: Draws) -> None:
    one, two = onnx(lambda x: (draws(x), draws(x)))(X)
    assert not torch.equal(one, two)


def test_large_draws_have_the_moments_they_should() -> None:
    def draws(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ones = x.new_ones(200_000)
        exponential, geometric = ones.clone().exponential_(2.0), ones.clone().geometric_(0.25)
        return exponential, geometric, F.dropout(ones, 0.2), torch.randint_like(ones, 10)

    means = torch.stack([t.double().mean() for t in seeded(onnx(draws), X)])
    torch.testing.assert_close(means, torch.tensor([0.5, 4.0, 1.0, 4.5], dtype=torch.float64), rtol=0.01, atol=0)


def test_certain_and_impossible_events() -> None:
    def draws(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.bernoulli(0.0), x.bernoulli(1.0), F.dropout(x, 0.0), F.dropout(x, 1.0), x.clone().geometric_(1 - 1e-12)

    never, always, kept, dropped, first = onnx(draws)(X)
    assert not never.any()
    assert always.all()
    assert torch.equal(kept, X)
    assert not dropped.any()
    assert (first == 1).all()


def test_a_weight_of_zero_is_never_drawn() -> None:
    weights = torch.tensor([0.0, 1.0, 0.0, 3.0])
    drawn = seeded(onnx(lambda w: torch.multinomial(w, 5000, replacement=True)), weights)
    counts = drawn.bincount(minlength=4).double() / 5000
    torch.testing.assert_close(counts, torch.tensor([0, 0.25, 0, 0.75]).double(), rtol=0, atol=0.03)
    assert counts[0] == counts[2] == 0


def test_a_permutation_has_every_number_once() -> None:
    assert onnx(lambda x: torch.randperm(1000))(X).sort().values.tolist() == list(range(1000))


def test_sizes_may_be_symbolic() -> None:
    def draws(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows, columns = x.shape
        return torch.rand_like(x), torch.randn(rows * columns, 2), torch.rand(rows // 2 + 1), torch.randperm(columns)

    compiled = onnx(draws, dynamic=True)
    for shape in ((3, 4), (6, 5), (7, 2)):
        expected = seeded(draws, torch.zeros(shape))
        result = seeded(compiled, torch.zeros(shape))
        assert [r.shape for r in result] == [e.shape for e in expected]
        for drawn, eager in zip(result[:3], expected[:3], strict=True):
            torch.testing.assert_close(drawn, eager)


@torch.enable_grad()
def test_threads_draw_apart() -> None:
    compiled = onnx(torch.rand_like)
    compiled(X)
    with ThreadPoolExecutor(4) as pool:
        drawn = list(pool.map(lambda _: compiled(X), range(16)))
    assert len({tuple(d.flatten().tolist()) for d in drawn}) == 16


@torch.enable_grad()
def test_forward_and_backward_of_dropout_use_the_same_mask() -> None:
    model = nn.Sequential(nn.Linear(7, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 3), nn.Dropout(0.25))
    compiled, x = onnx(model), X.clone().requires_grad_()
    seeded(compiled, x).square().sum().backward()
    ours = [x.grad, *(p.grad for p in model.parameters())]
    torch.manual_seed(7)
    hidden_mask, result_mask = (torch.rand(shape) < kept for shape, kept in (((5, 16), 0.5), ((5, 3), 0.75)))
    by_hand = X.clone().requires_grad_()
    model.zero_grad()
    hidden = (model[0](by_hand) * hidden_mask / 0.5).relu()
    (model[3](hidden) * result_mask / 0.75).square().sum().backward()
    for grad, expected in zip(ours, [by_hand.grad, *(p.grad for p in model.parameters())], strict=True):
        torch.testing.assert_close(grad, expected)


@torch.enable_grad()
def test_gradients_of_rrelu_follow_the_slopes_that_were_drawn() -> None:
    x = X.clone().requires_grad_()
    result = onnx(lambda x: F.rrelu(x, 0.1, 0.5, training=True))(x)
    result.sum().backward()
    torch.testing.assert_close(x.grad, torch.where(X == 0, x.grad, result.detach() / X))


@pytest.mark.parametrize(
    ("shape", "size"), [((2, 3, 9, 11), (4, 5)), ((3, 9, 11), (1, 6)), ((2, 3, 7, 9, 8), (3, 1, 4))]
)
def test_windows_placed_at_random_are_eagers(shape: tuple[int, ...], size: tuple[int, ...]) -> None:
    pool = F.fractional_max_pool2d if len(size) == 2 else F.fractional_max_pool3d
    draws = partial(pool, kernel_size=2, output_size=size, return_indices=True)
    x = torch.randn(shape)
    x[..., 3, 3] = math.nan
    x[..., 5:, 5:] = 1.0
    for result, expected in zip(seeded(onnx(draws), x), seeded(draws, x), strict=True):
        torch.testing.assert_close(result, expected, equal_nan=True)


def test_a_range_wider_than_doubles_tell_apart_stays_in_torch() -> None:
    with pytest.raises(Exception, match="wider than a double"):
        onnx(lambda x: torch.randint(0, 2**60, (3,)))(X)


def test_a_file_makes_its_own_noise() -> None:
    def draws(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.rand_like(x), torch.randn(x.shape[1], 3), torch.rand(4, dtype=torch.float64), x.bernoulli(0.5)

    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(draws, tracing_mode="symbolic")(torch.zeros(30, 40))
    results = graph.graph.output_node().args[0]
    translation = translate(graph, opset=21, outputs=results, orders=[None] * 4, random_mode="nodes")
    assert translation.random_inputs == []
    session = onnxruntime.InferenceSession(ir.to_proto(translation.model).SerializeToString())
    name = session.get_inputs()[0].name
    uniform, normal, wide, coin = (torch.tensor(r) for r in session.run(None, {name: torch.zeros(50, 60).numpy()}))
    assert [tuple(r.shape) for r in (uniform, normal, wide, coin)] == [(50, 60), (60, 3), (4,), (50, 60)]
    assert uniform.min() >= 0
    assert uniform.max() < 1
    assert wide.dtype == torch.float64
    assert abs(uniform.mean() - 0.5) < 5 * math.sqrt(1 / 12 / 3000)
    assert abs(normal.mean()) < 5 / math.sqrt(180)
    assert abs(coin.mean() - 0.5) < 5 * 0.5 / math.sqrt(3000)
