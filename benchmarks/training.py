"""How fast each engine takes a training step: `python -m benchmarks.training`.

A step is forward, loss, backward and an optimizer (SGD) that changes every weight. With `--memory N` the processes take
N steps of each model instead, and tell how much memory they hold after a tenth of them and at the end.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.internals import collecting, difference
from benchmarks.machine import describe, resident_megabytes
from benchmarks.models import make, mlp, transformers
from benchmarks.tables import Table, progress
from benchmarks.turns import Prepared, Suite, parsed, parser, take_turns

Task: TypeAlias = tuple[nn.Module, tuple[torch.Tensor, ...]]
"""A module in training mode that gives a loss, and a batch for it."""

ENGINES: Mapping[str, Mapping[str, Any] | None] = {
    "eager": None,
    "inductor": {},
    "sardonyx": {"backend": "sardonyx", "options": {"fallback": "error"}},
}
"""How `torch.compile` is called for each engine; eager goes without."""


class WithLoss(nn.Module):
    """A model and the loss of what it returns."""

    def __init__(self, model: nn.Module, loss: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        """The loss of a batch."""
        return self.loss(self.model, *batch)


def perceptron() -> Task:
    """Three linear layers of 512 to 2,048, a batch of 32."""
    model, (x,) = mlp((512, 2048, 2048, 512), 32)
    return WithLoss(model, lambda model, x, y: F.mse_loss(model(x), y)).train(), (x, torch.randn(32, 512))


def seed_llama() -> Task:
    """A Llama of 16 features and one layer over 2 × 1,024 tokens, with attention written out: hardly any arithmetic."""
    hf = transformers()
    config = hf.LlamaConfig(
        hidden_size=16,
        num_hidden_layers=1,
        vocab_size=1024,
        intermediate_size=16,
        max_position_embeddings=1024,
        num_attention_heads=2,
        use_cache=False,
        attn_implementation="eager",
    )
    model = WithLoss(hf.LlamaModel(config), lambda model, *batch: model(*batch).last_hidden_state.pow(2).mean())
    return model.train(), (torch.randint(0, 1023, (2, 1024)), torch.tril(torch.ones(2, 1024)))


def llama() -> Task:
    """Four layers of 512 features over 2 × 128 tokens, with its loss over a vocabulary of 8,192."""
    hf = transformers()
    config = hf.LlamaConfig(
        hidden_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=1408,
        vocab_size=8192,
        use_cache=False,
    )
    model = WithLoss(hf.LlamaForCausalLM(config), lambda model, ids: model(ids, labels=ids).loss)
    return model.train(), (torch.randint(0, 8192, (2, 128)),)


def bert() -> Task:
    """A classifier of four layers of 256 features over 8 × 128 tokens, with its dropout."""
    hf = transformers()
    config = hf.BertConfig(
        hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024, vocab_size=8192
    )
    model = WithLoss(hf.BertForSequenceClassification(config), lambda model, ids, y: model(ids, labels=y).loss)
    return model.train(), (torch.randint(0, 8192, (8, 128)), torch.randint(0, 2, (8,)))


def _images(model: nn.Module, batch: int) -> Task:
    made = WithLoss(model, lambda model, x, y: F.cross_entropy(model(x), y))
    return made.train(), (torch.randn(batch, 3, 32, 32), torch.randint(0, 10, (batch,)))


def _normed(channels: int, out: int, kernel: int = 3, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(channels, out, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(out)]


def cnn() -> Task:
    """Convolutions of 32 to 128 channels with batch norm and max pooling, 16 images of 32 × 32."""
    widths = [(3, 32), (32, 32), None, (32, 64), (64, 64), None, (64, 128)]
    layers: list[nn.Module] = []
    for width in widths:
        layers += [nn.MaxPool2d(2)] if width is None else [*_normed(*width), nn.ReLU()]
    return _images(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)), 16)


class Residual(nn.Module):
    """Two convolutions with batch norm, added to what they were given."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.way = nn.Sequential(*_normed(channels, out, stride=stride), nn.ReLU(), *_normed(out, out))
        self.short = nn.Identity() if channels == out else nn.Sequential(*_normed(channels, out, 1, stride))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Both ways, added."""
        return torch.relu(self.way(x) + self.short(x))


def resnet18() -> Task:
    """ResNet-18 for small images: 64 to 512 channels, 8 images of 32 × 32."""
    widths = [(64, 64), (64, 64), (64, 128), (128, 128), (128, 256), (256, 256), (256, 512), (512, 512)]
    blocks = [Residual(before, after, 1 if before == after else 2) for before, after in widths]
    ends = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))
    return _images(nn.Sequential(*_normed(3, 64), nn.ReLU(), *blocks, *ends), 8)


MODELS: Mapping[str, Callable[[], Task]] = {
    "mlp": perceptron,
    "seed-llama": seed_llama,
    "llama": llama,
    "bert": bert,
    "cnn": cnn,
    "resnet18": resnet18,
}
"""Every task by name, in the order they are measured."""


SUITE = Suite("training", __doc__, tuple(MODELS), tuple(ENGINES), ours=("sardonyx",))


def prepare(model: str, engine: str) -> Prepared:
    """The step, taken once; its gradients are compared with eager's."""
    module, batch = make(MODELS[model])
    untrained = copy.deepcopy(module)
    started = time.perf_counter()
    with collecting() as report:
        step = _step(module, batch, engine)
        step()
    first = time.perf_counter() - started
    error = _gradient_error(untrained, batch, engine)
    return Prepared(step, first, error, len(report.graphs) if engine == "sardonyx" else None)


def _compiled(module: nn.Module, engine: str) -> Any:
    how = ENGINES[engine]
    return module if how is None else torch.compile(module, **how)


def _step(module: nn.Module, batch: tuple[torch.Tensor, ...], engine: str) -> Callable[[], torch.Tensor]:
    compiled = _compiled(module, engine)
    optimizer = torch.optim.SGD(module.parameters(), 1e-3)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = compiled(*batch)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        optimizer.step()
        return loss

    return step


def _gradient_error(module: nn.Module, batch: tuple[torch.Tensor, ...], engine: str) -> float:
    """The largest difference of a gradient from eager's; with dropout in evaluation mode, where it draws nothing."""
    if any(isinstance(part, nn.Dropout) and part.p for part in module.modules()):
        module.eval()
    expected, got = (_gradients(run, module, batch) for run in (module, _compiled(module, engine)))
    return difference(got, expected)


def _gradients(run: Any, module: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    found = torch.autograd.grad(run(*batch), list(module.parameters()), allow_unused=True)
    return torch.cat([gradient.flatten() for gradient in found if gradient is not None])


def held(model: str, engine: str, steps: int) -> tuple[float, float]:
    """Megabytes that a process holds after a tenth of the steps and after all."""
    step = _step(*make(MODELS[model]), engine)
    after = []
    for count in (steps // 10, steps - steps // 10):
        for _ in range(count):
            step()
        after.append(resident_megabytes())
    return after[0], after[1]


def _memory(models: Sequence[str], engines: Sequence[str], steps: int, path: Path | None) -> None:
    table = Table(
        f"MB after {steps // 10} and after {steps} steps", ["model", "engine", "early", "late"], text_columns=2
    )
    results = []
    with progress(len(models) * len(engines)) as shown:
        for model in models:
            for engine in engines:
                shown.step(f"{model}: {steps} steps with {engine}")
                with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                    early, late = pool.submit(held, model, engine, steps).result()
                table.add(model, engine, f"{early:.0f}", f"{late:.0f}")
                results.append({"model": model, "engine": engine, "steps": steps, "early_mb": early, "late_mb": late})
    table.show()
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**describe(), "results": results}, indent=1) + "\n")


def main() -> None:
    """Measure what the command line asks for."""
    options = parser(SUITE, list(ENGINES))
    options.add_argument("--memory", type=int, metavar="N", help="take N steps and tell the memory held instead")
    given = parsed(SUITE, options)
    if given.memory:
        _memory(given.models, given.engines, given.memory, given.json)
    else:
        take_turns(SUITE, given)


if __name__ == "__main__":
    main()
