"""BERT, with random weights: nothing is downloaded.

python examples/native/bert.py --layers 12 --width 768 --tokens 128
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from comparing import compare, transformers
from torch import nn


class Encoder(nn.Module):
    """BERT as a function of tokens and their mask."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        hf = transformers()
        config = hf.BertConfig(
            hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // 64, intermediate_size=4 * width
        )
        self.model = hf.BertModel(config)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> Any:
        """The last hidden state."""
        return self.model(input_ids=tokens, attention_mask=mask).last_hidden_state


def main() -> None:
    """Compile it, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12, help="layers (default: 12)")
    parser.add_argument("--width", type=int, default=768, help="size of the hidden state (default: 768)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens (default: 128)")
    given = parser.parse_args()
    torch.manual_seed(0)
    mask = torch.ones(1, given.tokens, dtype=torch.int64)
    mask[:, -given.tokens // 8 :] = 0
    compare("BERT", Encoder(given.layers, given.width), (torch.randint(0, 30000, (1, given.tokens)), mask))


if __name__ == "__main__":
    main()
