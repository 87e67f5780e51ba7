"""AOTAutograd: from what dynamo traced to functional graphs of ATen operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeAlias

import torch
from torch._decomp import core_aten_decompositions
from torch._guards import TracingContext

from sardonyx.translate import table

GraphCompiler: TypeAlias = Callable[[torch.fx.GraphModule, Sequence[Any], str, frozenset[int]], Callable[..., Any]]

_KEPT = frozenset({"aten::lift_fresh", "aten::lift_fresh_copy"})
"""Decompositions that break tensor constants, or hide them."""


@cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """What torch takes apart before we see it: its core table, less all that our own table translates whole."""
    kept = table.names() | _KEPT
    rules: dict[Any, Callable[..., Any]] = dict(core_aten_decompositions())
    return {target: rule for target, rule in rules.items() if target.name() not in kept}


def lower(graph: torch.fx.GraphModule, inputs: Sequence[Any], compile_graph: GraphCompiler) -> Callable[..., Any]:
    """Trace through AOTAutograd and hand each graph to `compile_graph` with its kind and its constant inputs."""

    def compiler(kind: str) -> Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]]:
        def compile_one(fx: torch.fx.GraphModule, example: Sequence[Any]) -> Callable[..., Any]:
            return compile_graph(fx, example, kind, constant_inputs(kind))

        return compile_one

    from torch._dynamo.backends.common import aot_autograd  # takes a second to import, and exports do without

    backend = aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        inference_compiler=compiler("inference"),
        decompositions=decompositions(),
    )
    return backend(graph, inputs)


def constant_inputs(kind: str) -> frozenset[int]:
    """Which inputs of the graph being compiled are parameters and buffers; none while training, where they change."""
    context = TracingContext.try_get()
    if kind != "inference" or context is None or context.fw_metadata is None:
        return frozenset()
    return frozenset(context.fw_metadata.static_input_indices)
