"""Graphs that a backend of torch.compile is handed: their arguments are fake, and sizes among them are symbols."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from sardonyx.capture.aot import decompositions
from sardonyx.capture.composite_ops import preserve_composite_ops

_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def has_fake_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether arguments have no values: torch.export takes no such."""
    return any(isinstance(x, (FakeTensor, *_SYMBOLS)) for x in pytree.tree_leaves((args, kwargs)))


def trace_fake_graph(
    model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], preserved: frozenset[str]
) -> tuple[torch.fx.GraphModule, pytree.TreeSpec, pytree.TreeSpec]:
    """The ATen operators of a graph, as a graph that edits nothing, with the arrangement of arguments and results."""
    leaves, in_spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    leaves = _as_placeholders(model, leaves)
    out_spec: list[pytree.TreeSpec] = []

    def call(*flat: Any) -> Any:
        given, named = pytree.tree_unflatten(list(flat), in_spec)
        results, spec = pytree.tree_flatten(model(*given, **named))
        out_spec.append(spec)
        return results

    with torch.no_grad(), preserve_composite_ops(), _allow_real_tensors(leaves):
        functional = torch.func.functionalize(call, remove="mutations")
        graph = make_fx(functional, decompositions(preserved=preserved), _allow_non_fake_inputs=True)(*leaves)
    return graph, in_spec, out_spec[-1]


def _as_placeholders(model: torch.nn.Module, leaves: list[Any]) -> list[Any]:
    """Arguments as the graph's placeholders have them: dynamo hands over real tensors beside symbolic sizes."""
    nodes = model.graph.find_nodes(op="placeholder") if isinstance(model, torch.fx.GraphModule) else []
    held = [node.meta.get("val", node.meta.get("example_value")) for node in nodes]
    if len(held) != len(leaves):
        return leaves
    return [x if isinstance(x, (FakeTensor, *_SYMBOLS)) else leaf for x, leaf in zip(held, leaves, strict=True)]


@contextmanager
def _allow_real_tensors(args: Sequence[Any]) -> Iterator[None]:
    """Let constants of a graph, which are real, be used beside its fake arguments."""
    mode: Any = detect_fake_mode(args)
    if mode is None:
        yield
        return
    before, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    try:
        yield
    finally:
        mode.allow_non_fake_inputs = before
