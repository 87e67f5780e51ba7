"""AOTAutograd: from what dynamo traced to functional graphs of ATen operators."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch._decomp import core_aten_decompositions
from torch._guards import TracingContext
from torch.fx.node import map_arg
from torch.utils.checkpoint import CheckpointPolicy

from sardonyx.capture import attention, strides
from sardonyx.capture.views import is_view
from sardonyx.capture.whole import keeping_whole
from sardonyx.translate import table

GraphCompiler: TypeAlias = Callable[[torch.fx.GraphModule, Sequence[Any], str, frozenset[int]], Callable[..., Any]]

_KEPT = frozenset({"aten::lift_fresh", "aten::lift_fresh_copy"})
"""Decompositions that break tensor constants, or hide them."""


def decompositions(training: bool = False, whole: frozenset[str] = frozenset()) -> dict[Any, Callable[..., Any]]:
    """What torch takes apart before we see it: its core table, less all that our own table translates whole.

    Operators named in `whole` stay as they are, too.
    """
    found = _decompositions(training, table.revision())
    return {target: rule for target, rule in found.items() if target.name() not in whole} if whole else found


@lru_cache(2)
def _decompositions(training: bool, edits: int) -> dict[Any, Callable[..., Any]]:
    kept = table.names() | _KEPT
    rules: dict[Any, Callable[..., Any]] = dict(core_aten_decompositions())
    made = {target: rule for target, rule in rules.items() if target.name() not in kept}
    made |= {target: strides.laid_out(made[target]) for target in strides.DECOMPOSED if target in made}
    return {**made, **attention.DECOMPOSITIONS} if training else made


def lower(
    graph: torch.fx.GraphModule,
    inputs: Sequence[Any],
    compile_graph: GraphCompiler,
    whole: frozenset[str] = frozenset(),
) -> Callable[..., Any]:
    """Trace through AOTAutograd and hand each graph to `compile_graph` with its kind and its constant inputs.

    Operators named in `whole` are not decomposed, beside those of our table.
    """

    def compiler(kind: str) -> Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]]:
        def compile_one(fx: torch.fx.GraphModule, example: Sequence[Any]) -> Callable[..., Any]:
            return compile_graph(fx, example, kind, constant_inputs(kind))

        return compile_one

    from torch._dynamo.backends.common import aot_autograd  # takes a second to import, and exports do without

    backend = aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        inference_compiler=compiler("inference"),
        decompositions=decompositions(_trains(inputs), whole),
        partition_fn=_split,
    )
    clone_aliases_in_branches(graph)
    with keeping_whole():
        return backend(graph, inputs)


def clone_aliases_in_branches(graph: torch.fx.GraphModule) -> None:
    """Let the branches of a torch.cond return copies of what shares memory with an operand or another result.

    Which of them is returned depends on a value, so that no graph can say what its result is a view of: AOTAutograd
    refuses such branches, which torch runs.
    """
    for module in graph.modules():
        for node in getattr(getattr(module, "graph", None), "nodes", ()):
            if node.target is torch.ops.higher_order.cond:
                for branch in (getattr(module, str(arg.target)) for arg in node.args[1:3]):
                    _clone_aliases(branch)


def _clone_aliases(branch: torch.fx.GraphModule) -> None:
    output = branch.graph.output_node()
    seen = {_storage(node) for node in branch.graph.find_nodes(op="placeholder")}

    def fresh(node: torch.fx.Node) -> torch.fx.Node:
        storage = _storage(node)
        if storage is None or storage not in seen:
            seen.add(storage)
            return node
        with branch.graph.inserting_before(output):
            made = branch.graph.call_function(torch.clone, (node,))
        made.meta = {**node.meta, "example_value": node.meta["example_value"].clone()}
        return made

    output.args = map_arg(output.args, fresh)
    branch.recompile()


def _storage(node: torch.fx.Node) -> int | None:
    """The memory of the tensor that a node is, as dynamo traced it; None for all else."""
    example = node.meta.get("example_value")
    return example.untyped_storage()._cdata if isinstance(example, torch.Tensor) else None


def _trains(inputs: Sequence[Any]) -> bool:
    """Whether a backward graph will be wanted."""
    return torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs)


def _split(joint: torch.fx.GraphModule, inputs: Any, **how: Any) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """Forward and backward graph by the minimum cut, where nothing but views and constants is computed twice.

    The cut is made for a compiler that fuses, to which computing pointwise operators again costs nothing; here each
    costs a kernel. What a checkpoint wants computed again is, but for random numbers: those drawn are kept.
    """
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    constant: set[torch.fx.Node] = set()
    for node in (node for node in joint.graph.nodes if node.op == "call_function"):
        if _draws(node) or (node.target is operator.getitem and _draws(node.args[0])):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        elif is_view(node):
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        elif not all(source in constant for source in node.all_input_nodes):
            node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)
        if not _draws(node) and all(source in constant for source in node.all_input_nodes):
            constant.add(node)
    return min_cut_rematerialization_partition(joint, inputs, **how)


def _draws(node: torch.fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def constant_inputs(kind: str) -> frozenset[int]:
    """Which inputs of the graph being compiled are parameters and buffers; none while training, where they change."""
    context = TracingContext.try_get()
    if kind != "inference" or context is None or context.fw_metadata is None:
        return frozenset()
    return frozenset(context.fw_metadata.static_input_indices)
