"""What autograd promises holds for a compiled module: gradients, hooks, kept graphs, changed weights, and more."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import sardonyx
from sardonyx.errors import AutogradError
from sardonyx.run import autograd
from sardonyx.telemetry.report import collecting

from .twins import both, same, same_state, twins

Model = Callable[..., Any]


@pytest.fixture(autouse=True)
def gradients() -> Iterator[None]:
    with torch.enable_grad():
        yield


class Net(nn.Module):
    """Two layers."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, width), nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))  # type: ignore[no-any-return]  # as modules are typed


def squares(model: Model, x: torch.Tensor) -> torch.Tensor:
    """A loss, differentiated."""
    loss: torch.Tensor = model(x).pow(2).sum()
    loss.backward()
    return loss


class Takes(nn.Module):
    """A function as a module, with a weight that it is given."""

    def __init__(self, function: Callable[..., Any], *weights: torch.Tensor) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList(weights)

    def forward(self, *args: Any) -> Any:
        return self.function(*args, *self.weights)


# Which gradients there are


def test_inputs_get_gradients_only_where_they_need_them() -> None:
    def use(model: Model) -> Any:
        with_grad, without = torch.randn(5, 4, requires_grad=True), torch.randn(5, 4)
        squares(lambda x: model(x, without), with_grad)
        return with_grad.grad, without.grad

    both(Takes(lambda x, y, w: (x * y) @ w, torch.randn(4, 2)), use)


def test_an_unused_parameter_has_no_gradient() -> None:
    _, compiled = both(
        Takes(lambda x, used, unused: x @ used, torch.randn(4, 2), torch.randn(3)), seen(torch.ones(2, 4))
    )
    assert [p.grad is None for p in compiled.parameters()] == [False, True]


def seen(x: torch.Tensor) -> Callable[[Model], torch.Tensor]:
    return partial(squares, x=x)


def test_a_result_that_the_loss_ignores_gives_gradients_of_zero() -> None:
    """Eager gives None; AOTAutograd has one backward graph for all results of the forward graph."""
    _, compiled = twins(Takes(lambda x, a, b: (x @ a, x @ b), torch.randn(4, 2), torch.randn(4, 3)))
    compiled(torch.ones(2, 4))[0].sum().backward()
    same([p.grad for p in compiled.parameters()], [torch.full((4, 2), 2.0), torch.zeros(4, 3)])


def test_an_input_that_no_gradient_reaches_gets_none() -> None:
    def use(model: Model) -> Any:
        x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
        return torch.autograd.grad(model(x, y).sum(), (x, y), allow_unused=True)

    both(Takes(lambda x, y, w: x * w + y.detach(), torch.randn(3)), use)


def test_frozen_layers_stay_as_they_are() -> None:
    model = Net()
    model.first.requires_grad_(False)
    _, compiled = both(model, seen(torch.randn(5, 4)))
    assert compiled.first.weight.grad is None


def test_tied_weights_add_their_gradients_up() -> None:
    model = Net(width=4)
    model.last.weight = model.first.weight
    _, compiled = both(model, seen(torch.randn(5, 4)))
    assert compiled.last.weight is compiled.first.weight


def test_parts_without_gradients_and_detached_values_pass_none() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = (x @ w).exp()
        return (x @ w) * scale + (x @ w).detach().sin()

    both(Takes(function, torch.randn(4, 2)), seen(torch.randn(3, 4)))


class Tripled(torch.autograd.Function):
    """Squares, with a gradient that is half as large again as it should be."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x * grad


def test_a_custom_functions_own_gradient_is_used() -> None:
    both(Takes(lambda x, w: Tripled.apply(x @ w), torch.randn(4, 2)), seen(torch.randn(3, 4)))


# Several passes


def test_gradients_accumulate_over_calls() -> None:
    both(Net(), lambda model: [squares(model, x) for x in torch.randn(3, 5, 4)])


def test_two_forwards_before_one_backward() -> None:
    def use(model: Model) -> Any:
        (model(torch.ones(2, 4)) * model(torch.randn(2, 4))).sum().backward()

    both(Net(), use)


def test_several_backwards_through_one_kept_graph() -> None:
    def use(model: Model) -> Any:
        squares(model, torch.randn(5, 4))  # compiled for a graph that is freed, it must still allow one that is kept
        loss = model(torch.randn(5, 4)).pow(2).sum()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()

    both(Net(), use)


def test_a_freed_graph_says_so() -> None:
    _, compiled = twins(Net())
    loss = squares(compiled, torch.randn(5, 4))
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        loss.backward()


def test_a_weight_changed_between_forward_and_backward_is_noticed() -> None:
    _, compiled = twins(Net())
    loss = compiled(torch.randn(5, 4)).pow(2).sum()
    with torch.no_grad():
        compiled.last.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# Hooks


def test_hooks_of_tensors_see_and_replace_gradients() -> None:
    def use(model: Model) -> Any:
        x = torch.randn(5, 4, requires_grad=True)
        met: list[torch.Tensor] = []
        x.register_hook(lambda grad: met.append(grad))
        x.register_hook(lambda grad: 2 * grad)
        y = model(x)
        y.register_hook(lambda grad: grad + 1)
        y.sum().backward()
        return *met, x.grad

    both(Net(), use)


def test_full_backward_hooks_of_modules_run() -> None:
    def use(model: Any) -> Any:
        met: list[Any] = []
        module = getattr(model, "_orig_mod", model)  # dynamo does not look for hooks on its wrapper
        handle = module.register_full_backward_hook(lambda _, given, got: met.append((given, got)))
        squares(model, torch.randn(5, 4, requires_grad=True))
        handle.remove()
        return met

    both(Net(), use)


def test_full_backward_hooks_inside_a_compiled_module_run() -> None:
    def use(model: Any) -> Any:
        met: list[Any] = []
        handle = model.last.register_full_backward_hook(lambda _, given, got: met.append((given, got)))
        squares(model, torch.randn(5, 4))
        handle.remove()
        return met

    both(Net(), use)


def test_hooks_after_accumulation_run_once_for_each_parameter() -> None:
    def use(model: Any) -> Any:
        met: dict[str, list[torch.Tensor]] = {}
        for name, parameter in getattr(model, "_orig_mod", model).named_parameters():
            met[name] = []
            parameter.register_post_accumulate_grad_hook(lambda p, to=met[name]: to.append(p.grad.clone()))
        squares(model, torch.randn(5, 4))
        return met

    both(Net(), use)


# Derivatives of derivatives


def penalty(model: Model, x: torch.Tensor) -> torch.Tensor:
    """A loss of the gradient, as a gradient penalty has it, differentiated."""
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)
    loss = grad.pow(2).sum()
    loss.backward()
    return loss


def test_second_derivatives_run_in_torch_and_the_user_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    autograd._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "sardonyx"):
        both(Net(), lambda model: [penalty(model, x) for x in torch.randn(2, 5, 4)], options={"fallback": "warn"})
    assert sum("create_graph" in record.message for record in caplog.records) == 1


def test_third_derivatives_too() -> None:
    def use(model: Model) -> Any:
        x = torch.randn(3, requires_grad=True)
        y = model(x).sum()
        for _ in range(3):
            (y,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y

    both(Takes(lambda x, w: (x * w).sin(), torch.randn(3)), use, options={"fallback": "quiet"})


def test_second_derivatives_respect_detached_values_and_hooks() -> None:
    def use(model: Model) -> Any:
        x = torch.randn(3, requires_grad=True)
        x.register_hook(lambda grad: 3 * grad)
        y = x.sin()
        y.register_hook(lambda grad: 2 * grad)
        (grad,) = torch.autograd.grad(model(y).sum(), x, create_graph=True)
        return grad, *torch.autograd.grad(grad.sum(), x)

    both(Takes(lambda x, w: x.exp() * x.detach() * w, torch.randn(3)), use, options={"fallback": "quiet"})


def test_a_batch_of_gradients_at_once() -> None:
    def use(model: Model) -> Any:
        x = torch.linspace(-1, 1, 8).view(2, 4).requires_grad_()
        y = model(x)
        return torch.autograd.grad(y, x, torch.eye(8).view(8, 2, 4), is_grads_batched=True)

    both(Net(), use, options={"fallback": "quiet"})


def test_a_graph_asked_for_in_vain_harms_nobody() -> None:
    def use(model: Model) -> Any:
        x = torch.randn(5, 4, requires_grad=True)
        (grad,) = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)
        return grad.detach()

    both(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), use)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), "draws random numbers"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), "changed in place"),
        (lambda: Takes(lambda x, w: Tripled.apply(x @ w), torch.randn(4, 2)), "custom autograd function"),
    ],
)
def test_second_derivatives_that_cannot_be_right_are_an_error(model: Callable[[], nn.Module], reason: str) -> None:
    _, compiled = twins(model(), options={"fallback": "quiet"})
    with pytest.raises(AutogradError, match=reason):
        penalty(compiled, torch.randn(5, 4))


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
