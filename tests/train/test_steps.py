"""Steps of training: checkpoints, weights that change, optimizers, random numbers, sizes, threads, memory."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import sardonyx
from sardonyx.telemetry.report import collecting

from .small import Model, Net, seen, squares
from .twins import both, same, same_state, twins

pytestmark = pytest.mark.usefixtures("gradients")


# Activation checkpointing


class Checkpointed(nn.Module):
    """A module whose inner part keeps no activations, or those that a policy chooses."""

    def __init__(self, inner: nn.Module, **how: Any) -> None:
        super().__init__()
        self.inner, self.how = inner, how

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.inner, x.sin(), use_reentrant=False, **self.how)


def test_a_checkpointed_part_of_a_compiled_module() -> None:
    both(Checkpointed(Net()), seen(torch.randn(5, 4)))


def keep_products(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keep = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def test_a_checkpoint_with_a_policy() -> None:
    contexts = partial(create_selective_checkpoint_contexts, keep_products)
    both(Checkpointed(Net(), context_fn=contexts), seen(torch.randn(5, 4)))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_compiled_module_inside_a_checkpoint(reentrant: bool) -> None:
    x = torch.randn(5, 4, requires_grad=True)
    both(Net(), lambda model: squares(lambda x: checkpoint(model, x, use_reentrant=reentrant), x))


def test_a_checkpointed_dropout_has_one_mask() -> None:
    _, compiled = twins(Checkpointed(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))))
    x = torch.randn(6, 4)
    y = compiled(x)
    y.sum().backward()
    kept = (y != 0).float() * 2
    same(compiled.inner[0].weight.grad, kept.T @ x.sin())


# Buffers, modes, weights that change


def test_batch_statistics_are_updated_as_eager_does() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    both(model, lambda model: [squares(model, x) for x in torch.randn(3, 5, 4)])


def test_switching_between_training_and_evaluation() -> None:
    def use(model: Any) -> Any:
        results = []
        for x in torch.randn(3, 5, 4):
            results.append(squares(model.train(), x))
            results.append(squares(model.eval(), x))
            with torch.no_grad():
                results.append(model(x))
        return results

    both(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.0)), use)


def test_changed_weights_are_seen() -> None:
    state = Net().state_dict()

    def use(model: Any) -> Any:
        x = torch.randn(5, 4)
        results = [squares(model, x)]
        model.first.weight.data.copy_(torch.randn(8, 4))
        results.append(squares(model, x))
        model.first.weight.data = torch.randn(8, 4)
        results.append(squares(model, x))
        getattr(model, "_orig_mod", model).load_state_dict(state)
        results.append(squares(model, x))
        with torch.no_grad():
            model.first.weight.add_(1)
        results.append(squares(model, x))
        model.first.weight = nn.Parameter(torch.randn(8, 4))
        results.append(squares(model, x))
        with torch.no_grad():
            results.append(model(x))
        return results

    both(Net(), use)


# Optimizers


@pytest.mark.parametrize(
    "make",
    [
        partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        partial(torch.optim.SGD, lr=0.1, fused=True),
        partial(torch.optim.SGD, lr=0.1, foreach=True),
        partial(torch.optim.Adam, lr=0.01),
        partial(torch.optim.Adam, lr=0.01, fused=True),
        partial(torch.optim.AdamW, lr=0.01, foreach=True),
        partial(torch.optim.AdamW, lr=0.01, fused=True),
    ],
    ids=lambda make: "-".join([make.func.__name__, *(k for k, v in make.keywords.items() if v is True)]),
)
def test_optimizers_take_the_same_steps(make: Callable[..., torch.optim.Optimizer]) -> None:
    both(Net(), lambda model: steps(model, make(model.parameters())))


def steps(model: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    losses = []
    for x in torch.randn(4, 5, 4):
        optimizer.zero_grad()
        losses.append(squares(model, x))
        optimizer.step()
    return losses


def test_an_optimizers_step_compiled_too() -> None:
    def use(model: Any) -> Any:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        compiled = isinstance(model, torch._dynamo.OptimizedModule)
        step = (
            torch.compile(optimizer.step, backend="sardonyx", options={"fallback": "error"})
            if compiled
            else optimizer.step
        )
        for x in torch.randn(3, 5, 4):
            optimizer.zero_grad()
            squares(model, x)
            step()

    both(Net(), use)


# Random numbers


def test_dropout_is_reproducible_and_never_the_same_twice() -> None:
    _, compiled = twins(nn.Dropout(0.5))
    x = torch.ones(64, requires_grad=True)
    torch.manual_seed(3)
    first, second = compiled(x), compiled(x)
    torch.manual_seed(3)
    again = compiled(x)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_dropout_has_the_same_mask_forward_and_backward() -> None:
    _, compiled = twins(nn.Dropout(0.25))
    x = torch.ones(1000, requires_grad=True)
    y = compiled(x)
    y.sum().backward()
    same(x.grad, y)
    assert 0.65 < (y > 0).float().mean() < 0.85


def test_a_whole_step_compiled_with_its_backward_and_optimizer() -> None:
    def use(model: Any) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = squares(model, x)
            optimizer.step()
            return loss

        compiled = isinstance(model, torch._dynamo.OptimizedModule)
        run = torch.compile(step, backend="sardonyx", options={"fallback": "error"}) if compiled else step
        return [run(x).detach() for x in torch.randn(3, 5, 4)]

    both(Net(), use)


# Shapes


def test_batches_of_three_sizes_in_one_compilation() -> None:
    with collecting() as report:
        both(Net(), lambda model: [squares(model, torch.randn(n, 4)) for n in (5, 3, 8)], dynamic=True)
    assert [graph.kind for graph in report.graphs] == ["forward", "backward"]


def test_batches_of_any_size_without_saying_so() -> None:
    both(Net(), lambda model: [squares(model, torch.randn(n, 4)) for n in (5, 3, 8, 1)])


@pytest.mark.parametrize("dynamic", [False, True])
def test_an_empty_batch(dynamic: bool) -> None:
    both(Net(), lambda model: [squares(model, torch.randn(n, 4)) for n in (5, 0, 2)], dynamic=dynamic)


def test_a_wrong_shape_raises_and_leaves_the_module_usable() -> None:
    eager, compiled = twins(Net())
    x = torch.randn(5, 4)
    squares(compiled, x)
    with pytest.raises(Exception, match=r"shape|size"):
        compiled(torch.randn(5, 7))
    squares(compiled, x)
    squares(eager, x), squares(eager, x)
    same_state(compiled, eager)


# Threads, growth


def test_two_threads_train_two_modules() -> None:
    models = [twins(Net()) for _ in range(2)]
    batches = torch.randn(2, 6, 5, 4)

    def train(model: Model, batch: torch.Tensor) -> None:
        with torch.enable_grad():
            for x in batch:
                squares(model, x)

    threads = [
        threading.Thread(target=train, args=(compiled, batch))
        for (_, compiled), batch in zip(models, batches, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for (eager, compiled), batch in zip(models, batches, strict=True):
        train(eager, batch)
        same_state(compiled, eager)


def test_two_hundred_steps_build_nothing_new_and_keep_nothing() -> None:
    _, model = twins(Net())
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(16, 4)

    def train(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            squares(model, x)
            optimizer.step()

    with collecting() as report:
        train(5)
        before = tensors()
        train(200)
        after = tensors()
    assert [region.sessions for graph in report.graphs for region in graph.regions] == [1, 1]
    assert after <= before


def tensors() -> int:
    gc.collect()
    return sum(isinstance(x, torch.Tensor) for x in gc.get_objects())


def test_arguments_are_freed_after_backward_though_the_loss_is_kept() -> None:
    _, compiled = twins(Net())
    x = torch.randn(5, 4, requires_grad=True).sin()
    loss = squares(compiled, x)
    alive = weakref.ref(x)
    del x
    assert alive() is None
    assert loss.grad_fn is not None


def test_verify_compares_backward_graphs_too() -> None:
    both(Net(), seen(torch.randn(5, 4)), options={"verify": True})


def test_explaining_a_model_in_training_mode_does_not_train_it() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    before = [x.clone() for x in model.state_dict().values()]
    assert not sardonyx.explain(model, torch.randn(5, 4)).fallbacks
    same(list(model.state_dict().values()), before, 0.0)


def test_losses_of_classes_and_of_reals() -> None:
    target = torch.tensor([0, 2, 1, -100, 2])

    def use(model: Model) -> Any:
        F.cross_entropy(model(torch.randn(5, 4)), target).backward()
        F.mse_loss(model(torch.randn(5, 4)), torch.zeros(5, 4)).backward()

    both(Net(), use)
