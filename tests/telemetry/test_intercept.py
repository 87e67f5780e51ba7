"""sardonyx.intercept: what reaches forward is seen, and nothing else changes."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import sardonyx
from sardonyx import OptionError, SardonyxError
from sardonyx.diagnose import intercepting, restore
from sardonyx.telemetry.calls import Call
from sardonyx.telemetry.intercept import show_call
from sardonyx.telemetry.text import summarize_tensor

from .seen import Net, X, seen


class TestCalls:
    def test_arguments_have_the_names_of_the_signature(self) -> None:
        model = Net()
        calls = seen(model)
        model(X, 2.0, 5, 6, mask=X, extra="yes")
        (call,) = calls
        assert list(call.arguments) == ["x", "scale", "rest[0]", "rest[1]", "mask", "extra"]
        assert call.arguments["x"] is X
        assert (call.module, call.name, call.number) == (model, "", 0)
        assert call.args[1:] == (2.0, 5, 6)
        assert call.kwargs["extra"] == "yes"

    def test_the_result_is_the_models_own(self) -> None:
        model = Net()
        expected = model(X, 2.0)
        seen(model)
        torch.testing.assert_close(model(X, 2.0), expected, rtol=0, atol=0)

    def test_it_returns_the_model_itself(self) -> None:
        model = Net()
        assert sardonyx.intercept(model, print) is model

    def test_calls_of_forward_itself_are_seen_and_counted(self) -> None:
        model = Net()
        calls = seen(model)
        model.twice(X)
        assert [call.number for call in calls] == [0, 1]

    def test_without_a_hook_they_are_printed(self, capsys: pytest.CaptureFixture[str]) -> None:
        sardonyx.intercept(Net())(X, mask={"keep": X > 0})
        assert capsys.readouterr().out == (
            f"call 0 of Net\n  x: {summarize_tensor(X)}\n  mask: dict\n    ['keep']: bool[3, 4] cpu, 6 true\n"
        )

    def test_results_come_after_the_call(self) -> None:
        model = Net()
        calls = seen(model, results=True)
        result = model(X)
        assert [call.returned for call in calls] == [False, True]
        assert calls[1].result is result
        assert str(calls[1]).startswith("call 0 of Net returns\n  result: float32[3, 2] cpu")

    def test_what_a_hook_raises_is_raised_and_nothing_runs(self) -> None:
        def hook(call: Call) -> None:
            raise KeyError("mine")

        model = Net()
        inner = seen(model.first)
        sardonyx.intercept(model, hook)
        with pytest.raises(KeyError, match="mine"):
            model(X)
        assert not inner

    def test_what_a_hook_returns_is_ignored(self) -> None:
        model = Net()
        expected = model(X)
        sardonyx.intercept(model, lambda call: call.kwargs.clear() or ((X * 0,), {}))  # type: ignore[attr-defined]
        assert model(x=X).equal(expected)

    def test_a_wrong_call_is_seen_and_fails_as_ever(self) -> None:
        model = nn.Linear(4, 2)
        calls = seen(model)
        with pytest.raises(TypeError, match="positional argument"):
            model(X, X)
        assert list(calls[0].arguments) == ["args[0]", "args[1]"]

    def test_gradients_pass(self) -> None:
        model = Net()
        seen(model)
        with torch.enable_grad():
            x = X.clone().requires_grad_()
            model(x).sum().backward()
        assert x.grad is not None
        assert model.first.weight.grad is not None

    def test_chosen_modules_inside_are_seen_by_name(self) -> None:
        model = Net()
        calls = seen(model, submodules=["fir*", "last"])
        model(X)
        assert [(call.name, type(call.module)) for call in calls] == [
            ("", type(model)),
            ("first", type(model.first)),
            ("last", type(model.last)),
        ]
        assert str(calls[1]).startswith("call 0 of first (Linear)\n  input: float32[3, 4]")

    def test_a_name_that_no_module_has_is_an_error(self) -> None:
        model = Net()
        with pytest.raises(OptionError, match="it has first"):
            sardonyx.intercept(model, submodules="frist")
        assert type(model) is Net

    @pytest.mark.parametrize("wrong", [torch.sin, torch.jit.script(nn.ReLU())])
    def test_only_modules_of_python_are_taken(self, wrong: Any) -> None:
        with pytest.raises(TypeError, match="intercept takes a module"):
            sardonyx.intercept(wrong)

    def test_a_hook_that_cannot_be_called_is_an_error(self) -> None:
        with pytest.raises(OptionError, match="use a function"):
            sardonyx.intercept(Net(), "print")  # type: ignore[arg-type]

    def test_a_call_can_be_shown_without_intercepting(self) -> None:
        model, calls = Net(), []
        for _ in range(2):
            show_call(model, (X,), {"mask": 1}, calls.append)
        assert [(call.number, list(call.arguments)) for call in calls] == [(0, ["x", "mask"]), (1, ["x", "mask"])]
        assert type(model) is Net


class TestUndoing:
    def test_restore_leaves_no_trace(self) -> None:
        model = Net()
        before = dict(vars(model))
        calls = seen(model, submodules="*")
        model.restore()
        model(X)
        assert not calls
        assert (type(model), type(model.first), vars(model)) == (Net, nn.Linear, before)
        assert not hasattr(model, "restore")

    def test_restore_undoes_all_interceptions(self) -> None:
        model = Net()
        one, two = seen(model), seen(model, submodules="first")
        model(X)
        assert (len(one), len(two)) == (1, 2)
        model.restore()
        model(X)
        assert (len(one), len(two)) == (1, 2)
        assert type(model.first) is nn.Linear

    def test_one_of_several_ends_with_its_context(self) -> None:
        model, inner = Net(), []
        outer = seen(model)
        with intercepting(model, inner.append):
            model(X)
        model(X)
        assert (len(outer), len(inner)) == (2, 1)
        restore(model)
        assert type(model) is Net

    def test_contexts_may_end_in_any_order(self) -> None:
        model = Net()
        one, two = intercepting(model, print), intercepting(model, print)
        one.__enter__()
        two.__enter__()
        one.__exit__(None, None, None)
        two.__exit__(None, None, None)
        assert type(model) is Net

    def test_restoring_what_was_not_intercepted_does_nothing(self) -> None:
        model = Net()
        restore(model)
        assert type(model) is Net

    def test_a_forward_that_was_set_on_the_module_runs_and_comes_back(self) -> None:
        model = Net()

        def forward(x: torch.Tensor, factor: int) -> torch.Tensor:
            return x * factor

        model.forward = forward  # type: ignore[method-assign]
        calls = seen(model)
        assert model(X, 3).equal(X * 3)
        assert list(calls[0].arguments) == ["x", "factor"]
        assert list(inspect.signature(model.forward).parameters) == ["x", "factor"]
        assert copy.deepcopy(model)(X, 3).equal(X * 3)
        model.restore()
        assert model.forward is forward

    def test_a_forward_that_does_not_tell_its_arguments_is_seen(self) -> None:
        model = nn.Module()
        model.forward = torch.sin
        calls = seen(model)
        assert model(X).equal(X.sin())
        assert list(calls[0].arguments) == ["args[0]"]

    def test_a_restore_of_the_models_own_is_not_hidden(self, caplog: pytest.LogCaptureFixture) -> None:
        class Image(nn.Identity):
            def restore(self) -> str:
                return "a sharper image"

        model = Image()
        calls = seen(model)
        assert model.restore() == "a sharper image"
        assert "defines its own restore" in caplog.text
        restore(model)
        model(X)
        assert not calls

    def test_a_class_that_allows_no_subclass_is_refused_and_left_alone(self) -> None:
        class Final(nn.Identity):
            def __init_subclass__(cls) -> None:
                raise ValueError("no children")

        model = nn.Sequential(nn.ReLU(), Final())
        with pytest.raises(SardonyxError, match="Final cannot be intercepted: no children"):
            sardonyx.intercept(model, submodules="*")
        assert [type(module) for module in model.modules()] == [nn.Sequential, nn.ReLU, Final]

    def test_a_lazy_module_is_refused_until_it_has_its_class(self) -> None:
        model = nn.LazyLinear(2)
        with pytest.raises(SardonyxError, match="its first call will change its class"):
            sardonyx.intercept(model)
        model(X)
        calls = seen(model)
        model(X)
        assert len(calls) == 1

    def test_a_class_that_was_changed_since_is_not_undone_blindly(self) -> None:
        model = nn.Linear(2, 2)
        sardonyx.intercept(model)
        parametrize.register_parametrization(model, "weight", nn.Identity())
        with pytest.raises(SardonyxError, match="another class"):
            model.restore()
        parametrize.remove_parametrizations(model, "weight")
        model.restore()
        assert type(model) is nn.Linear


class TestModelsKeepWorking:
    def test_it_looks_the_same(self) -> None:
        model, other = Net(), Net()
        text, signature = repr(model), inspect.signature(model.forward)
        seen(model)
        assert (repr(model), inspect.signature(model.forward)) == (text, signature)
        assert str(type(model)) == str(type(other))
        assert isinstance(model, Net)
        assert list(model.state_dict()) == list(other.state_dict())

    @pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
    def test_a_copy_is_not_intercepted(self, how: str) -> None:
        model = Net()
        calls = seen(model, submodules="first")
        if how == "save":
            torch.save(model, file := io.BytesIO())
            file.seek(0)
            twin = torch.load(file, weights_only=False)
        else:
            twin = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
        twin.first.weight.zero_()
        assert (type(twin), type(twin.first)) == (Net, nn.Linear)
        assert not twin(X).equal(model(X))
        assert [call.name for call in calls] == ["", "first"]

    def test_another_model_of_its_class_is_not_intercepted(self) -> None:
        model = Net()
        model.forward = lambda x: x  # type: ignore[method-assign]
        calls = seen(model)
        other = type(model)()
        assert other(X).equal(other.last(other.first(X).relu()))
        assert not calls

    def test_a_replica_runs_with_its_own_weights(self) -> None:
        model = nn.Linear(4, 2)
        calls = seen(model)
        replica = model._replicate_for_data_parallel()
        replica.weight, replica.bias = torch.zeros(2, 4), torch.ones(2)  # type: ignore[assignment]
        assert replica(X).equal(torch.ones(3, 2))
        assert calls[0].module is replica

    @pytest.mark.parametrize("wrap", [nn.DataParallel, lambda m: torch.compile(m, backend="eager")])
    def test_through_a_wrapper_arguments_have_the_names_of_the_module_inside(self, wrap: Any) -> None:
        wrapper = wrap(Net())
        calls = seen(wrapper)
        expected = wrapper.module if isinstance(wrapper, nn.DataParallel) else wrapper._orig_mod
        assert wrapper(X, scale=2.0).equal(expected(X, scale=2.0))
        assert list(calls[0].arguments) == ["x", "scale"]
        wrapper.restore()
        wrapper(X)
        assert len(calls) == 1

    def test_a_model_and_what_torch_compile_made_of_it_are_restored_apart(self) -> None:
        model = Net()
        compiled = torch.compile(model, backend="eager")
        inside, outside = seen(model), seen(compiled)
        compiled(X)
        compiled.restore()
        compiled(X)
        assert (len(inside), len(outside)) == (2, 1)

    def test_threads_get_numbers_of_their_own(self) -> None:
        model = nn.Identity()
        calls = seen(model)
        threads = [threading.Thread(target=model, args=(X,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(call.number for call in calls) == list(range(8))
