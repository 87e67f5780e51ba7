"""One step of a Llama that writes: a token, and the keys and values of those before it. Random weights.

Such steps are many small operators, and what each costs to start counts.

python examples/native/llama_decode.py --layers 4 --width 512 --past 255
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from comparing import compare, transformers
from torch import nn

_VOCABULARY = 8192


class Step(nn.Module):
    """Llama as a function of a token and its cache, which it gives back longer."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self._hf = transformers()
        config = self._hf.LlamaConfig(
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=width // 64,
            num_key_value_heads=max(1, width // 128),
            intermediate_size=width * 11 // 4,
            vocab_size=_VOCABULARY,
        )
        self.model = self._hf.LlamaForCausalLM(config)

    def past(self, length: int) -> list[torch.Tensor]:
        """Keys and values of each layer, made up."""
        config = self.model.config
        sizes = (1, config.num_key_value_heads, length, 64)
        return [torch.randn(sizes) for _ in range(2 * config.num_hidden_layers)]

    def forward(self, token: torch.Tensor, position: torch.Tensor, past: list[torch.Tensor]) -> list[Any]:
        """The logits, then keys and values."""
        cache = self._hf.DynamicCache()
        for layer in range(len(past) // 2):
            cache.update(past[2 * layer], past[2 * layer + 1], layer)
        result = self.model(input_ids=token, position_ids=position, past_key_values=cache, use_cache=True)
        kept = [x for layer in result.past_key_values.layers for x in (layer.keys, layer.values)]
        return [result.logits, *kept]


def main() -> None:
    """Compile it, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4, help="layers (default: 4)")
    parser.add_argument("--width", type=int, default=512, help="size of the hidden state (default: 512)")
    parser.add_argument("--past", type=int, default=255, help="tokens before this one (default: 255)")
    given = parser.parse_args()
    torch.manual_seed(0)
    step = Step(given.layers, given.width)
    token, position = torch.randint(0, _VOCABULARY, (1, 1)), torch.tensor([[given.past]])
    compare("Llama, one token", step, (token, position, step.past(given.past)))


if __name__ == "__main__":
    main()
