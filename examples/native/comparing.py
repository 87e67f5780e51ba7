"""A module exported, compiled with native kernels where they win, and shown beside what it was."""

from __future__ import annotations

from collections import Counter
from importlib import import_module
from typing import Any

import onnx_ir as ir
import torch
from torch import nn
from torch.utils import _pytree as pytree

import sardonyx
from sardonyx import native


def transformers() -> Any:
    """The package, by name: its classes are untyped."""
    return import_module("transformers")


def compare(title: str, module: nn.Module, args: tuple[Any, ...], **export: Any) -> native.NativeModel:
    """Export and compile a module, and print nodes, times and the largest difference from PyTorch."""
    module = module.eval()
    with torch.no_grad():
        program = sardonyx.export(module, args, **export)
        expected = pytree.tree_leaves(module(*args))
    tensors = [x for x in pytree.tree_leaves(args) if isinstance(x, torch.Tensor)]
    feeds = {name: x.numpy() for name, x in zip(program.inputs, tensors, strict=True)}
    compiled = native.compile(program, measure=feeds)
    results = compiled.session().run(None, feeds)
    worst = max((torch.from_numpy(x) - y).abs().max().item() for x, y in zip(results, expected, strict=True))
    print(f"# {title}")
    print(f"before: {operators(program.model)}\nafter:  {operators(compiled.model)}\n{compiled.report}")
    print(f"largest difference from PyTorch: {worst:.1e}\n")
    return compiled


def operators(model: ir.Model) -> str:
    """The operators of a model, the most frequent first; all kernels are one of them."""
    names = ("kernel" if node.domain.startswith("sardonyx") else node.op_type for node in model.graph.all_nodes())
    return ", ".join(f"{count} {name}" for name, count in Counter(names).most_common(8))
