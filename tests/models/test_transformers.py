"""Whole architectures, small, with random weights: no operator left in torch, and eager's results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn
from torch.utils import _pytree as pytree

from sardonyx.telemetry.report import Report, collecting
from sardonyx.telemetry.verify import difference
from tests.models.architectures import ARCHITECTURES, GROUPED, SMALL, TOLERANCE, ids


def compared(model: nn.Module, inputs: dict[str, torch.Tensor], **compile_options: Any) -> Report:
    """Run compiled beside eager, with no fallback allowed; the worst difference is in the report."""
    with collecting() as report:
        run = torch.compile(model, backend="sardonyx", options={"fallback": "error"}, **compile_options)
        results = pytree.tree_leaves(run(**inputs))
    expected = pytree.tree_leaves(model(**inputs))
    pairs = [(a, b) for a, b in zip(results, expected, strict=True) if isinstance(b, torch.Tensor)]
    report.max_error = max(difference(a, b) for a, b in pairs)
    return report


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_runs_whole_and_right(name: str) -> None:
    build, inputs = ARCHITECTURES[name]
    report = compared(build().eval(), inputs())
    assert report.max_error is not None
    assert report.max_error <= TOLERANCE
    assert not report.fallbacks


def test_one_dynamic_graph_serves_every_batch_and_length_of_a_llama() -> None:
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)).eval()
    with collecting() as report:
        run = torch.compile(model, backend="sardonyx", dynamic=True, options={"fallback": "error"})
        for batch in range(2, 10):
            for length in (5, 6, 31, 64, 137, 300):
                x = ids(batch, length)
                result, expected = (m(input_ids=x, use_cache=False).logits for m in (run, model))
                assert difference(result, expected) <= TOLERANCE, (batch, length)
    assert len(report.graphs) == 1
    assert report.graphs[0].regions[0].sessions == 1


def test_a_model_with_a_key_value_cache_gives_eagers_cache() -> None:
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)).eval()
    report = compared(model, {"input_ids": ids(), "use_cache": True})  # type: ignore[dict-item]
    assert report.max_error is not None
    assert report.max_error <= TOLERANCE


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_both_ways_transformers_writes_attention(attention: str) -> None:
    config = hf.BertConfig(**SMALL, attn_implementation=attention)
    report = compared(hf.BertModel(config).eval(), {"input_ids": ids()})
    assert report.max_error is not None
    assert report.max_error <= TOLERANCE


def test_half_precision_on_the_cpu() -> None:
    model = hf.BertModel(hf.BertConfig(**SMALL)).eval().half()
    x = ids()
    result = torch.compile(model, backend="sardonyx", options={"fallback": "error"})(x).last_hidden_state
    assert difference(result, model(x).last_hidden_state) <= 1e-2


def test_bfloat16_on_the_cpu() -> None:
    model = hf.BertModel(hf.BertConfig(**SMALL)).eval().bfloat16()
    x = ids()
    result = torch.compile(model, backend="sardonyx", options={"fallback": "error"})(x).last_hidden_state
    assert difference(result, model(x).last_hidden_state) <= 5e-2
