"""Generating text by a compiled model: `generate()` of transformers, token for token as eager."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import sardonyx
from sardonyx.options import defaults

transformers = pytest.importorskip("transformers", reason="needs the package transformers")


@pytest.fixture(autouse=True)
def nothing_on_disk() -> Iterator[None]:
    with defaults(cache_dir=""):
        yield


SMALL = {"vocab_size": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def llama() -> Any:
    config = transformers.LlamaConfig(**SMALL, **LLAMA, num_key_value_heads=2)
    return transformers.LlamaForCausalLM(config).eval()


def gpt2() -> Any:
    config = transformers.GPT2Config(**SMALL, n_embd=64, n_layer=2, n_head=4, n_positions=128)
    return transformers.GPT2LMHeadModel(config).eval()


def mistral() -> Any:
    config = transformers.MistralConfig(**SMALL, **LLAMA, num_key_value_heads=2, sliding_window=8)
    return transformers.MistralForCausalLM(config).eval()


def prompt(batch: int, padded: bool) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 128, (batch, 9))
    mask = torch.ones_like(ids)
    if padded:
        ids[0, :4] = mask[0, :4] = 0
    return {"input_ids": ids, "attention_mask": mask}


def generated(model: Any, given: dict[str, torch.Tensor], tokens: int, **how: Any) -> torch.Tensor:
    result: torch.Tensor = model.generate(**given, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, **how)
    return result


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("make", [llama, gpt2])
def test_64_tokens_are_eagers_with_at_most_three_sessions(make: Callable[[], Any], padded: bool) -> None:
    model, given = make(), prompt(2 if padded else 1, padded)
    compiled = sardonyx.compile(model, fallback="error")
    assert torch.equal(generated(compiled, given, 64), generated(model, given, 64))
    assert compiled.cache_info().built <= 3
    assert "forward" not in vars(model)
    generated(compiled, given, 64)
    assert compiled.cache_info().built <= 3


def test_a_window_that_slides_is_eagers() -> None:
    model, given = mistral(), prompt(1, False)
    compiled = sardonyx.compile(model, fallback="error", cache_size=8)
    assert torch.equal(generated(compiled, given, 12), generated(model, given, 12))


def test_beams_reorder_the_cache_that_the_compiled_forward_left() -> None:
    model, given = gpt2(), prompt(2, True)
    compiled = sardonyx.compile(model, fallback="error")
    assert torch.equal(generated(compiled, given, 8, num_beams=3), generated(model, given, 8, num_beams=3))


def test_the_callers_cache_holds_what_eager_would_have_put_there() -> None:
    model, given = llama(), prompt(2, True)
    compiled = sardonyx.compile(model, fallback="error")
    caches = [transformers.DynamicCache(config=model.config) for _ in range(2)]
    for step in range(3):
        mine = compiled(**given, past_key_values=caches[0])
        theirs = model(**given, past_key_values=caches[1])
        assert mine.past_key_values is caches[0]
        torch.testing.assert_close(mine.logits, theirs.logits, rtol=1e-4, atol=1e-5)
        for layer, expected in zip(caches[0].layers, caches[1].layers, strict=True):
            torch.testing.assert_close(layer.keys, expected.keys, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(layer.values, expected.values, rtol=1e-4, atol=1e-5)
        assert caches[0].get_seq_length() == 9 + step
        more = torch.ones(2, 1, dtype=torch.long)
        given = {"input_ids": more, "attention_mask": torch.cat([given["attention_mask"], more], 1)}


def test_hidden_states_that_transformers_gather_by_hooks_are_there() -> None:
    model, given = llama(), prompt(1, False)
    compiled = sardonyx.compile(model, fallback="error")
    for _ in range(2):
        mine, theirs = (m(**given, output_hidden_states=True).hidden_states for m in (compiled, model))
        assert len(mine) == len(theirs) == 3
        for state, expected in zip(mine, theirs, strict=True):
            torch.testing.assert_close(state, expected, rtol=1e-4, atol=1e-5)
    assert compiled.cache_info().built == 1
