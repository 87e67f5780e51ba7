"""The passes of a build: functions of a model and the context of its build that return the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import onnx_ir as ir
import torch

from sardonyx.engines.engine import Engine, static_sizes
from sardonyx.native import cuda_matrix_products, native, unsupported_error
from sardonyx.optimize import empty, optimize
from sardonyx.optimize.cache_in_place import append_in_place
from sardonyx.optimize.legalize import legalize
from sardonyx.optimize.rules.cuda import CUDA, CUDA_KERNELS
from sardonyx.optimize.selection import select_rules
from sardonyx.optimize.weight_types import dequantize_once, keep_float_weights
from sardonyx.optimize.widen import has_half_products, widen
from sardonyx.options import Options
from sardonyx.precision.attention import lower_attention
from sardonyx.precision.bfloat16_models import plan_in_bfloat16
from sardonyx.precision.epilogues import fold_epilogues
from sardonyx.precision.lower import lower
from sardonyx.precision.narrow import narrow
from sardonyx.precision.norms import lower_norms
from sardonyx.precision.plan import FLOAT32, Plan
from sardonyx.precision.projections import fold_gates, join_projections
from sardonyx.precision.quantize import quantize_layers
from sardonyx.precision.reshapes import remove_reshapes
from sardonyx.run.binding import Binding
from sardonyx.run.builds import MODULE, TRACE, TRAINING
from sardonyx.run.cache_binding import CacheBinding
from sardonyx.run.file_precision import FileSubject
from sardonyx.run.precision_choice import choose_for
from sardonyx.sizes import Dims
from sardonyx.telemetry import dump
from sardonyx.telemetry.graph_snapshot import GraphSnapshot
from sardonyx.telemetry.report import GraphReport, RegionReport
from sardonyx.translate import functions as onnx_functions
from sardonyx.translate.inference import set_dims


@dataclass
class Context:
    """What passes read of a build besides the model, and what they pass on to later passes."""

    kind: str
    engine: Engine
    device: torch.device
    options: Options
    graph_report: GraphReport
    report: RegionReport = field(default_factory=RegionReport)
    domains: frozenset[str] | None = None
    """Operator domains that a file may use in addition to ONNX's own; None for those of the engine."""
    empty_sizes: bool = False
    """Whether a file supports sizes of zero in any session."""
    name: Callable[[ir.Graph], None] | None = None
    """Names the inputs, outputs and sizes of a file."""
    calibration: Sequence[Sequence[torch.Tensor]] = ()
    """Inputs of a file's model by which precisions are chosen, in order, for each call."""
    binding: Binding | None = None
    """The binding of a session; None for a file."""
    orders: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Arguments of a session that are permutations of dense memory, and the order of their axes there."""
    plan: Plan | None = None
    """The precision of each layer; None for float32."""
    factors: frozenset[str] = frozenset()
    """Weights that products multiply in bfloat16, in a model that is in it."""
    libraries: tuple[str, ...] = ()


def _always(context: Context) -> bool:
    return True


@dataclass(frozen=True)
class Pass:
    """One pass: its name in reports, its function, and its condition."""

    name: str
    run: Callable[[ir.Model, Context], ir.Model]
    when: Callable[[Context], bool] = _always


def apply(passes: Sequence[Pass], model: ir.Model, context: Context) -> ir.Model:
    """Apply the passes whose condition is true, and report the time of each."""
    _record_graph("translated", model, context)
    for step in passes:
        if step.run is compile_natively:
            _record_graph("rewritten", model, context)
        if step.when(context):
            with context.graph_report.stage(step.name):
                model = step.run(model, context)
    _record_graph("runs", model, context)
    context.report.operators = Counter(node.op_type for graph in _graphs(model) for node in graph.all_nodes())
    return model


def _graphs(model: ir.Model) -> list[ir.Graph]:
    return [model.graph, *(function.graph for function in model.functions.values())]


def _record_graph(stage: str, model: ir.Model, context: Context) -> None:
    if context.options.report:
        context.report.snapshots[stage] = GraphSnapshot.of(model)


# Sessions and files


_HIDE_LAYERS = frozenset({"ProjectionsIntoAttention"})
"""Rules that make layers parts of operators, where their precision cannot be lowered."""


def rewrite(model: ir.Model, context: Context) -> ir.Model:
    """Apply the selected rewrite rules, with operators of the domains that the engine or the file allows."""
    names = select_rules(context.options.optimize)
    if context.binding is None and wants_lower_precision(context) and context.report.precision is None:
        names -= _HIDE_LAYERS
    context.report.rules = optimize(model, domains=_domains(model, context), names=names)
    for function in model.functions.values():
        body = ir.Model(function.graph, ir_version=model.ir_version)
        context.report.rules += optimize(body, domains=_domains(model, context), names=names)
    return model


def compute_half_precision_widely(model: ir.Model, context: Context) -> ir.Model:
    """Compute a model in bfloat16 in float32, which has kernels; its layers may still run in bfloat16."""
    binding = context.binding
    assert binding is not None
    if not has_half_products(model.graph):
        return model
    widened = widen(model.graph)
    weights = dict(binding.weights) | {table: binding.weights[name] for table, name in widened.tables.items()}
    context.binding = replace(binding, weights=weights, widened=frozenset(widened.weights))
    context.factors = frozenset(name for name, dtype in widened.factors.items() if dtype == ir.DataType.BFLOAT16)
    return model


def may_widen(context: Context) -> bool:
    """Whether a session for inference runs on the CPU, in an engine with constant weights, and is optimized."""
    inference = context.kind not in TRAINING and context.kind != TRACE
    on_cpu = context.device.type == "cpu" and context.engine.takes_kernels(context.device)
    return inference and on_cpu and context.engine.freezes(context.device) and has_rules(context)


def has_rules(context: Context) -> bool:
    """Whether the options select any rewrite rules."""
    return bool(select_rules(context.options.optimize))


def _domains(model: ir.Model, context: Context) -> frozenset[str]:
    if context.domains is not None:
        return context.domains
    if context.binding is None:
        return context.engine.domains
    operators = {node.op_type for node in model.graph.all_nodes()}
    training = context.kind in TRAINING
    local = context.engine.local_domains(context.device, operators, training=training)
    kernels = {CUDA_KERNELS} if CUDA in local and wants_kernels(context) else set()
    return context.engine.domains | local | kernels


def compile_natively(model: ir.Model, context: Context) -> ir.Model:
    """Replace groups of nodes by native kernels in a library."""
    origins = {value.name: node.meta.get("fx") for node in model.graph for value in node.outputs}
    library = native(model, context.options, context.device.type)
    for node in model.graph:  # a kernel has the origin of its result
        node.meta.setdefault("fx", origins.get(node.outputs[0].name))
    _add_library(context, library)
    return model


def _add_library(context: Context, library: Path | None) -> None:
    if library is not None:
        context.libraries += (str(library),)


def wants_kernels(context: Context) -> bool:
    """Whether native kernels are requested, or the default for this graph, and the engine can load them."""
    wanted = context.options.native
    if not wanted:
        return False
    if not context.engine.takes_kernels(context.device):
        if wanted is True:
            raise unsupported_error(context.options.engine, context.device.type)
        return False
    if wanted is True:
        return True
    # on the CPU engines have no kernels for gradients; on a GPU each node that is not fused is a pass over memory
    return (context.kind in TRAINING) == (context.device.type == "cpu") and not _is_inspected(context)


def _is_inspected(context: Context) -> bool:
    """Whether the user sees the model, which has to be one that other programs can read."""
    return bool(context.options.dump or context.options.transforms)


# Sessions


def declare_memory_order(model: ir.Model, context: Context) -> ir.Model:
    """Declare inputs with their axes in memory order, before a Transpose: the engine would copy them otherwise.

    Rules then remove the Transpose where a kernel reads that order, as convolutions with channels last do.
    """
    binding, graph = context.binding, model.graph
    assert binding is not None
    orders = {}
    for value, argument in zip(list(graph.inputs), binding.inputs, strict=False):  # random inputs follow
        if argument in context.orders and value.uses():
            orders[argument] = context.orders[argument]
            _permute_input(graph, value, orders[argument])
    context.binding = replace(binding, orders=orders)
    return model


def _permute_input(graph: ir.Graph, value: ir.Value, order: Sequence[int]) -> None:
    """Permute the axes of an input; its readers read a Transpose of it."""
    dims: Dims = value.meta["dims"]
    readers = list(value.uses())
    set_dims(value, tuple(dims[axis] for axis in order))
    back = [list(order).index(axis) for axis in range(len(order))]
    node = ir.Node("", "Transpose", [value], [ir.AttrInt64s("perm", back)], num_outputs=1)
    result = node.outputs[0]
    result.name, result.type = f"{value.name}_transposed", value.type
    set_dims(result, dims)
    for reader in readers:
        if not _reads_shape(reader.node, back):
            reader.node.replace_input_with(reader.idx, result)
    if result.uses():
        graph.insert_before(next(iter(graph)), node)
    else:
        node.resize_inputs(0)


def _reads_shape(node: ir.Node, places: Sequence[int]) -> bool:
    """Let a Shape read axes at their new places; False for other nodes, and if they are no longer adjacent."""
    if node.op_type != "Shape":
        return False
    start, end = (node.attributes[name].as_int() if name in node.attributes else None for name in ("start", "end"))
    axes = list(places[slice(start, end)])
    if not axes or axes != list(range(axes[0], axes[0] + len(axes))):
        return False
    node.attributes["start"], node.attributes["end"] = (
        ir.AttrInt64("start", axes[0]),
        ir.AttrInt64("end", axes[-1] + 1),
    )
    return True


def has_weights_as_inputs(context: Context) -> bool:
    """Whether weights are inputs on this device, so that a copy of them would be made at each call."""
    return not context.engine.freezes(context.device)


def fit_kernels(model: ir.Model, context: Context) -> ir.Model:
    """Add casts around nodes without an exact kernel in the engine, or compose them of others."""
    kernels = context.engine.kernels(context.device)
    if kernels is not None:
        legalize(model, kernels)
    return model


def keep_weight_types(model: ir.Model, context: Context) -> ir.Model:
    """Keep weights in float32 as they are, and dequantize once those that are not multiplied in integers."""
    keep_float_weights(model)
    dequantize_once(model)
    return model


def converts_weights(context: Context) -> bool:
    """Whether the engine would quantize weights in float32, and dequantize others at each call."""
    kernels = context.engine.kernels(context.device)
    return kernels is not None and kernels.converts_weights


def guard_empty(model: ir.Model, context: Context) -> ir.Model:
    """Guard kernels that fail on tensors without elements."""
    empty.guard_empty(model)
    return model


def drop_unused_inputs(model: ir.Model, context: Context) -> ir.Model:
    """Drop inputs and weights that no node reads."""
    binding, graph = context.binding, model.graph
    assert binding is not None
    used = [i for i, x in enumerate(graph.inputs) if x.uses() or x.is_graph_output()]
    for i in reversed(range(len(graph.inputs))):
        if i not in used:
            del graph.inputs[i]
    weights = {name: index for name, index in binding.weights.items() if name in graph.initializers}
    count = len(binding.inputs)
    inputs = tuple(binding.inputs[i] for i in used if i < count)
    draws = tuple(binding.draws[i - count] for i in used if i >= count)
    context.binding = replace(binding, inputs=inputs, weights=weights, draws=draws)
    return model


def leave_reshapes_to_torch(model: ir.Model, context: Context) -> ir.Model:
    """Remove a Reshape before an output: the node would copy, torch makes a view."""
    graph, shapes = model.graph, {}
    for index, output in enumerate(graph.outputs):
        node, dims = output.producer(), static_sizes(output)
        source = node.inputs[0] if node is not None and node.op_type == "Reshape" else None
        if node is None or source is None or dims is None or source.is_graph_output():
            continue
        producer = source.producer()
        if producer is not None and producer.graph is graph and static_sizes(source) is not None:
            graph.outputs[index] = source
            shapes[index] = dims
            if not output.uses() and not output.is_graph_output():
                graph.remove(node, safe=True)
    assert context.binding is not None
    context.binding = replace(context.binding, reshaped=shapes)
    return model


def append_to_caches(model: ir.Model, context: Context) -> ir.Model:
    """Let attention append to keys and values in place, where the model concatenates a past with one new row."""
    assert context.binding is not None
    found = append_in_place(model)
    context.report.in_place, context.report.concatenated = len(found.appended), found.refusals
    if found.appended:
        columns = zip(*((x.past, x.present, x.length) for x in found.appended), strict=True)
        context.binding = replace(context.binding, cache=CacheBinding(*columns))
    return model


def may_append_to_caches(context: Context) -> bool:
    """Whether a module's call may return views of memory that later calls append to, and the engine can."""
    binding = context.binding
    assert binding is not None
    is_call = context.kind == MODULE and has_rules(context) and not binding.draws
    return is_call and context.engine.appends_in_place(context.device)


def lower_precision(model: ir.Model, context: Context) -> ir.Model:
    """Replace layers by operators in lower precision, as planned."""
    binding, plan = context.binding, context.plan
    assert binding is not None
    if plan is None:
        plan = plan_in_bfloat16(model.graph, context.factors, context.options)
    packings, libraries = lower(model, plan, binding.weights, context.options)
    fold_epilogues(model.graph)
    fold_gates(model.graph)
    libraries = [*libraries, *lower_attention(model, plan, context.options), *lower_norms(model, context.options)]
    narrow(model.graph)
    join_projections(model.graph)
    remove_reshapes(model.graph)
    weights = {name: index for name, index in binding.weights.items() if name in model.graph.initializers}
    packings = [packing.used_in(model.graph.initializers) for packing in packings]
    context.binding = replace(binding, weights=weights, packings=tuple(packings))
    for library in libraries:
        _add_library(context, library)
    return model


def has_lower_precision(context: Context) -> bool:
    """Whether the plan has layers in lower precision, or there is none and the model is in bfloat16."""
    if context.plan is None:
        return bool(context.factors) and context.options.precision == FLOAT32 and bool(context.options.native)
    return context.engine.takes_kernels(context.device) and not context.plan.is_float32


def quantize(model: ir.Model, context: Context) -> ir.Model:
    """Put layers in int8 between DequantizeLinear and QuantizeLinear, as planned."""
    binding, plan = context.binding, context.plan
    assert binding is not None
    assert plan is not None
    packings = quantize_layers(model, plan, binding.weights)
    weights = {name: index for name, index in binding.weights.items() if name in model.graph.initializers}
    context.binding = replace(binding, weights=weights, packings=tuple(packings))
    return model


def has_quantized_layers(context: Context) -> bool:
    """Whether the plan has layers in int8, for an engine that takes them quantized."""
    return context.engine.takes_quantized_layers and context.plan is not None and context.plan.lowest == "int8"


def replace_cuda_products(model: ir.Model, context: Context) -> ir.Model:
    """Let our own operator compute matrix products on CUDA, with their bias, and side by side."""
    _add_library(context, cuda_matrix_products(model, context.options))
    return model


def wants_cuda_products(context: Context) -> bool:
    """Whether a session runs on CUDA, in an engine that loads libraries, and native code is not excluded."""
    wanted = context.options.native
    if context.device.type != "cuda" or not context.engine.custom_operators or not wanted:
        return False
    return wanted is True or not _is_inspected(context)


# Files


def choose_file_precision(model: ir.Model, context: Context) -> ir.Model:
    """Replace layers of a file by standard operators in lower precision, within the bound on its results."""
    domains = _domains(model, context)
    subject = FileSubject.of(
        model, context.calibration, context.engine, context.options, domains, lambda other: fit_kernels(other, context)
    )
    choice, _ = choose_for(subject, context.engine, context.options, context.device)
    context.report.precision = choice
    if choice.is_float32 and has_rules(context):
        rules = context.report.rules
        model = rewrite(model, context)
        context.report.rules += rules
    subject.lower(model, Plan({layer.layer: layer.precision for layer in choice.layers}))
    return model


def wants_lower_precision(context: Context) -> bool:
    """Whether a lower precision than float32 is requested."""
    return context.options.precision != FLOAT32


def finish_functions(model: ir.Model, context: Context) -> ir.Model:
    """Make ONNX functions of modules, and add the origin of nodes as metadata."""
    onnx_functions.add_constant_nodes(model)
    dump.add_metadata(model)
    return model


def name_inputs_and_outputs(model: ir.Model, context: Context) -> ir.Model:
    """Give inputs, outputs and sizes the caller's names, which rules may have changed."""
    assert context.name is not None
    context.name(model.graph)
    return model
