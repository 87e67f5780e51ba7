"""Compile a graph by regions; build the model of a region, or a file, by a list of passes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import torch
from torch.utils._python_dispatch import _disable_current_modes

from sardonyx import passes
from sardonyx.capture.partitioner import Partitioner
from sardonyx.capture.regions import Region, device_of
from sardonyx.capture.strides import correct_strides
from sardonyx.capture.views import input_orders, rebase_as_strided
from sardonyx.engines import Engine, Job
from sardonyx.engines.registry import find as find_engine
from sardonyx.optimize.legalize import unsupported_reason
from sardonyx.options import Options
from sardonyx.passes import Context, Pass
from sardonyx.run.binding import Binding
from sardonyx.run.builds import Assumptions, Built, Recipe
from sardonyx.run.cpu_backed import DEVICES as CPU_BACKED_DEVICES
from sardonyx.run.graph import CompiledGraph
from sardonyx.run.region import CompiledRegion
from sardonyx.telemetry import dump
from sardonyx.telemetry.report import GraphReport, RegionReport, is_observed, new_graph_report
from sardonyx.telemetry.report_page import page_of
from sardonyx.telemetry.repro import write_repro_on_error
from sardonyx.toolchain.operator_libraries import is_declared
from sardonyx.translate.translator import Translation, translate

log = logging.getLogger(__name__)


def compile_graph(graph: torch.fx.GraphModule, kind: str, weights: frozenset[int], options: Options) -> CompiledGraph:
    """Compile a functional ATen graph.

    Nothing is built for an engine yet: the values of weights and numbers are known at the first call.
    """
    device = device_of(graph)
    cpu_backed = CPU_BACKED_DEVICES.get(device.type)
    if cpu_backed is not None:
        graph = cpu_backed.to_cpu_graph(graph, device.type)
        return CompiledGraph(cpu_backed.wrap(compile_graph(graph, kind, frozenset(), options).run, device.index or 0))
    with _disable_current_modes():
        correct_strides(graph.graph)
    for inner in _graphs(graph):
        rebase_as_strided(inner)
    calls = sum(node.op == "call_function" for inner in _graphs(graph) for node in inner.nodes)
    report, engine = new_graph_report(kind, calls), find_engine(options.engine)
    page = page_of(options)
    if page is not None:
        page.add_graph(options, report)
    compile_region = partial(_compile_region, kind=kind, engine=engine, options=options, report=report)
    find_refusals = partial(_translate, engine=engine, device=device, options=options, outputs=())
    partitioner = Partitioner(kind, weights, options, report, compile_region, find_refusals)
    recorded = write_repro_on_error(options, graph, kind=kind, weights=weights)
    with recorded, report.stage("translate"), _disable_current_modes():
        compiled = partitioner.compile(graph)
    if page is not None:
        page.write(options)
    log.info("%s graph: %d operators, %d region(s)", kind, report.operators, len(report.regions))
    return CompiledGraph.of(compiled)


def _compile_region(region: Region, kind: str, engine: Engine, options: Options, report: GraphReport) -> CompiledRegion:
    """Translate a region, which raises if ONNX cannot express it; the first build consumes the translation."""
    freezes = options.freeze and engine.freezes(region.device)
    assumptions = Assumptions(region.weights if freezes else frozenset())
    recipe = Recipe(region, kind, engine, options, report, RegionReport())
    translation = _translate_region(recipe, assumptions)
    recipe.report.operators = Counter(node.op_type for node in translation.model.graph.all_nodes())
    report.regions.append(recipe.report)
    return CompiledRegion(replace(recipe, translation=translation), build, assumptions.weights)


SESSION_PASSES = (
    Pass("memory_order", passes.declare_memory_order, passes.has_weights_as_inputs),
    Pass("widen", passes.compute_half_precision_widely, passes.may_widen),
    Pass("optimize", passes.rewrite, passes.has_rules),
    Pass("weights", passes.keep_weight_types, passes.converts_weights),
    Pass("legalize", passes.fit_kernels),  # before native, which compiles the legalized nodes
    Pass("guard_empty", passes.guard_empty),
    Pass("drop_unused", passes.drop_unused_inputs),
    Pass("reshapes", passes.leave_reshapes_to_torch),
    Pass("caches", passes.append_to_caches, passes.may_append_to_caches),
    Pass("precision", passes.lower_precision, passes.has_lower_precision),
    Pass("quantize", passes.quantize, passes.has_quantized_layers),
    Pass("products", passes.replace_cuda_products, passes.wants_cuda_products),
    Pass("native", passes.compile_natively, passes.wants_kernels),
)
"""Passes of a session: its model is specific to the engine, the device and the processor."""

FILE_PASSES = (
    Pass("optimize", passes.rewrite, passes.has_rules),
    Pass("weights", passes.keep_weight_types, lambda context: context.kind == "exported"),
    Pass("precision", passes.choose_file_precision, passes.wants_lower_precision),
    Pass("guard_empty", passes.guard_empty, lambda context: context.empty_sizes),
    Pass("functions", passes.finish_functions),
    Pass("names", passes.name_inputs_and_outputs, lambda context: context.name is not None),
    Pass("native", passes.compile_natively, passes.wants_kernels),  # legalized when a session loads the file
)
"""Passes of a file: standard ONNX and the requested operator domains."""

LOAD_PASSES = (
    Pass("guard_empty", passes.guard_empty, lambda context: context.empty_sizes),
    Pass("legalize", passes.fit_kernels),
)
"""Passes of a session that loads a file."""


def build(recipe: Recipe, assumptions: Assumptions) -> Built:
    """Build the model of a region, with these constants, for its engine."""
    translation = None if assumptions.numbers else recipe.translation
    if translation is None:
        with recipe.graph_report.stage("translate"):
            translation = _translate_region(recipe, assumptions)
    context = Context(
        kind=recipe.kind,
        engine=recipe.engine,
        device=recipe.region.device,
        options=recipe.options,
        graph_report=recipe.graph_report,
        report=recipe.report,
        binding=Binding.of(recipe.region, translation),
        orders=input_orders(recipe.region.graph),
        plan=recipe.plan,
    )
    model = passes.apply(SESSION_PASSES, translation.model, context)
    log.info("%s graph: %d → %d nodes", recipe.kind, recipe.report.nodes_translated, recipe.report.nodes)
    proto = _serialize(model, recipe)
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
    calibration: Sequence[Sequence[torch.Tensor]] = (),
) -> Path | None:
    """Apply the passes of a file to a model, in place; return the library of its kernels, if any."""
    if calibration:
        options.require_precision("calibration")
    context = Context(
        kind=report.kind,
        engine=find_engine(options.engine),
        device=device,
        options=Options.of(options, native=options.native is True),  # not automatically: the file would need a library
        graph_report=report,
        domains=None if domains is None else frozenset(domains),
        empty_sizes=empty_sizes,
        name=name,
        calibration=calibration,
    )
    context.report.nodes_translated = sum(1 for _ in model.graph.all_nodes())
    context.report.weights = sum(type(x.const_value) is not ir.Tensor for x in model.graph.initializers.values())
    context.graph_report.regions.append(context.report)
    passes.apply(FILE_PASSES, model, context)
    return Path(context.libraries[0]) if context.libraries else None


def fit_to_engine(
    model: ir.Model, engine: Engine, device: torch.device, options: Options, *, empty_sizes: bool = False
) -> None:
    """Apply the passes that a session of this engine needs to a file's model, in place."""
    report = GraphReport("loaded", 0)
    passes.apply(LOAD_PASSES, model, Context("loaded", engine, device, options, report, empty_sizes=empty_sizes))


def refit(job: Job, engine: Engine, options: Options) -> Job:
    """Return the job of a file for another engine."""
    model = ir.from_proto(onnx.load_from_string(job.model))
    fit_to_engine(model, engine, job.device, options)
    outputs = tuple(str(x.name) for x in model.graph.outputs)
    return replace(job, model=ir.to_proto(model).SerializeToString(), outputs=outputs, options=options)


def _translate_region(recipe: Recipe, assumptions: Assumptions) -> Translation:
    region = recipe.region
    translation = _translate(
        region.graph,
        engine=recipe.engine,
        device=region.device,
        options=recipe.options,
        weights=assumptions.weights,
        numbers=assumptions.numbers,
        outputs=region.outputs,
        orders=region.orders,
    )
    recipe.graph_report.note_own(translation.own)
    recipe.report.nodes_translated = sum(1 for _ in translation.model.graph.all_nodes())
    recipe.report.weights = len(translation.weights)
    return translation


def _translate(
    graph: torch.fx.GraphModule,
    stays: Set[torch.fx.Node] = frozenset(),
    *,
    engine: Engine,
    device: torch.device,
    options: Options,
    **rest: Any,
) -> Translation:
    """Translate a graph for an engine: with its preferred opset, and only to operators that it has kernels for."""
    operators = {node.target.name() for inner in _graphs(graph) for node in inner.nodes if hasattr(node.target, "name")}
    opset, kernels = options.opset or engine.opset(device, operators), engine.kernels(device)
    return translate(
        graph,
        opset=opset,
        stays=stays,
        unsupported_reason=lambda node: _missing_kernel(node, engine, opset, kernels),
        translations=options.translations,
        translator=options.translator,
        **rest,
    )


def _graphs(graph: torch.fx.GraphModule) -> list[torch.fx.Graph]:
    """Return a graph and its subgraphs: branches and loop bodies."""
    return [module.graph for module in graph.modules() if isinstance(module, torch.fx.GraphModule)]


def _serialize(model: ir.Model, recipe: Recipe) -> onnx.ModelProto:
    if recipe.options.dump or recipe.options.transforms or is_observed():
        dump.add_metadata(model)
    with recipe.graph_report.stage("serialize"):
        proto = ir.to_proto(model)
    for transform in recipe.options.transforms:
        proto = transform(proto) or proto
    return proto


def _missing_kernel(node: ir.Node, engine: Engine, opset: int, kernels: Any) -> str | None:
    if is_declared(node.domain, node.op_type) and not engine.custom_operators:
        return f"the engine {engine.name!r} does not load custom operators"
    return unsupported_reason(node, opset, kernels)
