"""Transformers architectures that the training sweep takes a step of, without dropout."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers as hf
from torch import nn

from tests.models.architectures import ARCHITECTURES, TOLERANCE

from .modules import Case


def certain(build: Callable[[], nn.Module]) -> nn.Module:
    """Without what is random in training, and without a cache of keys and values."""
    model = build()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for holder in [held for module in model.modules() for held in (module, getattr(module, "config", None))]:
        for name, value in vars(holder).items() if holder is not None else ():
            if "drop" in name and isinstance(value, float):
                setattr(holder, name, 0.0)
        if isinstance(holder, hf.PretrainedConfig):
            holder.use_cache = False
        if isinstance(holder, hf.MixtralConfig):  # torch has no grouped products in double precision
            holder._experts_implementation = "batched_mm"
    return model.train()


def seed_llama() -> nn.Module:
    """The smallest Llama: one layer of width 16."""
    config = hf.LlamaConfig(
        hidden_size=16,
        num_hidden_layers=1,
        vocab_size=1024,
        intermediate_size=16,
        max_position_embeddings=1024,
        num_attention_heads=2,
        attn_implementation="eager",
    )
    return hf.LlamaModel(config)


def seed_inputs(batch: int) -> dict[str, Any]:
    """1,024 words each, the first of which see one word, the next two, and so on."""
    mask = torch.ones(batch, 1024, dtype=torch.int64).tril()
    return {"input_ids": torch.randint(0, 1024, (batch, 1024)), "attention_mask": mask}


def _case(name: str, build: Callable[[], nn.Module], inputs: Callable[..., Any], tolerance: float) -> Case:
    static = FIXED.get(name, "")
    return Case(
        name, "architectures", partial(certain, build), inputs, tolerance=tolerance, batches=(2, 3), static=static
    )


FIXED = {"swin": "torch reasons for minutes about windows over a symbolic image, and no input tells one of the sizes"}


CASES = {
    name: _case(name, build, inputs, TOLERANCE)
    for name, (build, inputs) in ARCHITECTURES.items()
    if name != "llama-one-token"
}
CASES["seed-llama"] = _case("seed-llama", seed_llama, seed_inputs, 1e-6)
