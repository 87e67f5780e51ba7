"""Compile a graph as one region if ONNX can express it, else partition it around the nodes that stay in torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from sardonyx.capture.regions import Region, copy_graph, partition, region_of, torch_only_nodes
from sardonyx.capture.views import views_of_inputs, views_shared_by_outputs
from sardonyx.errors import UnsupportedOperator
from sardonyx.options import Options
from sardonyx.telemetry.report import Fallback, GraphReport
from sardonyx.telemetry.source import source_of
from sardonyx.translate.translator import NotExpressible, Refusal

R = TypeVar("R", bound=torch.nn.Module)

_HINT = 'options={"fallback": "warn"} runs it in torch; CONTRIBUTING.md shows how to add a translation'


@dataclass(frozen=True)
class Partitioner(Generic[R]):
    """Decides which nodes stay in torch, and compiles the regions between them."""

    kind: str
    weights: frozenset[int]
    options: Options
    report: GraphReport
    compile_region: Callable[[Region], R]
    """Raises `NotExpressible` for a region that has no translation."""
    translate: Callable[[torch.fx.GraphModule, set[torch.fx.Node]], object]
    """Translates a graph without the nodes that stay; raises `NotExpressible` with every node without a translation."""

    def compile(self, graph: torch.fx.GraphModule) -> R | torch.fx.GraphModule:
        """Compile the graph to one region, or to a graph that calls compiled regions."""
        stays = views_of_inputs(graph.graph) | torch_only_nodes(graph.graph)
        if self.kind != "backward":
            stays |= views_shared_by_outputs(graph.graph)
        whole = None if stays else region_of(graph, self.weights)
        if whole is not None and whole.outputs:
            try:
                return self.compile_region(whole)
            except NotExpressible as error:
                stays |= self._note_refusals(error.refusals)
        return self._compile_parts(graph, stays | self._note_refusals(self._refusals(graph, stays)))

    def _compile_parts(self, graph: torch.fx.GraphModule, stays: set[torch.fx.Node]) -> torch.fx.GraphModule:
        """Partition the graph and compile its regions, which may lack sizes that only inputs of others have."""
        while True:
            attempt, twins = copy_graph(graph)
            self.report.regions.clear()
            try:
                return partition(attempt, self.weights, {twins[node] for node in stays}, self.compile_region)
            except NotExpressible as error:
                self._note_refusals(error.refusals)
                names = {refusal.node.name for refusal in error.refusals}
                more = {node for node in graph.graph.nodes if node.name in names} - stays
                if not more:
                    raise unsupported(error.refusals, _HINT) from error
                stays = stays | more

    def _refusals(self, graph: torch.fx.GraphModule, stays: set[torch.fx.Node]) -> list[Refusal]:
        """Return all nodes without a translation, including those that depend on another one."""
        try:
            self.translate(graph, stays)
        except NotExpressible as error:
            return list({refusal.node: refusal for refusal in error.refusals}.values())
        return []

    def _note_refusals(self, refusals: Sequence[Refusal]) -> set[torch.fx.Node]:
        if refusals and self.options.fallback == "error":
            raise unsupported(refusals, _HINT)
        for refusal in refusals:
            fallback = Fallback(str(refusal.node.target), refusal.reason, source_of(refusal.inside or refusal.node))
            self.report.note_fallback(fallback, warn=self.options.fallback == "warn")
        return {refusal.node for refusal in refusals}


def unsupported(refusals: Sequence[Refusal], hint: str) -> UnsupportedOperator:
    """Return the error for nodes that ONNX cannot express, with the source line of the first."""
    first = refusals[0]
    others = Counter(str(r.node.target) for r in refusals[1:])
    also = "; also " + ", ".join(f"{name} ×{count}" for name, count in others.most_common()) if others else ""
    return UnsupportedOperator(
        f"ONNX cannot express {first.node.target}: {first.reason}{also}",
        where=source_of(first.inside or first.node) or None,
        hint=hint,
    )
