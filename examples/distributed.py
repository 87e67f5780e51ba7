"""Training on several processes: DistributedDataParallel or FSDP, compiled, with the gradients of one process.

    torchrun --standalone --nproc-per-node 2 examples/distributed.py --ddp

Every process compiles the same model and sees its share of each batch. The gradients of the first step are compared
with those that eager computes from the whole batch in one process; if they differ, the exit code is 1.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from sardonyx.telemetry.report import collecting

Strategy: TypeAlias = Callable[["Model"], nn.Module]

_VOCABULARY, _WIDTH, _DEPTH, _LENGTH, _BATCH = 32, 128, 4, 16, 8
_TOLERANCE = 1e-5


class Block(nn.Module):
    """Two layers around a Gelu, after a norm, added to what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, 4 * _WIDTH)
        self.down = nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum."""
        change: torch.Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + change


class Model(nn.Module):
    """Guesses what follows each number of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.last = nn.Embedding(_VOCABULARY, _WIDTH), nn.Linear(_WIDTH, _VOCABULARY)
        self.blocks = nn.ModuleList(Block() for _ in range(_DEPTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits, a row for each number."""
        x = self.embedding(x.flatten())
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.last(x)
        return logits


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole batch of a step, the same in every process: sequences that count, and what follows each number."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(_VOCABULARY, (_BATCH, 1), generator=generator)
    numbers = (start + torch.arange(_LENGTH + 1)) % _VOCABULARY
    return numbers[:, :-1], numbers[:, 1:]


def loss_of(model: Callable[..., torch.Tensor], x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross-entropy, its mean over all numbers."""
    return F.cross_entropy(model(x), target.flatten())


def replicated(model: Model) -> nn.Module:
    """All of the model in each process. Gradients travel in buckets of 1 MB, at whose edges dynamo cuts the graph."""
    return DistributedDataParallel(model, bucket_cap_mb=1)


def sharded(model: Model) -> nn.Module:
    """A share of each block in each process; the whole is gathered when it is needed."""
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def wrapped(model: Model) -> nn.Module:
    """The same by the older wrapper."""
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


STRATEGIES: Mapping[str, Strategy] = {"ddp": replicated, "fsdp": sharded, "fsdp1": wrapped}


def gradients(model: Model, parallel: nn.Module) -> list[torch.Tensor]:
    """The gradient of each parameter, whole, whichever process has it."""
    if isinstance(parallel, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(parallel, with_grads=True):
            return [_whole(parameter).clone() for parameter in model.parameters()]
    return [_whole(parameter) for parameter in model.parameters()]


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    grad = parameter.grad
    assert grad is not None
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def largest_difference(found: list[torch.Tensor], model: Model) -> float:
    """From the gradients of one process that sees the whole batch."""
    loss_of(model, *batch(0)).backward()  # type: ignore[no-untyped-call]  # torch does not say
    return max(float((a - _whole(b)).abs().max()) for a, b in zip(found, model.parameters(), strict=True))


def train(strategy: Strategy, backend: str, steps: int) -> float:
    """Train; how far the gradients of the first step are from those of one process."""
    torch.manual_seed(0)
    model = Model()
    alone = copy.deepcopy(model)
    parallel = strategy(model)
    run: Any = parallel if backend == "eager" else torch.compile(parallel, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    difference = 0.0
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(run, *(whole.chunk(dist.get_world_size())[dist.get_rank()] for whole in batch(step)))
        loss.backward()  # type: ignore[no-untyped-call]  # as above
        if step == 0:
            difference = largest_difference(gradients(model, parallel), alone)
        optimizer.step()
        _show_loss(step, loss.detach())
    return difference


def _show_loss(step: int, loss: torch.Tensor) -> None:
    dist.all_reduce(loss)
    say(f"step {step}: loss {loss.item() / dist.get_world_size():.4f}")


def say(text: str) -> None:
    """Print, in the first process only."""
    if dist.get_rank() == 0:
        print(text, flush=True)


@contextmanager
def processes() -> Iterator[None]:
    """The group of all that torchrun started."""
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def main() -> int:
    """Train as the command line says; 1 if gradients differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ddp", action="store_true", help="DistributedDataParallel, which is the default")
    parser.add_argument("--fsdp", action="store_true", help="FSDP by fully_shard")
    parser.add_argument("--fsdp1", action="store_true", help="FSDP by its older wrapper")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--backend", choices=("sardonyx", "eager"), default="sardonyx")
    args = parser.parse_args()
    chosen = [name for name in STRATEGIES if getattr(args, name)] or ["ddp"]
    with processes():
        equal = [compare(name, args.backend, args.steps) for name in chosen]
    return 0 if all(equal) else 1


def compare(name: str, backend: str, steps: int) -> bool:
    """Train by one strategy, and say whether its gradients are those of one process."""
    torch._dynamo.reset()
    with collecting() as report:
        difference = train(STRATEGIES[name], backend, steps)
    equal = difference <= _TOLERANCE
    say(
        f"{dist.get_world_size()} processes, {name}, {backend}: {len(report.graphs)} graphs, "
        f"{report.nodes} ONNX nodes, {len(report.fallbacks)} operators in torch"
    )
    say(f"gradients {'as' if equal else 'NOT as'} in one process; largest difference {difference:.1e}")
    return equal


if __name__ == "__main__":
    sys.exit(main())
