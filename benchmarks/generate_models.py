"""Language models to generate with, as folders of a configuration and random weights, which every peer reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.models import SEED, transformers

_SPECIAL = 3
"""Tokens below are padding, beginning and end."""
_POSITIONS = 2048
_WIDE = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def llama() -> Any:
    """Llama of 125 million parameters: 12 layers, 768 wide, 12 heads over 4 of keys and values."""
    hf = transformers()
    shape = {**_WIDE, **_TOKENS, "vocab_size": 32_000, "num_key_value_heads": 4}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**shape, max_position_embeddings=_POSITIONS))


def gpt2() -> Any:
    """GPT-2 small, with positions for prompts of 1,024 tokens and more."""
    hf = transformers()
    return hf.GPT2LMHeadModel(hf.GPT2Config(**_TOKENS, n_positions=_POSITIONS))


def qwen() -> Any:
    """Qwen3's architecture in the sizes of the Llama: queries and keys are normalized."""
    hf = transformers()
    shape = {**_WIDE, **_TOKENS, "vocab_size": 32_000, "num_key_value_heads": 4, "head_dim": 64}
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**shape, max_position_embeddings=_POSITIONS))


def t5() -> Any:
    """T5 of 130 million parameters, with a head of its own as in version 1.1: a tied one repeats its input."""
    hf = transformers()
    shape = {"d_model": 768, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 12, "vocab_size": 32_000}
    ends = {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0}
    return hf.T5ForConditionalGeneration(hf.T5Config(**shape, **ends, tie_word_embeddings=False))


def tiny() -> Any:
    """Llama of two narrow layers, to try the benchmark itself."""
    hf = transformers()
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = hf.LlamaConfig(**shape, **_TOKENS, vocab_size=1000, num_key_value_heads=1)
    return hf.LlamaForCausalLM(config)


MODELS: Mapping[str, Callable[[], Any]] = {"llama": llama, "gpt2": gpt2, "qwen": qwen, "t5": t5, "tiny": tiny}
"""Every model by name."""
USUAL = ("llama", "gpt2", "qwen", "t5")
"""The models measured unless others are asked for."""


def write(name: str, folder: Path) -> None:
    """Write a model into a folder, unless it is there, with the tokenizer that exporters ask for."""
    if (folder / "config.json").exists():
        return
    torch.manual_seed(SEED)
    model, temporary = MODELS[name]().eval(), folder.with_suffix(".tmp")
    model.save_pretrained(temporary)
    _tokenizer(model.config.vocab_size).save_pretrained(temporary)
    temporary.rename(folder)


def _tokenizer(words: int) -> Any:
    """A tokenizer of words that nobody reads."""
    tokenizers = import_module("tokenizers")
    model = tokenizers.models.WordLevel({f"word{number}": number for number in range(words)}, unk_token="word0")
    return transformers().PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(model))


def weight_megabytes(folder: Path) -> float:
    """The size of a folder's weights."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 1e6


def configuration(folder: Path) -> dict[str, Any]:
    """The configuration of a folder, as written."""
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return content


def is_encoder_decoder(folder: Path) -> bool:
    """Whether a folder has an encoder, whose input the prompt is."""
    return bool(configuration(folder).get("is_encoder_decoder", False))


def prompt(folder: Path, tokens: int, batch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Random tokens, none of them special: the same in every process."""
    words = int(configuration(folder)["vocab_size"])
    return np.random.default_rng(SEED).integers(_SPECIAL, words, (batch, tokens))
