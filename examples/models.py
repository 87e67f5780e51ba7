"""Models to try the command line with, each with arguments: `sardonyx bench examples/models.py:bert`.

Weights are random and nothing is downloaded. A factory takes no arguments, and returns a module, or a tuple of the
module, its arguments and its keyword arguments.

>>> module, args, kwargs = bert()
>>> module(*args, **kwargs).last_hidden_state.shape
torch.Size([2, 16, 64])
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def _transformers() -> Any:
    """Untyped: its classes are typed only in part."""
    import transformers

    return transformers


def bert() -> tuple[nn.Module, tuple[Any, ...], dict[str, torch.Tensor]]:
    """BERT of two small layers, with two sentences of sixteen tokens."""
    hf = _transformers()
    config = hf.BertConfig(
        vocab_size=1000,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=64,
    )
    tokens = torch.randint(0, config.vocab_size, (2, 16))
    return hf.BertModel(config).eval(), (), {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def llama() -> nn.Module:
    """A Llama of two small layers, which generates tokens."""
    hf = _transformers()
    config = hf.LlamaConfig(
        vocab_size=1000,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        max_position_embeddings=512,
    )
    module: nn.Module = hf.LlamaForCausalLM(config).eval()
    return module


class _Logits(nn.Module):
    """The logits of a classifier, without the class of outputs that they come in."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """One row an image."""
        logits: torch.Tensor = self.model(pixel_values).logits
        return logits


def resnet50() -> tuple[nn.Module, tuple[torch.Tensor]]:
    """ResNet-50, with one small image."""
    hf = _transformers()
    model = hf.ResNetForImageClassification(hf.ResNetConfig(num_labels=1000))
    return _Logits(model).eval(), (torch.randn(1, 3, 64, 64),)
