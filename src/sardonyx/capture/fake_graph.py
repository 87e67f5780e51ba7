"""Trace graphs that a backend of torch.compile receives, with fake arguments and symbolic sizes."""

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
    """Whether any argument is fake or symbolic, which torch.export does not accept."""
    return any(isinstance(x, (FakeTensor, *_SYMBOLS)) for x in pytree.tree_leaves((args, kwargs)))


def trace_fake_graph(
    model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], preserved: frozenset[str]
) -> tuple[torch.fx.GraphModule, pytree.TreeSpec, pytree.TreeSpec]:
    """Trace a graph to a functional graph of ATen operators; also return the pytree specs of arguments and results."""
    leaves, in_spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    leaves = _as_placeholders(model, leaves)
    out_spec: list[pytree.TreeSpec] = []

    def call(*flat: Any) -> Any:
        args, kwargs = pytree.tree_unflatten(list(flat), in_spec)
        results, spec = pytree.tree_flatten(model(*args, **kwargs))
        out_spec.append(spec)
        return results

    with torch.no_grad(), preserve_composite_ops(), _allow_real_tensors(leaves):
        functional = torch.func.functionalize(call, remove="mutations")
        graph = make_fx(functional, decompositions(preserved=preserved), _allow_non_fake_inputs=True)(*leaves)
    return graph, in_spec, out_spec[-1]


def _as_placeholders(model: torch.nn.Module, leaves: list[Any]) -> list[Any]:
    """Replace arguments by the fake values of placeholders: dynamo passes real tensors with symbolic sizes."""
    nodes = model.graph.find_nodes(op="placeholder") if isinstance(model, torch.fx.GraphModule) else []
    fakes = [node.meta.get("val", node.meta.get("example_value")) for node in nodes]
    if len(fakes) != len(leaves):
        return leaves
    return [x if isinstance(x, (FakeTensor, *_SYMBOLS)) else leaf for x, leaf in zip(fakes, leaves, strict=True)]


@contextmanager
def _allow_real_tensors(args: Sequence[Any]) -> Iterator[None]:
    """While active, allow a graph's constants, which are real, together with fake arguments; new tensors are fake."""
    mode: Any = detect_fake_mode(args)
    if mode is None:
        yield
        return
    before, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    try:
        with mode:
            yield
    finally:
        mode.allow_non_fake_inputs = before
