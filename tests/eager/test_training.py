"""Models train on the device as on the CPU, with nothing left to it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from sardonyx import eager


class Encoder(nn.Module):
    """Two layers of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.embedding, self.layers, self.head = (
            nn.Embedding(30, 16),
            nn.TransformerEncoder(layer, 2),
            nn.Linear(16, 30),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.layers(self.embedding(x)))
        return logits.flatten(0, 1)


class Recurrent(nn.Module):
    """An LSTM and a GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru, self.head = nn.LSTM(5, 6), nn.GRU(6, 7), nn.Linear(7, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.gru(self.lstm(x)[0])[0][-1])
        return logits


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 10))


def convolutions() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)),
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor], tuple[int, int]]] = {
    "perceptron": (perceptron, lambda: torch.randn(8, 20), (10, 8)),
    "convolutions": (convolutions, lambda: torch.randn(4, 1, 12, 12), (10, 4)),
    "encoder": (Encoder, lambda: torch.randint(0, 30, (2, 6)), (30, 12)),
    "recurrent": (Recurrent, lambda: torch.randn(3, 4, 5), (10, 4)),
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_losses_follow_the_cpus(model: str, optimizer: str) -> None:
    make, inputs, (classes, count) = MODELS[model]
    original, x, wanted = make(), inputs(), torch.randint(0, classes, (count,))
    before = eager.stats().fallbacks
    losses = {device: trained(copy.deepcopy(original), x, wanted, optimizer, device) for device in ("cpu", "ort")}
    torch.testing.assert_close(losses["ort"], losses["cpu"], atol=1e-4, rtol=0)
    assert losses["ort"][-1] < losses["ort"][0]
    assert eager.stats().fallbacks == before


def trained(model: nn.Module, x: torch.Tensor, wanted: torch.Tensor, optimizer: str, device: str) -> Any:
    model, x, wanted = model.to(device), x.to(device), wanted.to(device)
    steps, losses = OPTIMIZERS[optimizer](model.parameters()), []
    with torch.enable_grad():
        for _ in range(8):
            steps.zero_grad()
            loss = nn.functional.cross_entropy(model(x), wanted)
            loss.backward()
            steps.step()
            losses.append(loss.item())
    return torch.tensor(losses)


EVERY = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and name not in ("Optimizer", "SparseAdam")
)


@pytest.mark.parametrize("name", EVERY)
def test_every_optimizer_steps_as_on_the_cpu(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3, bias=name != "Muon")  # which is for matrices alone
    moved, x = copy.deepcopy(model).to("ort"), torch.randn(5, 4)
    with torch.enable_grad():
        for some, given in ((model, x), (moved, x.to("ort"))):
            optimizer = getattr(torch.optim, name)(some.parameters(), lr=0.01)

            def closure(some: nn.Module = some, given: torch.Tensor = given, optimizer: Any = optimizer) -> Any:
                optimizer.zero_grad()
                loss = some(given).square().mean()
                loss.backward()
                return loss

            for _ in range(4):
                optimizer.step(closure)
    torch.testing.assert_close(moved.weight.cpu(), model.weight, rtol=1e-4, atol=1e-5)
