"""GPT-2 over a prompt, with random weights: nothing is downloaded.

python examples/native/gpt2.py --layers 12 --width 768 --tokens 128
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from comparing import compare, transformers
from torch import nn


class Prompt(nn.Module):
    """GPT-2 as a function of tokens."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        hf = transformers()
        config = hf.GPT2Config(n_layer=layers, n_embd=width, n_head=width // 64, use_cache=False)
        self.model = hf.GPT2LMHeadModel(config)

    def forward(self, tokens: torch.Tensor) -> Any:
        """The logits."""
        return self.model(input_ids=tokens).logits


def main() -> None:
    """Compile it, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12, help="layers (default: 12)")
    parser.add_argument("--width", type=int, default=768, help="size of the hidden state (default: 768)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens (default: 128)")
    given = parser.parse_args()
    torch.manual_seed(0)
    compare("GPT-2", Prompt(given.layers, given.width), (torch.randint(0, 50000, (1, given.tokens)),))


if __name__ == "__main__":
    main()
