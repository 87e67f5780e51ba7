"""Train a small transformer to tell the topic of a sentence, eagerly and through sardonyx.

python examples/finetune_transformer.py --steps 120 --output transformer.svg
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from curves import Batch, arguments, compare, report

_WORDS, _LENGTH, _BATCH, _TOPICS, _HIDDEN = 512, 32, 32, 8, 64
_ON_TOPIC = 0.4
"""The share of words that a topic has to itself; the others are any."""


def sentences(steps: int) -> Iterator[Batch]:
    """Batches of sentences, in each of which some words belong to its topic; the same ones every time."""
    draw = torch.Generator().manual_seed(1)
    own = _WORDS // _TOPICS
    for _ in range(steps):
        topics = torch.randint(_TOPICS, (_BATCH,), generator=draw)
        on_topic = topics[:, None] * own + torch.randint(own, (_BATCH, _LENGTH), generator=draw)
        anything = torch.randint(_WORDS, (_BATCH, _LENGTH), generator=draw)
        chosen = torch.rand(_BATCH, _LENGTH, generator=draw) < _ON_TOPIC
        yield torch.where(chosen, on_topic, anything), topics


class Classifier(nn.Module):
    """Words to a topic: embeddings with places, two layers of attention, the mean over the words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(_WORDS, _HIDDEN)
        self.places = nn.Parameter(0.1 * torch.randn(_LENGTH, _HIDDEN))
        # No dropout: the two curves are to be compared, and would each draw noise of their own.
        layer = nn.TransformerEncoderLayer(_HIDDEN, 4, 4 * _HIDDEN, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.topic = nn.Linear(_HIDDEN, _TOPICS)

    def forward(self, sentence: torch.Tensor) -> torch.Tensor:
        """A score for each topic."""
        scores: torch.Tensor = self.topic(self.layers(self.words(sentence) + self.places).mean(1))
        return scores


def main() -> None:
    """Train, print, draw."""
    given = arguments(__doc__, "finetune_transformer.svg", steps=120)
    torch.manual_seed(0)
    curves = compare(
        Classifier(), sentences, lambda parameters: torch.optim.AdamW(parameters, lr=1e-3), given.steps, given.device
    )
    report(f"transformer 2×{_HIDDEN}, {_BATCH} sentences of {_LENGTH} words a step, AdamW", curves, given.output)


if __name__ == "__main__":
    main()
