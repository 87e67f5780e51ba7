"""Compile a graph: partition it into regions, and build the model of a region or a file by a list of passes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import onnx
import onnx_ir as ir
import torch
from torch.utils._python_dispatch import _disable_current_modes

from sardonyx import passes
from sardonyx.capture.regions import Region, copied, device_of, partition, region_of, torchs_own
from sardonyx.capture.strides import correct_strides
from sardonyx.capture.views import stride_bases, views_of_inputs, views_shared_by_outputs
from sardonyx.engines import Engine
from sardonyx.engines.registry import find as find_engine
from sardonyx.errors import UnsupportedOperator
from sardonyx.optimize.legalize import lack
from sardonyx.options import Options
from sardonyx.passes import Context, Pass
from sardonyx.run.builds import Assumptions, Binding, Built, Recipe
from sardonyx.run.hosted import DEVICES as hosted_devices
from sardonyx.run.region import CompiledRegion
from sardonyx.telemetry import dump
from sardonyx.telemetry.page import page_of
from sardonyx.telemetry.report import Fallback, GraphReport, RegionReport, is_observed, new_graph_report
from sardonyx.telemetry.repro import reproducible
from sardonyx.telemetry.source import source_of
from sardonyx.toolchain.operator_libraries import is_declared
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
        self._engine, self._device = find_engine(options.engine), device
        self._opset = options.opset or self._engine.opset(device, operators)
        self._kernels = self._engine.kernels(device)

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
        """A region whose translation shows that ONNX can express it; the first build takes it over."""
        freezes = self._options.freeze and self._engine.freezes(self._device)
        assumed = Assumptions(region.weights if freezes else frozenset())
        recipe = Recipe(region, self._kind, self._engine, self._options, self._report, RegionReport())
        translation = _translated(recipe, assumed)
        recipe.report.operators = Counter(node.op_type for node in translation.model.graph.all_nodes())
        self._report.regions.append(recipe.report)
        return CompiledRegion(replace(recipe, translation=translation), build, assumed.weights)


# One build


SESSION_PASSES = (
    Pass("optimize", passes.rewrite, passes.has_rules),
    Pass("legalize", passes.fit_kernels),  # before native: its kernels take what is left as it is
    Pass("guard_empty", passes.guard_empty),
    Pass("drop_unused", passes.drop_unused_inputs),
    Pass("reshapes", passes.leave_reshapes_to_torch),
    Pass("native", passes.compile_natively, passes.wants_kernels),
)
"""For a session, which is thrown away with the process: fitted to the engine, the device and the processor."""

FILE_PASSES = (
    Pass("optimize", passes.rewrite, passes.has_rules),
    Pass("guard_empty", passes.guard_empty, lambda context: context.empty_sizes),
    Pass("functions", passes.finish_functions),
    Pass("names", passes.name_inputs_and_outputs, lambda context: context.name is not None),
    Pass("native", passes.compile_natively, passes.wants_kernels),  # legalized when a session loads the file
)
"""For a file: plain ONNX, and the domains that are asked for."""


def build(recipe: Recipe, assumptions: Assumptions) -> Built:
    """Build the model of a region, with these constants, for its engine."""
    translation = None if assumptions.numbers else recipe.translation
    if translation is None:
        with recipe.graph_report.stage("translate"):
            translation = _translated(recipe, assumptions)
    binding = Binding(tuple(translation.inputs), translation.weights, tuple(translation.draws))
    context = Context(
        kind=recipe.kind,
        engine=recipe.engine,
        device=recipe.region.device,
        options=recipe.options,
        graph_report=recipe.graph_report,
        report=recipe.report,
        binding=binding,
    )
    model = passes.apply(SESSION_PASSES, translation.model, context)
    log.info("%s graph: %d → %d nodes", recipe.kind, recipe.report.nodes_translated, recipe.report.nodes)
    proto = _serialized(model, recipe)
    assert context.binding is not None
    return Built(proto, proto.SerializeToString(), model.graph, context.binding, context.libraries, recipe.report)


def build_file(
    model: ir.Model,
    device: torch.device,
    options: Options,
    report: GraphReport,
    *,
    domains: Sequence[str] | None = None,
    empty_sizes: bool = False,
    name: Callable[[ir.Graph], None] | None = None,
) -> Path | None:
    """Make a file of a translated model, in place; the library of its kernels, if it has any."""
    context = Context(
        kind=report.kind,
        engine=find_engine(options.engine),
        device=device,
        options=Options.of(options, native=options.native is True),  # never by itself: a library has to be kept, too
        graph_report=report,
        report=RegionReport(),
        domains=None if domains is None else frozenset(domains),
        empty_sizes=empty_sizes,
        name=name,
    )
    context.report.nodes_translated = sum(1 for _ in model.graph.all_nodes())
    initializers = model.graph.initializers.values()
    context.report.weights = sum(type(value.const_value) is not ir.Tensor for value in initializers)
    context.graph_report.regions.append(context.report)
    passes.apply(FILE_PASSES, model, context)
    return Path(context.libraries[0]) if context.libraries else None


def _translated(recipe: Recipe, assumptions: Assumptions) -> Translation:
    region, engine, options = recipe.region, recipe.engine, recipe.options
    graphs = [module.graph for module in region.graph.modules() if isinstance(module, torch.fx.GraphModule)]
    operators = {node.target.name() for graph in graphs for node in graph.nodes if hasattr(node.target, "name")}
    opset, kernels = options.opset or engine.opset(region.device, operators), engine.kernels(region.device)
    translation = translate(
        region.graph,
        opset=opset,
        weights=assumptions.weights,
        numbers=assumptions.numbers,
        outputs=region.outputs,
        orders=region.orders,
        lack=lambda node: _lack(node, engine, opset, kernels),
        translations=options.translations,
        translator=options.translator,
    )
    recipe.graph_report.note_own(translation.own)
    recipe.report.nodes_translated = sum(1 for _ in translation.model.graph.all_nodes())
    recipe.report.weights = len(translation.weights)
    return translation


def _serialized(model: ir.Model, recipe: Recipe) -> onnx.ModelProto:
    if recipe.options.dump or recipe.options.transforms or is_observed():
        dump.add_metadata(model)
    with recipe.graph_report.stage("serialize"):
        proto = ir.to_proto(model)
    for transform in recipe.options.transforms:
        proto = transform(proto) or proto
    return proto


def _lack(node: ir.Node, engine: Engine, opset: int, kernels: Any) -> str | None:
    if is_declared(node.domain, node.op_type) and not engine.custom_operators:
        return f"the engine {engine.name!r} does not load custom operators"
    return lack(node, opset, kernels)


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
