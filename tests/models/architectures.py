"""Whole architectures, small, with random weights, and what each is given."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers as hf
from torch import nn

hf.logging.set_verbosity_error()

TOLERANCE = 1e-4
TOWER = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "num_attention_heads": 4}
SMALL = {**TOWER, "vocab_size": 128}
GROUPED = {**SMALL, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def ids(batch: int = 2, length: int = 16) -> torch.Tensor:
    return torch.randint(3, 128, (batch, length))


def ragged(batch: int) -> torch.Tensor:
    """The mask of sequences of 16 words and of 9, in turn."""
    return torch.tensor([[1] * 16, [1] * 9 + [0] * 7]).repeat(batch, 1)[:batch]


def image(batch: int) -> torch.Tensor:
    return torch.randn(batch, 3, 32, 32)


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


ARCHITECTURES: dict[str, tuple[Callable[[], nn.Module], Callable[..., dict[str, torch.Tensor]]]] = {
    "bert": (lambda: hf.BertModel(hf.BertConfig(**SMALL)), lambda n=2: {"input_ids": ids(n)}),
    "bert-masked": (
        lambda: hf.BertForMaskedLM(hf.BertConfig(**SMALL)),
        lambda n=2: {"input_ids": ids(n), "attention_mask": ragged(n)},
    ),
    "distilbert": (
        lambda: hf.DistilBertModel(hf.DistilBertConfig(dim=64, hidden_dim=128, n_layers=2, n_heads=4, vocab_size=128)),
        lambda n=2: {"input_ids": ids(n)},
    ),
    "modernbert": (
        lambda: hf.ModernBertModel(hf.ModernBertConfig(**SMALL, pad_token_id=0)),
        lambda n=2: {"input_ids": ids(n)},
    ),
    "gpt2": (
        lambda: hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=128)),
        lambda n=2: {"input_ids": ids(n)},
    ),
    "llama": (lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)), lambda n=2: {"input_ids": ids(n)}),
    "llama-one-token": (lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)), lambda: {"input_ids": ids(1, 1)}),
    "mistral": (lambda: hf.MistralForCausalLM(hf.MistralConfig(**GROUPED)), lambda n=2: {"input_ids": ids(n)}),
    "qwen2": (lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**GROUPED)), lambda n=2: {"input_ids": ids(n)}),
    "gemma2": (lambda: hf.Gemma2Model(hf.Gemma2Config(**GROUPED, head_dim=16)), lambda n=2: {"input_ids": ids(n)}),
    "phi3": (lambda: hf.Phi3Model(hf.Phi3Config(**GROUPED)), lambda n=2: {"input_ids": ids(n)}),
    "mixtral": (
        lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**GROUPED, num_local_experts=4)),
        lambda n=2: {"input_ids": ids(n)},
    ),
    "t5-encoder": (lambda: hf.T5EncoderModel(t5()), lambda n=2: {"input_ids": ids(n)}),
    "t5": (lambda: hf.T5Model(t5()), lambda n=2: {"input_ids": ids(n), "decoder_input_ids": ids(n, 5)}),
    "whisper": (
        whisper,
        lambda n=2: {"input_features": torch.randn(n, 80, 64), "decoder_input_ids": ids(n, 5)},
    ),
    "clip": (clip, lambda n=2: {"input_ids": ids(n), "pixel_values": image(n)}),
    "vit": (
        lambda: hf.ViTModel(hf.ViTConfig(**TOWER, image_size=32, patch_size=8)),
        lambda n=2: {"pixel_values": image(n)},
    ),
    "swin": (
        lambda: hf.SwinModel(
            hf.SwinConfig(image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4)
        ),
        lambda n=2: {"pixel_values": image(n)},
    ),
    "resnet": (
        lambda: hf.ResNetForImageClassification(
            hf.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[2, 2])
        ),
        lambda n=2: {"pixel_values": image(n)},
    ),
    "convnext": (
        lambda: hf.ConvNextModel(hf.ConvNextConfig(hidden_sizes=[16, 32], depths=[2, 2], num_stages=2)),
        lambda n=2: {"pixel_values": image(n)},
    ),
}
"""How each is built, and what it is given for a batch of some size."""
