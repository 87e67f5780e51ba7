"""The way a graph takes, stage by stage: capture → translate → optimize → engine → run."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeAlias

import onnx_ir as ir
import torch
from torch.utils._python_dispatch import _disable_current_modes

from sardonyx.capture.regions import Region, copied, device_of, partition, region_of, torchs_own
from sardonyx.capture.strides import correct_strides
from sardonyx.capture.views import stride_bases, views_of_inputs, views_shared_by_outputs
from sardonyx.engines import Engine
from sardonyx.engines.registry import find as find_engine
from sardonyx.errors import UnsupportedOperator
from sardonyx.optimize import optimize
from sardonyx.optimize.empty import guard_empty
from sardonyx.optimize.legalize import lack
from sardonyx.optimize.selection import selected
from sardonyx.options import Options
from sardonyx.run.hosted import DEVICES as hosted_devices
from sardonyx.run.region import CompiledRegion
from sardonyx.telemetry import dump
from sardonyx.telemetry.page import page_of
from sardonyx.telemetry.picture import Picture
from sardonyx.telemetry.report import Fallback, GraphReport, RegionReport, new_graph_report
from sardonyx.telemetry.repro import reproducible
from sardonyx.telemetry.source import source_of
from sardonyx.toolchain.operator_libraries import is_declared
from sardonyx.translate import functions as onnx_functions
from sardonyx.translate.translator import NotExpressible, Refusal, Translation, translate

log = logging.getLogger(__name__)


Run: TypeAlias = Callable[[list[Any]], Sequence[Any]]
"""A compiled graph as AOTAutograd calls it, with a list of its arguments, which is cleared."""


@dataclass(frozen=True)
class CompiledGraph:
    """A compiled graph, and what it consists of."""

    run: Run
    region: CompiledRegion | None = None
    """The one region that all of the graph became; None where torch runs parts of it."""


def compile_graph(graph: torch.fx.GraphModule, kind: str, weights: frozenset[int], options: Options) -> CompiledGraph:
    """Compile a functional ATen graph.

    Nothing is built for an engine yet: the values of weights and numbers are known at the first call.
    """
    device = device_of(graph)
    hosted = hosted_devices.get(device.type)
    if hosted is not None:
        graph = hosted.graph(graph, device.type)
        return CompiledGraph(hosted.run(compile_graph(graph, kind, frozenset(), options).run, device.index or 0))
    graphs = [module for module in graph.modules() if isinstance(module, torch.fx.GraphModule)]  # branches, loops
    with _disable_current_modes():
        correct_strides(graph.graph)
    for module in graphs:
        stride_bases(module.graph)
    calls = [node for module in graphs for node in module.graph.nodes if node.op == "call_function"]
    report = new_graph_report(kind, len(calls))
    page = page_of(options)
    if page is not None:
        page.follow(options, report)
    operators = {node.target.name() for node in calls if hasattr(node.target, "name")}
    with reproducible(options, graph, kind=kind, weights=weights):
        compiler = _GraphCompiler(kind, weights, device, operators, options, report)
        with report.stage("translate"), _disable_current_modes():
            compiled = compiler.compile(graph)
    if page is not None:
        page.write(options)
    log.info("%s graph: %d operators, %d region(s)", kind, report.operators, len(report.regions))
    return compiled


class _GraphCompiler:
    def __init__(
        self,
        kind: str,
        weights: frozenset[int],
        device: torch.device,
        operators: Set[str],
        options: Options,
        report: GraphReport,
    ) -> None:
        self._kind, self._weights, self._options, self._report = kind, weights, options, report
        engine = find_engine(options.engine)
        self._engine, self._device, self._operators = engine, device, operators
        self._opset, self._kernels = self._suiting(engine)
        self._freeze = options.freeze and engine.freezes(device)

    def _suiting(self, engine: Engine) -> tuple[int, Any]:
        """The opset and the kernels to translate for."""
        return self._options.opset or engine.opset(self._device, self._operators), engine.kernels(self._device)

    def compile(self, graph: torch.fx.GraphModule) -> CompiledGraph:
        stays = views_of_inputs(graph.graph) | torchs_own(graph.graph)
        if self._kind != "backward":
            stays |= views_shared_by_outputs(graph.graph)
        whole = None if stays else region_of(graph, self._weights)
        if whole is not None and whole.outputs:
            try:
                region = self._region(whole)
                return CompiledGraph(region.run_boxed, region)
            except NotExpressible as error:
                stays |= self._refuse(error.refusals)
        return CompiledGraph(self._in_parts(graph, stays))

    def _in_parts(self, graph: torch.fx.GraphModule, stays: set[torch.fx.Node]) -> Run:
        """Partition around what must stay in torch, until every part can be expressed."""
        stays = stays | self._refuse(self._refusals(graph, stays))
        fused = self._partitioned(graph, stays)

        def run(args: list[Any]) -> Sequence[Any]:
            given = tuple(args)
            args.clear()
            results: Sequence[Any] = fused(*given)
            return results

        run._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd's convention
        return run

    def _partitioned(self, graph: torch.fx.GraphModule, stays: set[torch.fx.Node]) -> torch.fx.GraphModule:
        """The graph in parts. A part may lack what the whole has, as the size that only another part's input tells."""
        while True:
            attempt, twins = copied(graph)
            self._report.regions.clear()
            try:
                return partition(attempt, self._weights, {twins[node] for node in stays}, self._region)
            except NotExpressible as error:
                self._refuse(error.refusals)
                names = {refusal.node.name for refusal in error.refusals}
                more = {node for node in graph.graph.nodes if node.name in names} - stays
                if not more:
                    raise unsupported(error.refusals, _HINT) from error
                stays = stays | more

    def _refusals(self, graph: torch.fx.GraphModule, stays: set[torch.fx.Node]) -> list[Refusal]:
        """Nodes without a translation, those behind a refused one included."""
        found: dict[torch.fx.Node, Refusal] = {}
        try:
            translate(
                graph,
                opset=self._opset,
                outputs=(),
                stays=stays,
                lack=lambda node: _lack(node, self._engine, self._opset, self._kernels),
                translations=self._options.translations,
                translator=self._options.translator,
            )
        except NotExpressible as error:
            found = {refusal.node: refusal for refusal in error.refusals}
        return list(found.values())

    def _refuse(self, refusals: Sequence[Refusal]) -> set[torch.fx.Node]:
        if refusals and self._options.fallback == "error":
            raise unsupported(refusals, _HINT)
        for refusal in refusals:
            fallback = Fallback(str(refusal.node.target), refusal.reason, source_of(refusal.inside or refusal.node))
            self._report.note_fallback(fallback, warn=self._options.fallback == "warn")
        return {refusal.node for refusal in refusals}

    def _region(self, region: Region) -> CompiledRegion:
        frozen = region.weights if self._freeze else frozenset()
        translation = self._translate(region, frozen)
        operators = Counter(node.op_type for node in translation.model.graph.all_nodes())
        report = RegionReport(operators, nodes_translated=operators.total(), weights=len(translation.weights))
        self._report.regions.append(report)
        return CompiledRegion(
            region, frozen, self._kind, translation, self._translate, self._options, self._report, report
        )

    def _translate(
        self,
        region: Region,
        weights: frozenset[int],
        numbers: dict[int, float] | None = None,
        engine: Engine | None = None,
    ) -> Translation:
        """Translate a region, for another engine than the options name if one is given."""
        engine = engine or self._engine
        opset, kernels = self._suiting(engine)
        translation = translate(
            region.graph,
            opset=opset,
            weights=weights,
            numbers=numbers or {},
            outputs=region.outputs,
            orders=region.orders,
            lack=lambda node: _lack(node, engine, opset, kernels),
            translations=self._options.translations,
            translator=self._options.translator,
        )
        self._report.note_own(translation.own)
        return translation


def _lack(node: ir.Node, engine: Engine, opset: int, kernels: Any) -> str | None:
    if is_declared(node.domain, node.op_type) and not engine.custom_operators:
        return f"the engine {engine.name!r} does not load custom operators"
    return lack(node, opset, kernels)


def rewrite(
    model: ir.Model,
    options: Options,
    domains: Sequence[str] | None,
    report: GraphReport,
    *,
    empty_sizes: bool = False,
) -> None:
    """Apply the rules that the options choose, and report on the result; `empty_sizes` guards kernels, too."""
    region = RegionReport(
        nodes_translated=sum(1 for _ in model.graph.all_nodes()),
        weights=sum(type(v.const_value) is not ir.Tensor for v in model.graph.initializers.values()),
    )
    report.regions.append(region)
    if options.report:
        region.pictures["translated"] = Picture.of(model)
    names = selected(options.optimize)
    allowed = find_engine(options.engine).domains if domains is None else frozenset(domains)
    if names:
        with report.stage("optimize"):
            region.rules = optimize(model, domains=allowed, names=names)
            for function in model.functions.values():
                body = ir.Model(function.graph, ir_version=model.ir_version)
                region.rules += optimize(body, domains=allowed, names=names)
    if empty_sizes:
        guard_empty(model)
    onnx_functions.finish(model)
    graphs = (model.graph, *(function.graph for function in model.functions.values()))
    region.operators = Counter(node.op_type for graph in graphs for node in graph.all_nodes())
    dump.add_metadata(model)
    if options.report:
        region.pictures["rewritten"] = region.pictures["runs"] = Picture.of(model)


_HINT = 'options={"fallback": "warn"} runs it in torch; CONTRIBUTING.md shows how to add a translation'


def unsupported(refusals: Sequence[Refusal], hint: str) -> UnsupportedOperator:
    """The error that names what ONNX cannot express, where it is written, and the next step."""
    first = refusals[0]
    others = Counter(str(r.node.target) for r in refusals[1:])
    also = "; also " + ", ".join(f"{name} ×{count}" for name, count in others.most_common()) if others else ""
    return UnsupportedOperator(
        f"ONNX cannot express {first.node.target}: {first.reason}{also}",
        where=source_of(first.inside or first.node) or None,
        hint=hint,
    )
