"""Keys and values of a compiled decoder are appended to in place; callers see the tensors that eager would give."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import sardonyx
from sardonyx.capture import cache_buffers
from sardonyx.engines.onnxruntime import OnnxRuntimeRunner
from sardonyx.errors import EngineError
from sardonyx.options import defaults

transformers = pytest.importorskip("transformers", reason="needs the package transformers")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cache_buffers, "BLOCK", 8)
    with defaults(cache_dir=""), torch.no_grad():
        yield


SMALL = {"vocab_size": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WIDE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {**SMALL, **WIDE, "intermediate_size": 128}


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, num_key_value_heads=2)).eval()


def gpt2() -> Any:
    config = transformers.GPT2Config(**SMALL, n_embd=64, n_layer=2, n_head=4, n_positions=128)
    return transformers.GPT2LMHeadModel(config).eval()


def qwen3() -> Any:
    config = transformers.Qwen3Config(**LLAMA, num_key_value_heads=1, head_dim=32)
    return transformers.Qwen3ForCausalLM(config).eval()


def bloom() -> Any:
    return transformers.BloomForCausalLM(transformers.BloomConfig(**SMALL, hidden_size=64, n_layer=2, n_head=4)).eval()


def t5() -> Any:
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**{**SMALL, **sizes})).eval()


def prompt(batch: int = 1, padded: bool = False, length: int = 9) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 128, (batch, length))
    mask = torch.ones_like(ids)
    if padded:
        ids[0, :4] = mask[0, :4] = 0
    return {"input_ids": ids, "attention_mask": mask}


def generated(model: Any, given: dict[str, torch.Tensor], tokens: int = 20, **how: Any) -> torch.Tensor:
    result: torch.Tensor = model.generate(**given, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, **how)
    return result


def in_place(compiled: Any) -> int:
    """Return how many keys and values the last model appends to in place."""
    last = compiled.report.graphs[-1].regions[-1].in_place
    assert isinstance(last, int)
    return last


class Decoder:
    """A compiled decoder and its original, which continue the same text, token by token."""

    def __init__(self, batch: int) -> None:
        self.model = llama()
        self.compiled = sardonyx.compile(self.model, fallback="error", cache_size=8)
        self.given = prompt(batch)
        with defaults(cache_dir=""), torch.no_grad():
            self.start()  # builds every session
        assert in_place(self.compiled) == 4

    def start(self) -> tuple[Any, Any]:
        """Return the caches of the compiled model and of the original after the prompt."""
        caches = [transformers.DynamicCache(config=self.model.config) for _ in range(2)]
        for model, cache in zip((self.compiled, self.model), caches, strict=True):
            model(**self.given, past_key_values=cache)
        for token in (3, 4):
            self.step(*caches, token)
        return caches[0], caches[1]

    def step(self, mine: Any, theirs: Any, token: int) -> None:
        """Give both a token; the logits and all keys and values are equal."""
        ids = torch.full((len(self.given["input_ids"]), 1), token)
        got, expected = (m(input_ids=ids, past_key_values=c) for m, c in ((self.compiled, mine), (self.model, theirs)))
        torch.testing.assert_close(got.logits, expected.logits, rtol=1e-4, atol=1e-5)
        assert_same(mine, theirs)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder(batch=1)


@pytest.fixture(scope="module")
def pair() -> Decoder:
    return Decoder(batch=2)


def assert_same(mine: Any, theirs: Any) -> None:
    for layer, expected in zip(mine.layers, theirs.layers, strict=True):
        torch.testing.assert_close(layer.keys, expected.keys, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(layer.values, expected.values, rtol=1e-4, atol=1e-5)


def addresses(cache: Any) -> list[int]:
    """Return the addresses of keys and values, without copying what is shared until written."""
    return [torch._C._data_address(x) for layer in cache.layers for x in (layer.keys, layer.values)]


# Generating


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("make", [llama, gpt2, qwen3])
def test_tokens_are_eagers_beyond_a_block(make: Callable[[], Any], padded: bool) -> None:
    model, given = make(), prompt(2 if padded else 1, padded)
    compiled = sardonyx.compile(model, fallback="error")
    assert torch.equal(generated(compiled, given), generated(model, given))
    assert in_place(compiled) == 4


def test_a_decoder_with_relative_positions_and_an_encoder_is_eagers() -> None:
    model, given = t5(), prompt(2, True)
    compiled = sardonyx.compile(model, fallback="error", cache_size=8)
    assert torch.equal(generated(compiled, given), generated(model, given))
    assert in_place(compiled) == 4


def test_beams_are_eagers() -> None:
    model, given = llama(), prompt(2, True)
    compiled = sardonyx.compile(model, fallback="error")
    assert torch.equal(generated(compiled, given, num_beams=3), generated(model, given, num_beams=3))
    assert in_place(compiled) == 4


def test_another_batch_is_appended_in_place_too() -> None:
    model = llama()
    compiled = sardonyx.compile(model, fallback="error")
    for batch in (1, 2, 3):
        given = prompt(batch)
        assert torch.equal(generated(compiled, given, 6), generated(model, given, 6))
    assert in_place(compiled) == 4


def test_assisted_generation_crops_the_cache() -> None:
    model, given = llama(), prompt()
    compiled = sardonyx.compile(model, fallback="error", cache_size=8)
    how = {"prompt_lookup_num_tokens": 3}
    assert torch.equal(generated(compiled, given, **how), generated(model, given, **how))


def test_a_row_that_is_masked_entirely_is_eagers() -> None:
    model, given = llama(), prompt(2)
    given["attention_mask"][0] = 0
    compiled = sardonyx.compile(model, fallback="error")
    for tokens in (4, 8):
        mine, theirs = (m.generate(**given, max_new_tokens=tokens, do_sample=False) for m in (compiled, model))
        assert torch.equal(mine, theirs)


# In place


def test_nothing_of_the_cache_is_concatenated() -> None:
    models: list[Any] = []
    compiled = sardonyx.compile(llama(), fallback="error", transforms=[models.append])
    generated(compiled, prompt(), 4)
    graph = models[-1].graph
    pasts = {x.name for x in graph.input if len(x.type.tensor_type.shape.dim) == 4}
    readers = [node.op_type for node in graph.node if pasts & set(node.input)]
    assert readers == ["GroupQueryAttention"] * 2
    assert "caches: 4 appended in place" in str(compiled.report)


def test_buffers_stay_at_their_address_until_a_block_is_full(decoder: Decoder) -> None:
    mine, theirs = decoder.start()
    seen = []
    for token in range(5, 12):
        decoder.step(mine, theirs, token)
        seen.append((mine.get_seq_length(), addresses(mine)))
    blocks = [{str(where) for rows, where in seen if (rows - 1) // 8 == block} for block in (1, 2)]
    assert [len(block) for block in blocks] == [1, 1]
    assert not blocks[0] & blocks[1]


def test_buffers_are_freed_with_the_cache(decoder: Decoder) -> None:
    gc.collect()
    before = len(cache_buffers._buffers)
    mine, theirs = decoder.start()
    assert len(cache_buffers._buffers) == before + 4
    del mine, theirs
    assert len(cache_buffers._buffers) == before


# Aliases


def test_two_continuations_of_one_cache_do_not_share_rows(decoder: Decoder) -> None:
    caches = decoder.start()
    others = tuple(copy.copy(cache) for cache in caches)
    for cache in others:
        cache.layers = [copy.copy(layer) for layer in cache.layers]
    assert addresses(caches[0]) == addresses(others[0])
    for token in (5, 6, 7):
        decoder.step(*caches, token)
        decoder.step(*others, token + 20)
    assert_same(*caches)
    assert_same(*others)


def test_a_deep_copy_is_another_cache(decoder: Decoder) -> None:
    caches = decoder.start()
    others = copy.deepcopy(caches)
    decoder.step(*caches, 5)
    decoder.step(*others, 25)
    assert_same(*caches)


@pytest.mark.parametrize("batch", ["decoder", "pair"])
def test_a_cropped_cache_can_be_continued(batch: str, request: pytest.FixtureRequest) -> None:
    decoder = request.getfixturevalue(batch)
    caches = decoder.start()
    decoder.step(*caches, 5)
    for cache in caches:
        cache.crop(-2)
    for token in (6, 7):
        decoder.step(*caches, token)


def test_edits_of_the_cache_are_seen_and_stay_the_callers(decoder: Decoder) -> None:
    caches = decoder.start()
    before = caches[0].layers[0].keys
    decoder.step(*caches, 5)
    expected = before.clone()
    for cache in caches:
        cache.layers[0].keys[:, :, 2] = 0.5
        cache.layers[1].values.mul_(2)
    decoder.step(*caches, 6)
    decoder.step(*caches, 7)
    assert torch.equal(before, expected)


def test_edits_by_numpy_are_seen(decoder: Decoder) -> None:
    caches = decoder.start()
    for cache in caches:
        cache.layers[0].keys.numpy()[0, :, 1] = 0.25
    decoder.step(*caches, 6)


def test_keys_and_values_of_earlier_steps_stay_as_they_were(decoder: Decoder) -> None:
    caches = decoder.start()
    earlier = [(layer.keys, layer.keys.clone()) for layer in caches[0].layers]
    for token in range(5, 9):
        decoder.step(*caches, token)
    for keys, expected in earlier:
        assert torch.equal(keys, expected)


def test_the_original_can_continue_a_cache(decoder: Decoder) -> None:
    mine, theirs = decoder.start()
    ids = torch.tensor([[5]])
    got, expected = (decoder.model(input_ids=ids, past_key_values=cache) for cache in (mine, theirs))
    torch.testing.assert_close(got.logits, expected.logits, rtol=1e-4, atol=1e-5)
    decoder.step(mine, theirs, 6)


def test_reordered_caches_are_eagers(pair: Decoder) -> None:
    caches = pair.start()
    for cache in caches:
        cache.reorder_cache(torch.tensor([1, 1]))
    pair.step(*caches, 5)


def test_a_cache_can_be_saved(tmp_path: Any, decoder: Decoder) -> None:
    mine, theirs = decoder.start()
    torch.save([layer.keys for layer in mine.layers], tmp_path / "keys.pt")
    loaded = torch.load(tmp_path / "keys.pt", weights_only=True)
    assert all(torch.equal(keys, layer.keys) for keys, layer in zip(loaded, mine.layers, strict=True))
    decoder.step(mine, theirs, 5)


# Around


def test_calls_outside_of_no_grad_continue_a_cache_and_give_gradients(decoder: Decoder) -> None:
    mine, theirs = decoder.start()
    with torch.enable_grad():
        ids = torch.tensor([[6]])
        got, expected = (
            torch.autograd.grad(model(input_ids=ids, past_key_values=cache).logits.sum(), model.lm_head.weight)[0]
            for model, cache in ((decoder.compiled, mine), (decoder.model, theirs))
        )
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_inference_mode_and_no_grad_can_take_turns(decoder: Decoder) -> None:
    caches = decoder.start()
    for token in range(5, 11):
        with torch.inference_mode(token % 2 == 0):
            decoder.step(*caches, token)


def test_edited_weights_and_release_leave_the_cache_usable(decoder: Decoder) -> None:
    caches = decoder.start()
    decoder.model.lm_head.weight.mul_(2)
    decoder.step(*caches, 5)
    decoder.compiled.release()
    decoder.step(*caches, 6)
    decoder.step(*caches, 7)


def test_a_call_that_fails_can_be_repeated(monkeypatch: pytest.MonkeyPatch, decoder: Decoder) -> None:
    caches = decoder.start()
    append = OnnxRuntimeRunner.append

    def interrupted(*args: Any) -> Any:
        append(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(OnnxRuntimeRunner, "append", interrupted)
        with pytest.raises(KeyboardInterrupt):
            decoder.compiled(input_ids=torch.tensor([[99]]), past_key_values=caches[0])
    for token in (5, 6):
        decoder.step(*caches, token)


def test_threads_that_continue_one_cache_do_not_disturb_each_other(decoder: Decoder) -> None:
    mine, _ = decoder.start()
    tokens = torch.arange(3, 11).view(-1, 1, 1)
    copies = [copy.copy(mine) for _ in tokens]
    for cache in copies:
        cache.layers = [copy.copy(layer) for layer in cache.layers]
    results: list[Any] = [None] * len(tokens)

    def run(index: int) -> None:
        with torch.no_grad():
            for _ in range(4):
                results[index] = decoder.compiled(input_ids=tokens[index], past_key_values=copies[index]).logits

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(tokens))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for token, result in zip(tokens, results, strict=True):
        cache = copy.deepcopy(mine)
        for _ in range(4):
            expected = decoder.model(input_ids=token, past_key_values=cache).logits
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


def test_keys_of_another_length_than_values_are_an_error(decoder: Decoder) -> None:
    mine, _ = decoder.start()
    mine.layers[0].values = mine.layers[0].values[:, :, :-1].contiguous()
    with pytest.raises(EngineError, match="rows"):
        decoder.compiled(input_ids=torch.tensor([[5]]), past_key_values=mine)


def test_a_model_from_disk_appends_in_place(tmp_path: Any) -> None:
    model, given = llama(), prompt()
    expected = generated(model, given)
    for _ in range(2):
        compiled = sardonyx.compile(model, fallback="error", cache_dir=str(tmp_path))
        assert torch.equal(generated(compiled, given), expected)
    assert [build.from_disk for build in compiled.builds[1:]] == [True] * 2
    caches = [transformers.DynamicCache(config=model.config) for _ in range(2)]
    for cache, each in zip(caches, (compiled, model), strict=True):
        each(**given, past_key_values=cache)
    steps = []
    for token in (3, 4, 5):
        for cache, each in zip(caches, (compiled, model), strict=True):
            each(input_ids=torch.tensor([[token]]), past_key_values=cache)
        steps.append(addresses(caches[0]))
    assert_same(*caches)
    assert steps[1] == steps[2]


def test_attention_of_another_form_is_concatenated_and_reported() -> None:
    model, given = bloom(), prompt(2, True)
    compiled = sardonyx.compile(model, fallback="error")
    assert torch.equal(generated(compiled, given, 6), generated(model, given, 6))
    assert "4 concatenated at each call: something else than one Attention" in str(compiled.report)


def test_verify_and_the_report_of_what_is_concatenated() -> None:
    config = transformers.LlamaConfig(**LLAMA, num_key_value_heads=2, head_dim=12)
    model, given = transformers.LlamaForCausalLM(config).eval(), prompt()
    compiled = sardonyx.compile(model, fallback="error", verify=True)
    assert torch.equal(generated(compiled, given, 6), generated(model, given, 6))
    assert "4 concatenated at each call: heads are not of one size that is a multiple of 8" in str(compiled.report)


def test_rules_that_are_turned_off_leave_the_cache_as_it_is() -> None:
    model, given = llama(), prompt()
    compiled = sardonyx.compile(model, fallback="error", optimize="none")
    assert torch.equal(generated(compiled, given, 5), generated(model, given, 5))
    assert in_place(compiled) == 0


def test_native_kernels_beside_caches_are_eagers() -> None:
    model, given = llama(), prompt(2, True)
    compiled = sardonyx.compile(model, fallback="error", native=True)
    assert torch.equal(generated(compiled, given), generated(model, given))
    assert in_place(compiled) == 4
