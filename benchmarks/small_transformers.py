"""Twenty small transformers with random weights, and a model that int8 would ruin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.models import Case, PlainOutput, transformers

_VOCABULARY, _TOKENS = 2048, 64
_TOWER = {"hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 1024}
_WORDS = {**_TOWER, "vocab_size": _VOCABULARY, "pad_token_id": 0}
_DECODER = {**_WORDS, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
_IMAGES = {**_TOWER, "image_size": 128, "patch_size": 16}
_OPT = {"ffn_dim": 1024, "word_embed_proj_dim": 256, "use_cache": False}
_T5 = {"d_model": 256, "d_ff": 1024, "d_kv": 64, "num_layers": 3, "num_heads": 4, "use_cache": False}

_OF_WORDS: Mapping[str, Mapping[str, Any]] = {
    "Bert": _WORDS,
    "Roberta": _WORDS,
    "XLMRoberta": _WORDS,
    "Electra": {**_WORDS, "embedding_size": 256},
    "Albert": {**_WORDS, "embedding_size": 128},
    "Ernie": _WORDS,
    "MPNet": _WORDS,
    "RoFormer": {**_WORDS, "embedding_size": 256},
    "ModernBert": _WORDS,
    "DistilBert": {"vocab_size": _VOCABULARY, "dim": 256, "hidden_dim": 1024, "n_layers": 3, "n_heads": 4},
    "GPT2": {"vocab_size": _VOCABULARY, "n_embd": 256, "n_layer": 3, "n_head": 4, "use_cache": False},
    "OPT": {**_WORDS, **_OPT},
    "GPTNeoX": {**_WORDS, "use_cache": False},
    "Llama": _DECODER,
    "Mistral": _DECODER,
    "Qwen2": _DECODER,
    "Phi": _DECODER,
    "StableLm": _DECODER,
    "T5Encoder": {"vocab_size": _VOCABULARY, **_T5},
}
"""The configuration of each model of words, by the prefix of its class."""


def of_words(name: str) -> Case:
    """A model over 64 words."""
    hf = transformers()
    config = getattr(hf, f"{name.removesuffix('Encoder')}Config")(**_OF_WORDS[name])
    model = getattr(hf, f"{name}Model")(config)
    return PlainOutput(model, "last_hidden_state").eval(), (torch.randint(3, _VOCABULARY, (1, _TOKENS)),)


def vit() -> Case:
    """A ViT over 64 patches."""
    hf = transformers()
    return PlainOutput(hf.ViTModel(hf.ViTConfig(**_IMAGES)), "last_hidden_state").eval(), (torch.randn(1, 3, 128, 128),)


TRANSFORMERS: Mapping[str, Callable[[], Case]] = {**{name: partial(of_words, name) for name in _OF_WORDS}, "ViT": vit}


class Block(nn.Module):
    """A norm and a perceptron, added to what they are given; some channels of the norm are a thousand times larger."""

    def __init__(self, width: int, outliers: int, factor: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        with torch.no_grad():
            self.norm.weight[:outliers] *= factor
            self.up.weight[:, :outliers] /= factor  # so that in float32 they count as much as others

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum."""
        result: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return result


def outliers() -> Case:
    """Three blocks in which a scale for a row of activations leaves nothing of most channels."""
    return nn.Sequential(*(Block(256, 4, 1e3) for _ in range(3))).eval(), (torch.randn(_TOKENS, 256),)
