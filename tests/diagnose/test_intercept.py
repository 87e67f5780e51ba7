"""sardonyx.intercept: what reaches forward is seen, and nothing else changes."""

from __future__ import annotations

import copy
import inspect
import io
import json
import logging
import pickle
import threading
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode

import sardonyx
from sardonyx import OptionError, SardonyxError
from sardonyx.diagnose import intercepting, record, replay, restore
from sardonyx.telemetry.calls import Call
from sardonyx.telemetry.intercept import show_call
from sardonyx.telemetry.report import collecting
from sardonyx.telemetry.text import summarize, summarize_tensor


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, scale: float = 1.0, *rest: Any, mask: Any = None, **more: Any) -> Any:
        return self.last(self.first(x).relu()) * scale

    def twice(self, x: torch.Tensor) -> Any:
        return self.forward(x) + self(x)


X = torch.linspace(-1, 1, 12).reshape(3, 4)


def seen(model: nn.Module, **how: Any) -> list[Call]:
    calls: list[Call] = []
    sardonyx.intercept(model, calls.append, **how)
    return calls


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


class TestTorchCompile:
    @pytest.mark.parametrize("called_before", [False, True])
    def test_a_compiled_model_shows_every_call(self, called_before: bool) -> None:
        model = Net().eval()
        expected, run = model(X), torch.compile(model, backend="sardonyx")
        if called_before:
            run(X)
        with collecting() as report:
            calls = seen(model, results=True)
            for _ in range(3):
                torch.testing.assert_close(run(X), expected)
        assert [call.number for call in calls] == [0, 0, 1, 1, 2, 2]
        assert calls[0].arguments["x"] is X
        assert len(report.graphs) == 1  # the forward, whole, and not compiled again
        model.restore()
        torch.testing.assert_close(run(X), expected)
        assert len(calls) == 6

    def test_a_graph_that_must_be_whole_says_what_to_use_instead(self) -> None:
        run = torch.compile(sardonyx.intercept(Net()), backend="sardonyx", fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="use the option intercept instead"):
            run(X)

    def test_an_export_is_no_call(self) -> None:
        model = Net().eval()
        calls = seen(model)
        program = sardonyx.export(model, (X,))
        strict = torch.export.export(model, (X,), strict=True)
        assert not calls
        torch.testing.assert_close(program(X), model(X))
        torch.testing.assert_close(strict.module()(X), model(X))

    def test_the_option_hands_over_each_call_of_a_graph_by_the_users_names(self) -> None:
        def blend(inputs: dict[str, Any], weight: torch.Tensor) -> Any:
            return inputs["a"] * weight + inputs["rest"][1]

        calls: list[Call] = []
        options = {"intercept": calls.append, "fallback": "error"}
        run = torch.compile(blend, backend="sardonyx", fullgraph=True, options=options)
        for factor in (1, 2):
            a, b, weight = X * factor, X + factor, torch.tensor(0.5)
            torch.testing.assert_close(run({"a": a, "rest": [0, b]}, weight), a * weight + b)
        assert [call.number for call in calls] == [0, 1]
        assert list(calls[0].arguments) == ["inputs['a']", "weight", "inputs['rest'][1]"]
        assert calls[1].arguments["inputs['a']"].equal(X * 2)
        assert calls[0].name == "graph 0/0"

    def test_the_option_leaves_out_weights_and_sizes(self, capsys: pytest.CaptureFixture[str]) -> None:
        model = Net().eval()
        run = torch.compile(model, backend="sardonyx", dynamic=True, options={"intercept": True})
        torch.testing.assert_close(run(X), model(X))
        assert capsys.readouterr().out.startswith("call 0 of graph 0/0 (GraphModule)\n  x: float32[3, 4] cpu, -1 to 1")

    def test_the_option_sees_training(self) -> None:
        model, calls = Net(), []
        run = torch.compile(model, backend="sardonyx", options={"intercept": calls.append})
        with torch.enable_grad():
            run(X).sum().backward()
        assert [list(call.arguments) for call in calls] == [["x"]]
        expected = copy.deepcopy(model).double()
        expected.zero_grad()
        with torch.enable_grad():
            expected(X.double()).sum().backward()
        for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, check_dtype=False, rtol=1e-5, atol=1e-5)

    def test_a_hook_of_the_option_raises_as_it_is(self) -> None:
        def hook(call: Call) -> None:
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            torch.compile(torch.sin, backend="sardonyx", options={"intercept": hook})(X)

    def test_the_option_is_true_or_a_function(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(OptionError, match="a function that takes the call"):
            sardonyx.Options.of({"intercept": "yes"})
        monkeypatch.setenv("SARDONYX_INTERCEPT", "1")
        assert sardonyx.Options.of().intercept is True


@pytest.fixture(scope="module")
def llama() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 64}
    return hf.LlamaForCausalLM(hf.LlamaConfig(num_hidden_layers=2, **sizes)).eval()


class TestTransformers:
    def test_every_step_of_generate_is_seen(self, llama: Any) -> None:
        ids = torch.arange(5)[None]
        expected = llama.generate(ids, max_new_tokens=4, do_sample=False)
        texts: list[str] = []
        with intercepting(llama, lambda call: texts.append(str(call)), submodules="model.layers.*.mlp"):
            assert llama.generate(ids, max_new_tokens=4, do_sample=False).equal(expected)
        assert [text.partition("\n")[0] for text in texts[3:6]] == [
            "call 1 of LlamaForCausalLM",
            "call 1 of model.layers.0.mlp (LlamaMLP)",
            "call 1 of model.layers.1.mlp (LlamaMLP)",
        ]
        assert "input_ids: int64[1, 1] cpu" in texts[3]
        assert "past_key_values: DynamicCache\n" in texts[3]
        assert ".keys: float32[1, 4, 5, 8] cpu" in texts[3]

    def test_results_are_shown_by_field(self, llama: Any) -> None:
        texts: list[str] = []
        with intercepting(llama, lambda call: texts.append(str(call)), results=True):
            llama(torch.arange(5)[None], use_cache=False)
        assert "result: CausalLMOutputWithPast\n    ['logits']: float32[1, 5, 64] cpu" in texts[1]

    def test_a_step_of_generate_can_be_replayed(self, llama: Any, tmp_path: Path) -> None:
        results: list[torch.Tensor] = []
        with (
            intercepting(llama, record(tmp_path)),
            intercepting(llama, lambda call: call.returned and results.append(call.result.logits), results=True),
        ):
            llama.generate(torch.arange(5)[None], max_new_tokens=4, do_sample=False)
        again = [llama(*args, **kwargs).logits for args, kwargs in replay(tmp_path)]
        assert len(again) == 4
        for ours, expected in zip(again, results, strict=True):
            assert ours.equal(expected)


@dataclass
class Batch:
    tokens: torch.Tensor
    label: str


Pair = namedtuple("Pair", "left right")


RAGGED = torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)


class TestWords:
    @pytest.mark.parametrize(
        ("tensor", "words"),
        [
            (torch.tensor([1.0, -2.5]), "float32[2] cpu, -2.5 to 1, mean -0.75: [1, -2.5]"),
            (
                torch.tensor([1.0, torch.nan, torch.inf, -torch.inf]),
                "float32[4] cpu, 1 to 1, mean 1, 1 NaN, 2 Inf: [1, nan, inf, -inf]",
            ),
            (torch.full((2,), torch.nan), "float32[2] cpu, none finite, 2 NaN: [nan, nan]"),
            (torch.tensor(2**62 + 1), f"int64[] cpu, {2**62 + 1} to {2**62 + 1}, mean 4.612e+18: {2**62 + 1}"),
            (torch.tensor([True, False]), "bool[2] cpu, 1 true: [True, False]"),
            (torch.tensor([3 + 4j]), "complex64[1] cpu, magnitude 5 to 5, mean 5: [3+4j]"),
            (torch.tensor([1.5], dtype=torch.bfloat16), "bfloat16[1] cpu, 1.5 to 1.5, mean 1.5: [1.5]"),
            (torch.tensor([1.5]).to(torch.float8_e5m2), "float8_e5m2[1] cpu, 1.5 to 1.5, mean 1.5: [1.5]"),
            (torch.tensor([65535], dtype=torch.uint16), "uint16[1] cpu, 65535 to 65535, mean 6.554e+04: [65535]"),
            (
                torch.tensor([2**64 - 1], dtype=torch.uint64),
                f"uint64[1] cpu, 1.845e+19 to 1.845e+19, mean 1.845e+19: [{2**64 - 1}]",
            ),
            (torch.empty(0, 3), "float32[0, 3] cpu, empty"),
            (torch.empty(2, device="meta"), "float32[2] meta, without values"),
            (torch.eye(2).to_sparse(), "float32[2, 2] cpu, values not strided"),
            (RAGGED, "NestedTensor float32[…] cpu, values not strided"),
            (torch.ones(1, requires_grad=True), "float32[1] cpu, requires grad, 1 to 1, mean 1: [1]"),
        ],
    )
    def test_a_tensor(self, tensor: torch.Tensor, words: str) -> None:
        assert summarize_tensor(tensor) == words

    def test_of_many_integers_the_first_are_shown(self) -> None:
        ids = torch.arange(100, 124).view(2, 12)
        head = "100, 101, 102, 103, 104, 105, 106, 107, …"
        assert summarize_tensor(ids) == f"int64[2, 12] cpu, 100 to 123, mean 111.5: {head}"
        assert summarize_tensor(ids.T.int()[:, :1].expand(12, 4)).endswith(": 100, 100, 100, 100, …")
        assert summarize_tensor(ids.float()) == "float32[2, 12] cpu, 100 to 123, mean 111.5"

    def test_of_a_large_tensor_some_elements_are_looked_at(self) -> None:
        words = summarize_tensor(torch.ones(1).expand(2**12, 2**12, 2**12))
        assert words == "float32[4096, 4096, 4096] cpu, 1 to 1, mean 1, 1048576 elements sampled"

    def test_containers_show_what_they_hold(self) -> None:
        value = {"batch": Batch(X, "cat"), "pair": Pair(X, [1, 2]), 3: (X, None), "plain": {"a": 1}}
        assert summarize("value", value) == [
            "value: dict",
            "  ['batch']: Batch",
            f"    .tokens: {summarize_tensor(X)}",
            "    .label: 'cat'",
            "  ['pair']: Pair",
            f"    .left: {summarize_tensor(X)}",
            "    .right: [1, 2]",
            "  [3]: tuple",
            f"    [0]: {summarize_tensor(X)}",
            "    [1]: None",
            "  ['plain']: {'a': 1}",
        ]

    def test_nothing_is_dumped_whole(self) -> None:
        class Circular:
            def __init__(self) -> None:
                self.me, self.x, self.text = self, X, "settings" * 100

        deep: Any = X
        for _ in range(100):
            deep = [deep]
        assert summarize("x", Circular()) == ["x: Circular", f"  .x: {summarize_tensor(X)}"]
        assert summarize("x", [X] * 1000)[-1] == "  … 984 more"
        assert len(summarize("x", "long" * 1000)[0]) < 100
        assert summarize("x", list(range(1000))) == ["x: [0, 1, 2, 3, 4, 5, ...]"]
        assert summarize("x", np.zeros((100, 100))) == ["x: ndarray float64[100, 100]"]
        assert summarize("x", nn.Linear(2, 2)) == ["x: <Linear>"]
        assert summarize("x", torch.float16) == ["x: torch.float16"]
        assert len("".join(summarize("x", deep))) < 200

    def test_modes_of_the_caller_see_nothing_of_it(self) -> None:
        class Counting(TorchDispatchMode):
            operators = 0

            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                self.operators += 1
                return func(*args, **(kwargs or {}))

        with Counting() as mode:
            _ = X + 1
            summarize_tensor(X)
        assert mode.operators == 1


class TestRecording:
    def recorded(self, folder: Path, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        class Anything(nn.Module):
            def forward(self, *args: Any, **kwargs: Any) -> None:
                pass

        sardonyx.intercept(Anything(), record(folder))(*args, **kwargs)
        return next(iter(replay(folder)))

    @pytest.mark.parametrize(
        "value",
        [
            None,
            True,
            3,
            0.1,
            float("inf"),
            "text",
            [1, [2, {"a": (3,)}]],
            {1: "one", (2, "two"): None},
            OrderedDict(a=1),
            torch.Size([2, 3]),
            torch.bfloat16,
            torch.device("cpu"),
        ],
    )
    def test_plain_values_come_back(self, value: Any, tmp_path: Path) -> None:
        (found,), kwargs = self.recorded(tmp_path, value)
        assert (found, type(found), kwargs) == (value, type(value), {})

    @pytest.mark.parametrize(
        "tensor",
        [
            torch.randn(2, 3),
            torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
            torch.randn(4, 6)[:, ::2],
            torch.tensor([1.5, torch.nan], dtype=torch.bfloat16),
            torch.randn(3).to(torch.float8_e4m3fn),
            torch.randn(2, dtype=torch.complex64).conj(),
            torch.tensor(7),
            torch.empty(0, 3),
            torch.ones(2, requires_grad=True),
        ],
    )
    def test_tensors_come_back_to_the_bit(self, tensor: torch.Tensor, tmp_path: Path) -> None:
        (found,), _ = self.recorded(tmp_path, tensor)
        assert (found.dtype, found.shape, found.requires_grad) == (tensor.dtype, tensor.shape, tensor.requires_grad)
        assert found.stride() == torch.empty_like(tensor).stride()
        ours, theirs = (t.detach().contiguous().resolve_conj().reshape(-1).view(torch.uint8) for t in (found, tensor))
        assert ours.equal(theirs)

    def test_a_tensor_given_twice_is_one_again(self, tmp_path: Path) -> None:
        (first, rest), kwargs = self.recorded(tmp_path, X, [X], y=X)
        assert first is rest[0] is kwargs["y"]

    def test_results_of_transformers_and_registered_dataclasses_come_back(self, tmp_path: Path) -> None:
        @dataclass
        class Known:
            x: torch.Tensor
            name: str

        torch.export.register_dataclass(Known, serialized_type_name="tests.intercept.Known")
        output = hf.modeling_outputs.BaseModelOutput(last_hidden_state=X)
        (found, known), _ = self.recorded(tmp_path, output, Known(X, "here"))
        assert type(found) is type(output)
        assert found.last_hidden_state.equal(X)
        assert (type(known), known.name) == (Known, "here")

    @pytest.mark.parametrize(
        ("value", "what"),
        [
            (Batch(X, "cat"), r"args\[0\] is a .*Batch, which cannot be recorded"),
            ({"f": print}, r"args\[0\]\['f'\] is a builtins.builtin_function_or_method"),
            (torch.eye(2).to_sparse(), r"args\[0\] is a torch.Tensor"),
            (hf.EncoderDecoderCache(hf.DynamicCache(), hf.DynamicCache()), "EncoderDecoderCache"),
        ],
    )
    def test_what_json_cannot_hold_is_refused(self, value: Any, what: str, tmp_path: Path) -> None:
        with pytest.raises(SardonyxError, match=what):
            self.recorded(tmp_path, value)
        assert not list(tmp_path.iterdir())

    def test_a_model_records_itself_up_to_a_limit(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        model = sardonyx.intercept(Net(), lambda call: None)
        model.record(tmp_path / "new", limit=2)
        for factor in range(5):
            model(X * factor, mask=factor)
        model.restore()
        found = list(replay(tmp_path / "new"))
        assert [kwargs["mask"] for _, kwargs in found] == [0, 1]
        assert found[1][0][0].equal(X)
        assert caplog.text.count("further ones are not recorded") == 1

    def test_a_second_recording_goes_on_behind_the_first(self, tmp_path: Path) -> None:
        for value in (1, 2):
            self.recorded(tmp_path, value)
        assert [args for args, _ in replay(tmp_path)] == [(1,), (2,)]

    def test_calls_of_a_module_inside_are_asked_for_by_name(self, tmp_path: Path) -> None:
        model = Net()
        with intercepting(model, record(tmp_path), submodules="last"):
            model(X)
        ((inner,), _) = next(iter(replay(tmp_path, name="last")))
        assert inner.equal(model.first(X).relu())
        assert len(list(replay(tmp_path))) == 1

    def test_files_are_numpys_with_json_inside(self, tmp_path: Path) -> None:
        self.recorded(tmp_path, X)
        arrays = np.load(tmp_path / "000000.npz", allow_pickle=False)
        assert json.loads(str(arrays["structure"]))["args"][0]["tensor"]["shape"] == [3, 4]
        np.testing.assert_array_equal(arrays["0"], X.reshape(-1))

    def test_a_folder_without_calls_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match="no recorded calls"):
            next(replay(tmp_path))

    @pytest.mark.parametrize("damage", ["empty", "truncated", "flipped", "foreign", "text"])
    def test_a_damaged_file_is_an_error_that_names_it(self, damage: str, tmp_path: Path) -> None:
        self.recorded(tmp_path, torch.ones(100))
        path = tmp_path / "000000.npz"
        whole = path.read_bytes()
        middle = whole.index(torch.ones(50).numpy().tobytes())
        if damage == "foreign":
            np.savez(path, x=np.zeros(2))
        else:
            flipped = whole[:middle] + b"\x01" + whole[middle + 1 :]
            path.write_bytes({"empty": b"", "truncated": whole[:middle], "flipped": flipped, "text": b"PK"}[damage])
        with pytest.raises(SardonyxError, match=r"000000\.npz cannot be read as a recorded call"):
            next(replay(tmp_path))


def test_nothing_is_logged_as_a_warning(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with caplog.at_level(logging.WARNING, "sardonyx"), intercepting(Net(), record(tmp_path)) as model:
        model(X)
    assert not caplog.records
