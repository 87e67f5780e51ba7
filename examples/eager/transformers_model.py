"""A small BERT and a small GPT-2 of `transformers` on the device `ort`: their answers, and a few steps of AdamW.

Their weights are random: nothing is downloaded, and what is shown is that the device computes what the CPU does.

python examples/eager/transformers_model.py --steps 5
"""

from __future__ import annotations

import argparse
import copy
from importlib import import_module
from typing import Any

import torch

from sardonyx import eager

_WORDS, _LENGTH, _BATCH = 200, 16, 4


def models() -> dict[str, Any]:
    """Two layers each, without dropout: two runs are to be compared."""
    bert = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    gpt2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
    places = {"max_position_embeddings": _LENGTH, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    positions = {"n_positions": _LENGTH, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    made = import_module("transformers")  # by name: its classes are untyped
    return {
        "BERT": made.BertForMaskedLM(made.BertConfig(vocab_size=_WORDS, **bert, **places)),
        "GPT-2": made.GPT2LMHeadModel(made.GPT2Config(vocab_size=_WORDS, **gpt2, **positions)),
    }


def answer(model: Any, words: torch.Tensor, device: str) -> torch.Tensor:
    """What a model says of some words."""
    with torch.no_grad():
        logits: torch.Tensor = model.eval().to(device)(input_ids=words.to(device)).logits
    return logits.cpu()


def train(model: Any, words: torch.Tensor, steps: int, device: str) -> list[float]:
    """The loss of each step on a device."""
    model, words = model.train().to(device), words.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(input_ids=words, labels=words).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Both models on both devices, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=5, help="steps of training (default: 5)")
    steps = parser.parse_args().steps
    eager.enable(fallback="error")
    torch.manual_seed(0)
    words = torch.randint(_WORDS, (_BATCH, _LENGTH))
    for name, model in models().items():
        one, other = (answer(copy.deepcopy(model), words, device) for device in ("cpu", "ort"))
        print(f"{name}: its answers on ort differ from the CPU's by at most {(one - other).abs().max():.1e}")
        curves = [train(copy.deepcopy(model), words, steps, device) for device in ("cpu", "ort")]
        print(f"{'step':>6}{'cpu':>12}{'ort':>12}{'difference':>12}")
        for step, (cpu, ort) in enumerate(zip(*curves, strict=True), start=1):
            print(f"{step:>6}{cpu:>12.6f}{ort:>12.6f}{abs(cpu - ort):>12.1e}")


if __name__ == "__main__":
    main()
