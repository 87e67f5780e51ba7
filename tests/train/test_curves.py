"""Two hundred steps: the loss of a compiled model follows eager's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sardonyx.telemetry.report import collecting

from .twins import same, twins

STEPS = 200
TOLERANCE = 1e-3


@pytest.fixture(autouse=True)
def gradients() -> Iterator[None]:
    with torch.enable_grad():
        yield


class Transformer(nn.Module):
    """A causal language model of one layer over a vocabulary of 16."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(16, 24), nn.Parameter(0.1 * torch.randn(12, 24))
        self.layer = nn.TransformerEncoderLayer(24, 2, 48, dropout=0.0, batch_first=True, norm_first=True)
        self.last = nn.Linear(24, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        result: torch.Tensor = self.last(self.layer(self.embedding(x) + self.places, mask, is_causal=True))
        return result


def counting(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences that count in steps of their own, and their continuation."""
    start, stride = (torch.randint(1, 16, (8, 1), generator=generator) for _ in range(2))
    numbers = (start + stride * torch.arange(13)) % 16
    return numbers[:, :-1], numbers[:, 1:]


class Convolutional(nn.Module):
    """Two convolutions, each with a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        )  # fmt: skip
        self.last = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.features(x).mean((2, 3)))
        return result


def stripes(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy pictures of stripes, and how wide those are."""
    width = torch.randint(4, (8,), generator=generator)
    lines = torch.sin(torch.arange(12) * 2 / (1 + width[:, None]))
    return lines[:, None, :, None] + 0.3 * torch.randn(8, 1, 12, 12, generator=generator), width


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], tuple[torch.Tensor, torch.Tensor]]]] = {
    "transformer": (Transformer, counting),
    "convolutional": (Convolutional, stripes),
}
OPTIMIZERS = {
    ("transformer", "SGD"): partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    ("transformer", "AdamW"): partial(torch.optim.AdamW, lr=3e-3),
    ("convolutional", "SGD"): partial(torch.optim.SGD, lr=0.02, momentum=0.9),  # beyond, rounding decides the loss
    ("convolutional", "AdamW"): partial(torch.optim.AdamW, lr=3e-3),
}


def curve(model: Any, optimizer: torch.optim.Optimizer, batches: Callable[..., Any]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(STEPS):
        x, target = batches(generator)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, -2), target.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


@pytest.mark.parametrize(("name", "optimizer"), OPTIMIZERS)
def test_the_loss_follows_eagers_at_every_step(name: str, optimizer: str) -> None:
    make, batches = MODELS[name]
    eager, compiled = twins(make())
    with collecting() as report:
        ours = curve(compiled, OPTIMIZERS[name, optimizer](compiled.parameters()), batches)
    expected = curve(eager, OPTIMIZERS[name, optimizer](eager.parameters()), batches)
    assert [(graph.kind, len(graph.regions)) for graph in report.graphs] == [("forward", 1), ("backward", 1)]
    assert ours[-10:].mean() < 0.7 * ours[:10].mean()
    torch.testing.assert_close(ours, expected, rtol=0, atol=TOLERANCE)
    same(list(compiled.buffers()), list(eager.buffers()), 10 * TOLERANCE)
