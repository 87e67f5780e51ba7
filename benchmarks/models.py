"""Models to measure, built from configurations with random weights, so that nothing is downloaded.

>>> model, args = build("tiny-mlp")
>>> model(*args).shape
torch.Size([8, 16])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import nn

Case: TypeAlias = tuple[nn.Module, tuple[torch.Tensor, ...]]
"""A module in eval mode, and arguments for it."""

SEED = 0


class PlainOutput(nn.Module):
    """A transformers model that takes one tensor and returns one, without caches or output classes."""

    def __init__(self, model: nn.Module, output: str = "last_hidden_state") -> None:
        super().__init__()
        self.model = model
        self.output = output

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The output chosen at construction."""
        result: torch.Tensor = getattr(self.model(inputs), self.output)
        return result


def transformers() -> Any:
    """The package, imported where it is needed, and untyped: its classes are typed only in part."""
    import transformers

    return transformers


def _plain(model: Any, output: str, *args: torch.Tensor) -> Case:
    return PlainOutput(model, output).eval(), args


def _tokens(vocabulary: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, vocabulary, shape)


def mlp(widths: tuple[int, ...], batch: int) -> Case:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for width, following in pairwise(widths):
        layers += [nn.Linear(width, following), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).eval(), (torch.randn(batch, widths[0]),)


def bert(batch: int = 1, tokens: int = 128, layers: int = 12, hidden: int = 768) -> Case:
    """BERT, of the base size unless told otherwise."""
    hf = transformers()
    config = hf.BertConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=hidden // 64, intermediate_size=4 * hidden
    )
    return _plain(hf.BertModel(config), "last_hidden_state", _tokens(config.vocab_size, batch, tokens))


def gpt2(tokens: int = 128) -> Case:
    """GPT-2 of 124 million parameters, with its logits."""
    hf = transformers()
    config = hf.GPT2Config(use_cache=False)
    return _plain(hf.GPT2LMHeadModel(config), "logits", _tokens(config.vocab_size, 1, tokens))


def llama(
    tokens: int,
    layers: int = 4,
    hidden: int = 512,
    heads: int = 8,
    kv_heads: int = 4,
    intermediate: int = 1408,
    vocab: int = 8192,
) -> Case:
    """A small Llama, with its logits."""
    hf = transformers()
    config = hf.LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=intermediate,
        vocab_size=vocab,
        use_cache=False,
    )
    return _plain(hf.LlamaForCausalLM(config), "logits", _tokens(vocab, 1, tokens))


class CachedDecoding(nn.Module):
    """One step of a causal language model over a cache of keys and values, given as two tensors for each layer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, token: torch.Tensor, *past: torch.Tensor) -> torch.Tensor:
        """The logits of the next token; what the step adds to the cache is dropped."""
        cache = transformers().DynamicCache()
        for layer, (keys, values) in enumerate(zip(past[::2], past[1::2], strict=True)):
            cache.update(keys, values, layer)
        logits: torch.Tensor = self.model(token, past_key_values=cache, use_cache=True).logits
        return logits


def llama_step(cached: int, **shape: int) -> Case:
    """A Llama that decodes one token after `cached` others."""
    plain: Any = llama(1, **shape)[0]
    config = plain.model.config
    config.use_cache = True
    heads, width = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    past = [torch.randn(1, heads, cached, width) for _ in range(2 * config.num_hidden_layers)]
    return CachedDecoding(plain.model).eval(), (_tokens(config.vocab_size, 1, 1), *past)


def resnet50(batch: int = 1) -> Case:
    """ResNet-50 at 224 × 224."""
    hf = transformers()
    model = hf.ResNetForImageClassification(hf.ResNetConfig(num_labels=1000))
    return _plain(model, "logits", torch.randn(batch, 3, 224, 224))


def vit(batch: int = 1) -> Case:
    """ViT-base at 224 × 224, with patches of 16."""
    hf = transformers()
    model = hf.ViTForImageClassification(hf.ViTConfig(num_labels=1000))
    return _plain(model, "logits", torch.randn(batch, 3, 224, 224))


def convnext(batch: int = 1) -> Case:
    """ConvNeXt-tiny at 224 × 224."""
    hf = transformers()
    model = hf.ConvNextForImageClassification(hf.ConvNextConfig(num_labels=1000))
    return _plain(model, "logits", torch.randn(batch, 3, 224, 224))


def whisper_encoder(frames: int = 3000) -> Case:
    """The encoder of Whisper-base over thirty seconds of sound."""
    hf = transformers()
    config = hf.WhisperConfig(
        d_model=512,
        encoder_layers=6,
        encoder_attention_heads=8,
        encoder_ffn_dim=2048,
        decoder_layers=1,  # built with the model, and not used
        decoder_attention_heads=8,
    )
    encoder = hf.WhisperModel(config).get_encoder()
    return _plain(encoder, "last_hidden_state", torch.randn(1, config.num_mel_bins, frames))


def t5_encoder(tokens: int = 128) -> Case:
    """The encoder of T5-small."""
    hf = transformers()
    config = hf.T5Config(d_model=512, d_kv=64, d_ff=2048, num_layers=6, num_heads=8, use_cache=False)
    return _plain(hf.T5EncoderModel(config), "last_hidden_state", _tokens(config.vocab_size, 1, tokens))


MODELS: Mapping[str, Callable[[], Case]] = {
    "tiny-mlp": partial(mlp, (16, 32, 16), 8),
    "mlp": partial(mlp, (512, 2048, 2048, 512), 32),
    "bert-base": bert,
    "gpt2": gpt2,
    "llama-prefill": partial(llama, 256),
    "llama-decode": partial(llama, 1),
    "resnet50": resnet50,
    "vit-base": vit,
    "convnext-tiny": convnext,
    "whisper-encoder": whisper_encoder,
    "t5-encoder": t5_encoder,
}
"""Every model by name, in the order they are measured."""


def make(builder: Callable[[], Case]) -> Case:
    """What a builder gives, with the same weights and arguments each time."""
    torch.manual_seed(SEED)
    return builder()


def build(name: str) -> Case:
    """The model of that name, with the same weights and arguments each time."""
    return make(MODELS[name])
