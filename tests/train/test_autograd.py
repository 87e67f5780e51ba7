"""What autograd promises holds for a compiled module: gradients, kept graphs, hooks, derivatives of derivatives."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from sardonyx.errors import AutogradError
from sardonyx.run import autograd

from .small import Model, Net, Takes, seen, squares
from .twins import both, same, twins

pytestmark = pytest.mark.usefixtures("gradients")


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


def test_an_input_that_only_the_forward_reads_may_be_edited() -> None:
    def function(x: torch.Tensor, classes: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        classes.select(0, 0).fill_(0)
        nn.functional.one_hot(classes.remainder(3).long(), 3)  # it checks the classes, so it is not dropped
        return (x @ w).exp()

    def use(model: Model) -> Any:
        classes = torch.arange(20).view(4, 5)
        squares(lambda x: model(x, classes), torch.randn(3, 4))
        return classes

    both(Takes(function, torch.randn(4, 2)), use)


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
