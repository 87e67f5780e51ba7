"""Whole architectures, small, with random weights: no operator left in torch, and eager's results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn
from torch.utils import _pytree as pytree

from sardonyx.diagnose.report import Report, collecting
from sardonyx.diagnose.verify import difference

hf.logging.set_verbosity_error()

TOLERANCE = 1e-4
TOWER = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "num_attention_heads": 4}
SMALL = {**TOWER, "vocab_size": 128}
GROUPED = {**SMALL, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def ids(batch: int = 2, length: int = 16) -> torch.Tensor:
    return torch.randint(3, 128, (batch, length))


def image() -> torch.Tensor:
    return torch.randn(2, 3, 32, 32)


def clip() -> nn.Module:
    text = {**TOWER, "vocab_size": 128, "eos_token_id": 127, "bos_token_id": 0}
    vision = {**TOWER, "image_size": 32, "patch_size": 8}
    return hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=32))


def whisper() -> nn.Module:
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    half = {"layers": 2, "attention_heads": 4, "ffn_dim": 128}
    sizes = {f"{part}_{name}": number for part in ("encoder", "decoder") for name, number in half.items()}
    return hf.WhisperModel(hf.WhisperConfig(d_model=64, vocab_size=128, max_source_positions=32, **sizes, **special))


def t5() -> hf.T5Config:
    return hf.T5Config(
        d_model=64, d_ff=128, num_layers=2, num_heads=4, d_kv=16, vocab_size=128, decoder_start_token_id=0
    )


ARCHITECTURES: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, torch.Tensor]]]] = {
    "bert": (lambda: hf.BertModel(hf.BertConfig(**SMALL)), lambda: {"input_ids": ids()}),
    "bert-masked": (
        lambda: hf.BertForMaskedLM(hf.BertConfig(**SMALL)),
        lambda: {"input_ids": ids(), "attention_mask": torch.tensor([[1] * 16, [1] * 9 + [0] * 7])},
    ),
    "distilbert": (
        lambda: hf.DistilBertModel(hf.DistilBertConfig(dim=64, hidden_dim=128, n_layers=2, n_heads=4, vocab_size=128)),
        lambda: {"input_ids": ids()},
    ),
    "modernbert": (
        lambda: hf.ModernBertModel(hf.ModernBertConfig(**SMALL, pad_token_id=0)),
        lambda: {"input_ids": ids()},
    ),
    "gpt2": (
        lambda: hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=128)),
        lambda: {"input_ids": ids()},
    ),
    "llama": (lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)), lambda: {"input_ids": ids()}),
    "llama-one-token": (lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)), lambda: {"input_ids": ids(1, 1)}),
    "mistral": (lambda: hf.MistralForCausalLM(hf.MistralConfig(**GROUPED)), lambda: {"input_ids": ids()}),
    "qwen2": (lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**GROUPED)), lambda: {"input_ids": ids()}),
    "gemma2": (lambda: hf.Gemma2Model(hf.Gemma2Config(**GROUPED, head_dim=16)), lambda: {"input_ids": ids()}),
    "phi3": (lambda: hf.Phi3Model(hf.Phi3Config(**GROUPED)), lambda: {"input_ids": ids()}),
    "mixtral": (
        lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**GROUPED, num_local_experts=4)),
        lambda: {"input_ids": ids()},
    ),
    "t5-encoder": (lambda: hf.T5EncoderModel(t5()), lambda: {"input_ids": ids()}),
    "t5": (lambda: hf.T5Model(t5()), lambda: {"input_ids": ids(), "decoder_input_ids": ids(2, 5)}),
    "whisper": (
        whisper,
        lambda: {"input_features": torch.randn(2, 80, 64), "decoder_input_ids": ids(2, 5)},
    ),
    "clip": (clip, lambda: {"input_ids": ids(), "pixel_values": image()}),
    "vit": (lambda: hf.ViTModel(hf.ViTConfig(**TOWER, image_size=32, patch_size=8)), lambda: {"pixel_values": image()}),
    "swin": (
        lambda: hf.SwinModel(
            hf.SwinConfig(image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4)
        ),
        lambda: {"pixel_values": image()},
    ),
    "resnet": (
        lambda: hf.ResNetForImageClassification(
            hf.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[2, 2])
        ),
        lambda: {"pixel_values": image()},
    ),
    "convnext": (
        lambda: hf.ConvNextModel(hf.ConvNextConfig(hidden_sizes=[16, 32], depths=[2, 2], num_stages=2)),
        lambda: {"pixel_values": image()},
    ),
}


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
