"""Text from a small language model, written as it is generated: `python examples/generate.py`.

A Llama of characters learns one paragraph in a few seconds. Then `sardonyx.compile(model).generate()` continues a
prompt, through a streamer of transformers, and eager generates the same. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch

import sardonyx

TEXT = (
    "Sardonyx is onyx in bands: layers of red sard and white chalcedony in one stone. Engravers of antiquity cut "
    "cameos from it, a white figure on a red ground, because each layer keeps its colour when the one above is cut "
    "away. The Romans sealed letters with it, since wax does not stick to it."
)
PROMPT = "Sardonyx is"
_RATE = 5e-3


def _transformers() -> Any:
    """Untyped: its classes are typed only in part."""
    import transformers

    return transformers


class Characters:
    """A tokenizer: every character of a text is a token.

    >>> letters = Characters("abc")
    >>> letters.encode("cab"), letters.decode([2, 0, 1])
    ([2, 0, 1], 'cab')
    """

    def __init__(self, text: str) -> None:
        self.letters = sorted(set(text))

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        return [self.letters.index(letter) for letter in text]

    def decode(self, tokens: Sequence[int] | torch.Tensor, **how: Any) -> str:
        """The text of tokens; streamers give more keywords, which do not matter here."""
        return "".join(self.letters[int(token)] for token in tokens)


def language_model(words: int) -> Any:
    """A Llama of two narrow layers."""
    hf = _transformers()
    config = hf.LlamaConfig(
        vocab_size=words,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return hf.LlamaForCausalLM(config)


def train(model: Any, tokens: torch.Tensor, steps: int) -> float:
    """Learn a text by heart, and return the last loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=steps)
    for _ in range(steps):
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return float(loss.detach())


def generate(model: Any, prompt: torch.Tensor, tokens: int, **how: Any) -> tuple[torch.Tensor, float]:
    """Continue a prompt greedily; return all tokens, and seconds."""
    started = time.perf_counter()
    mask = torch.ones_like(prompt)
    found: torch.Tensor = model.generate(prompt, attention_mask=mask, max_new_tokens=tokens, do_sample=False, **how)
    return found, time.perf_counter() - started


def main() -> None:
    """Train, generate while it is shown, and compare with eager."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150, help="training steps (default: %(default)s)")
    length = len(TEXT) - len(PROMPT)
    parser.add_argument("--tokens", type=int, default=length, help="characters to generate (default: %(default)s)")
    given = parser.parse_args()

    torch.set_num_threads(1)  # so small a model gains nothing by more
    torch.manual_seed(0)
    characters = Characters(TEXT)
    model = language_model(len(characters.letters))
    loss = train(model.train(), torch.tensor([characters.encode(TEXT)]), given.steps)
    print(f"trained on {len(TEXT)} characters, loss {loss:.2f}\n")

    compiled = sardonyx.compile(model.eval())
    prompt = torch.tensor([characters.encode(PROMPT)])
    streamer = _transformers().TextStreamer(characters)
    found, first = generate(compiled, prompt, given.tokens, streamer=streamer)
    _, again = generate(compiled, prompt, given.tokens)
    expected, eager = generate(model, prompt, given.tokens)
    print(f"\nsardonyx: {given.tokens / again:.0f} tokens a second, eager: {given.tokens / eager:.0f}")
    print(f"the first call took {first:.1f} s, and built {compiled.cache_info().built} sessions")
    print(f"tokens equal eager's: {torch.equal(found, expected)}")


if __name__ == "__main__":
    main()
