"""One training step of a tiny Llama through ONNX Runtime, in the old words, and the ONNX graphs that it ran.

Programs like this were written for `experimental_experiment`; with `sardonyx.compat` only their imports change.

python examples/llama_training.py --folder dump_llama
"""

from __future__ import annotations

import argparse
import warnings
from collections import Counter
from pathlib import Path

import onnx
import torch
from transformers import LlamaConfig, LlamaModel

from sardonyx.compat import dump_onnx, make_aot_ort, train_loop

_BATCH, _LENGTH, _WORDS = 2, 1024, 1024


def model() -> LlamaModel:
    """One layer of two heads, with attention written out."""
    config = LlamaConfig(
        hidden_size=16,
        num_hidden_layers=1,
        vocab_size=_WORDS,
        intermediate_size=16,
        max_position_embeddings=_LENGTH,
        num_attention_heads=2,
    )
    config._attn_implementation = "eager"
    return LlamaModel(config)


def show(path: Path) -> None:
    """Every node of a dumped model."""
    nodes = onnx.load(path).graph.node
    print(f"\nNODES in {path.name!r}")
    for number, node in enumerate(nodes, start=1):
        print(f"{number}/{len(nodes)}: {node.op_type} {list(node.input)} -> {list(node.output)}")
    print(", ".join(f"{kind} ×{count}" for kind, count in Counter(node.op_type for node in nodes).most_common()))


def main() -> None:
    """Train a step and list what was dumped."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("dump_llama"), help="for the ONNX files")
    folder = parser.parse_args().folder
    torch.manual_seed(0)
    llama = model()
    input_ids = torch.randint(_WORDS - 1, (_BATCH, _LENGTH))
    input_mask = torch.tril(torch.ones(_BATCH, _LENGTH))
    local_aot_ort, _ = make_aot_ort(dynamic=True, rewrite=True, verbose=1)
    with warnings.catch_warnings(), dump_onnx("dort-llama-ort", folder=folder, clean=True):
        warnings.simplefilter("ignore")
        optimized = torch.compile(llama, backend=local_aot_ort, fullgraph=True)
        gradients = train_loop(optimized, input_ids, input_mask)
    files = sorted(folder.glob("*.onnx"))
    print(f"{len(gradients)} gradients; exported models: {[path.name for path in files]}")
    for path in files:
        show(path)


if __name__ == "__main__":
    main()
