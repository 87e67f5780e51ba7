"""Mixed and half precision: autocast, scaled gradients, modules that are half precision throughout."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sardonyx.optimize import legalize

from .twins import same, twins

ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
HALVES = list(ROUNDING)


@pytest.fixture(autouse=True)
def gradients() -> Iterator[None]:
    with torch.enable_grad():
        yield


class Perceptron(nn.Module):
    """Products in half precision, a norm and a softmax that autocast wants in full."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 32), nn.LayerNorm(32), nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.last(F.gelu(self.norm(self.first(x)))), -1)


class Convolutional(nn.Module):
    """Convolutions around a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.second, self.last = nn.Conv2d(8, 8, 3, stride=2), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.second(torch.relu(self.norm(self.first(x)))))
        result: torch.Tensor = self.last(x.mean((2, 3)))
        return result


class Transformer(nn.Module):
    """Embedding, one layer, logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.last = nn.Embedding(20, 16), nn.Linear(16, 20)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.layer(self.embedding(x)))
        return result


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "perceptron": (Perceptron, lambda: torch.randn(6, 8)),
    "convolutional": (Convolutional, lambda: torch.randn(4, 3, 8, 8)),
    "transformer": (Transformer, lambda: torch.randint(20, (3, 7))),
}


def step(model: Any, x: torch.Tensor, context: Any) -> list[torch.Tensor]:
    """The result and the gradients of all parameters."""
    with context:
        y = model(x)
    y.float().square().mean().backward()
    return [y, *(p.grad for p in model.parameters())]


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


def as_good_as_eager(ours: list[torch.Tensor], eager: list[torch.Tensor], exact: list[torch.Tensor]) -> None:
    """Assert eager's dtypes, and an error against double precision that is no larger than eager's, up to rounding."""
    for a, b, reference in zip(ours, eager, exact, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert error(a, reference) <= 2 * error(b, reference) + 4 * max(ROUNDING.get(b.dtype, 0.0), 2.0**-11)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_autocast_gives_eagers_dtypes_and_gradients_as_near_to_the_truth(name: str, dtype: torch.dtype) -> None:
    make, inputs = CASES[name]
    x = inputs()
    eager, compiled = twins(make())
    exact = step(copy.deepcopy(eager).double(), x.double() if x.is_floating_point() else x, nullcontext())
    expected = step(eager, x, torch.autocast("cpu", dtype=dtype))
    as_good_as_eager(step(compiled, x, torch.autocast("cpu", dtype=dtype)), expected, exact)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_modules_in_half_precision(name: str, dtype: torch.dtype) -> None:
    make, inputs = CASES[name]
    model, x = make(), inputs()
    exact = step(copy.deepcopy(model).double(), x.double() if x.is_floating_point() else x, nullcontext())
    eager, compiled = twins(model.to(dtype))
    x = x.to(dtype) if x.is_floating_point() else x
    as_good_as_eager(step(compiled, x, nullcontext()), step(eager, x, nullcontext()), exact)


def test_autocast_inside_a_compiled_module() -> None:
    class Inside(Perceptron):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                hidden = self.first(x)
            return hidden.float() @ self.last.weight.T

    eager, compiled = twins(Inside())
    x = torch.randn(6, 8)
    (ours, expected) = (model(x) for model in (compiled, eager))
    ours.sum().backward()
    expected.sum().backward()
    same(ours, expected, 2e-2)
    same(compiled.first.weight.grad, eager.get_parameter("first.weight").grad, 2e-2)


def test_entering_and_leaving_autocast_compiles_for_each() -> None:
    _, compiled = twins(nn.Linear(8, 4))
    x = torch.randn(3, 8)
    dtypes = [compiled(x).dtype]
    for dtype in HALVES:
        with torch.autocast("cpu", dtype=dtype):
            dtypes.append(compiled(x).dtype)
    dtypes.append(compiled(x).dtype)
    assert dtypes == [torch.float32, torch.bfloat16, torch.float16, torch.float32]


def test_second_derivatives_under_autocast_are_those_of_eager() -> None:
    def penalty(model: Any) -> torch.Tensor:
        x = torch.linspace(-1, 1, 48).view(6, 8).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(x)
        (grad,) = torch.autograd.grad(y.float().square().sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), x)[0]

    eager, compiled = twins(Perceptron(), options={"fallback": "quiet"})
    same(penalty(compiled), penalty(eager), 1e-3)


def scaled_steps(model: Any, batches: list[torch.Tensor]) -> list[Any]:
    """Steps as with float16, whose small gradients would vanish unscaled; what was scaled, clipped and skipped."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
    seen: list[Any] = []
    for x in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        seen.append((torch.tensor(scaler.get_scale()), *(p.detach().clone() for p in model.parameters())))
    return seen


def test_scaled_gradients_skip_the_step_that_overflows() -> None:
    eager, compiled = twins(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)))
    batches = [torch.randn(5, 8), torch.full((5, 8), torch.inf), torch.randn(5, 8), torch.randn(5, 8)]
    ours, expected = scaled_steps(compiled, batches), scaled_steps(eager, batches)
    same(ours, expected, 2e-3)
    assert [float(scale) for scale, *_ in ours] == [2.0**12, 2.0**11, 2.0**11, 2.0**12]
    same(ours[1][1:], ours[0][1:], 0.0)


def test_the_user_learns_once_that_half_precision_is_computed_in_full(caplog: pytest.LogCaptureFixture) -> None:
    legalize._warn_once.cache_clear()
    _, compiled = twins(Perceptron().bfloat16())
    with caplog.at_level(logging.WARNING, "sardonyx"):
        step(compiled, torch.randn(6, 8, dtype=torch.bfloat16), nullcontext())
        step(compiled, torch.randn(3, 8, dtype=torch.bfloat16), nullcontext())
    assert [r.message for r in caplog.records if "bfloat16" in r.message] == [
        "the engine lacks bfloat16 kernels and computes in float32 with casts; results remain bfloat16"
    ]
