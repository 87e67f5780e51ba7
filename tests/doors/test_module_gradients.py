"""A compiled module is trained as the module it was."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import nn

import sardonyx

from .scaled import same, scaled

pytestmark = pytest.mark.usefixtures("nothing_on_disk")


# Gradients


def gradients(module: Any, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    with torch.enable_grad():
        loss = module(x).pow(2).sum()
        return list(torch.autograd.grad(loss, [x, *module.parameters()]))


@pytest.mark.parametrize("training", [False, True])
def test_gradients_are_torchs_in_both_modes(training: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)).train(training)
    compiled, x = sardonyx.compile(copy.deepcopy(model)), torch.randn(6, 4)
    for mine, theirs in zip(gradients(compiled, x), gradients(model, x), strict=True):
        same(mine, theirs)
    same(compiled.get_submodule("1").running_mean, model[1].running_mean)


@pytest.mark.skipif("isolate_recompiles" not in inspect.signature(torch.compile).parameters, reason="an older torch")
def test_modules_in_training_do_not_use_up_each_others_recompilations() -> None:
    for width in range(2, 2 + 2 * torch._dynamo.config.recompile_limit):
        compiled = sardonyx.compile(nn.Sequential(nn.Linear(width, 2), nn.Tanh()).train())
        with torch.enable_grad():
            compiled(torch.ones(3, width))
        assert compiled.report.graphs, width
        assert not compiled.builds


@pytest.mark.parametrize("why", ["no_grad", "nothing requires a gradient"])
def test_training_mode_with_nothing_to_train_has_a_session(why: str) -> None:
    model, x = nn.Sequential(nn.Linear(4, 2), nn.Tanh()).train(), torch.randn(3, 4)
    model.requires_grad_(why == "no_grad")
    compiled = sardonyx.compile(model, cache_dir="", fallback="error")
    with torch.set_grad_enabled(why != "no_grad"):
        same(compiled(x), model(x))
    assert compiled.cache_info().built == 1
    with torch.enable_grad():
        assert compiled(x.requires_grad_()).grad_fn is not None
    assert compiled.cache_info().built == 1


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.BatchNorm1d(4)], ids=["dropout", "batch norm"])
def test_training_mode_that_is_at_work_is_told_once(layer: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), layer).train(), torch.randn(6, 4)
    compiled = sardonyx.compile(copy.deepcopy(model), cache_dir="")
    with caplog.at_level("WARNING", "sardonyx"):
        results = [compiled(x) for _ in range(2)]
    assert caplog.text.count("in training mode: call eval() for inference") == 1
    assert len(compiled.report.fallbacks) == 1
    if isinstance(layer, nn.Dropout):
        assert not torch.equal(*results)
        assert 0 < (results[0] == 0).sum() < results[0].numel()
    else:
        same(results[0], model(x))
        model(x)
        same(compiled.get_submodule("1").running_mean, model[1].running_mean)


def test_second_derivatives_and_hooks_of_parameters_are_eagers() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).eval()
    compiled, x = sardonyx.compile(model), torch.randn(2, 3, requires_grad=True)
    seen: list[torch.Tensor] = []
    model[0].weight.register_hook(lambda grad: seen.append(grad) or grad * 2)
    found = []
    for module in (compiled, model):
        with torch.enable_grad():
            (first,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
            found.append(torch.autograd.grad(first.sum(), [x, model[0].weight]))
    for mine, theirs in zip(*found, strict=True):
        same(mine, theirs)
    assert len(seen) == 2


def test_gradients_of_a_module_that_was_changed_since_are_refused() -> None:
    compiled = sardonyx.compile(scaled())
    with torch.enable_grad():
        result = compiled(torch.ones(2, 4, requires_grad=True)).sum()
    compiled.scale = 9
    with pytest.raises(sardonyx.AutogradError, match="changed since"):
        result.backward()


def test_gradients_are_refused_if_an_argument_without_one_was_edited_since() -> None:
    compiled, x = sardonyx.compile(nn.Linear(4, 2).eval()), torch.ones(3, 4)
    with torch.enable_grad():
        result = compiled(x).sum()
    x.zero_()
    with pytest.raises(sardonyx.AutogradError, match="an argument was edited in place since"):
        result.backward()


def test_without_gradients_nothing_is_attached() -> None:
    compiled = sardonyx.compile(nn.Linear(4, 4).requires_grad_(False).eval())
    with torch.enable_grad():
        assert not compiled(torch.ones(2, 4)).requires_grad
        assert sardonyx.compile(nn.Linear(4, 4).eval())(torch.ones(2, 4)).requires_grad
    with torch.inference_mode():
        assert not compiled(torch.ones(3, 4)).requires_grad


def test_it_can_be_compiled_into_something_larger() -> None:
    model = scaled()
    outer = torch.compile(nn.Sequential(sardonyx.compile(model), nn.ReLU()), backend="eager", fullgraph=True)
    same(outer(torch.ones(2, 4)), model(torch.ones(2, 4)).relu())


@pytest.mark.parametrize("wrong", [{"dynamic": "often"}, {"cache_sice": 2}, {"engine": "none such"}])
def test_wrong_options_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(sardonyx.OptionError):
        sardonyx.compile(nn.ReLU().eval(), **wrong)(torch.ones(2))


def test_only_modules_are_taken() -> None:
    with pytest.raises(TypeError, match="takes a module"):
        sardonyx.compile(torch.sin)  # type: ignore[arg-type]  # on purpose
    with pytest.raises(sardonyx.CaptureError, match=r"torch\.func"):
        torch.vmap(sardonyx.compile(nn.ReLU().eval()))(torch.ones(2, 2))


def test_intercept_shows_each_call_once() -> None:
    seen: list[Any] = []
    model = sardonyx.compile(nn.Linear(4, 2).eval(), cache_dir="", intercept=seen.append)
    model(torch.ones(3, 4))
    model(torch.ones(3, 4))
    model.train()
    model(torch.ones(3, 4))
    assert [call.number for call in seen] == [0, 1, 2]
    assert all(torch.equal(call.arguments["input"], torch.ones(3, 4)) for call in seen)


def test_a_call_that_is_simply_wrong_is_the_callers_error(caplog: pytest.LogCaptureFixture) -> None:
    model = sardonyx.compile(nn.Linear(4, 2).eval())
    with pytest.raises(TypeError, match="missing a required argument: 'input'"):
        model()
    with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
        model(torch.ones(3, 4), other=1)
    assert not caplog.messages
    assert not model.report.fallbacks
