"""sardonyx.intercept with torch.compile and with models of transformers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import sardonyx
from sardonyx import OptionError
from sardonyx.diagnose import intercepting, record, replay
from sardonyx.telemetry.calls import Call
from sardonyx.telemetry.report import collecting

from .seen import Net, X, seen


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
