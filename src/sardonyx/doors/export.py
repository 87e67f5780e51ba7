"""`sardonyx.export`: a module as an ONNX model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir
import sympy
import torch
from onnx_ir.tensor_adapters import TorchTensor
from torch.utils import _pytree as pytree

from sardonyx.capture.dynamic import refuse_constants, shapes_of_examples, specs_by_name
from sardonyx.capture.example import ExampleCall, fresh
from sardonyx.capture.export import Captured
from sardonyx.capture.numbers import TracedCall, refuse_constant_floats
from sardonyx.capture.partitioner import unsupported
from sardonyx.capture.regions import Result, device_of
from sardonyx.doors.call_arguments import Argument, Kind
from sardonyx.doors.program import Calling, Program
from sardonyx.engines.registry import opset_of_files
from sardonyx.errors import OptionError, VerificationError
from sardonyx.optimize.legalize import lack
from sardonyx.options import Options
from sardonyx.pipeline import build_file
from sardonyx.run.binding import Binding
from sardonyx.sizes import dim_of, dims_of
from sardonyx.telemetry.report import collecting, new_graph_report
from sardonyx.telemetry.report_page import page_of
from sardonyx.telemetry.repro import write_repro_on_error
from sardonyx.telemetry.repro_capture import write_capture_repro_on_error
from sardonyx.telemetry.source import source_of
from sardonyx.telemetry.verify import close, difference
from sardonyx.translate import functions as onnx_functions
from sardonyx.translate import inference
from sardonyx.translate.translator import NotExpressible, Translation, described, translate

log = logging.getLogger(__name__)


def export(
    model: torch.nn.Module | Callable[..., Any],
    args: Sequence[Any] | torch.Tensor = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    examples: Sequence[Any] = (),
    opset: int | None = None,
    input_names: Sequence[str] = (),
    output_names: Sequence[str] = (),
    domains: Sequence[str] | None = None,
    translations: Mapping[Any, Callable[..., Any]] | None = None,
    functions: Sequence[type[torch.nn.Module] | str] = (),
    empty_sizes: bool = False,
    **options: Any,
) -> Program:
    """Export a module, or a function of tensors, called with these arguments, as an ONNX model.

    `dynamic_shapes` says which sizes may change, as `torch.export.export` takes it; a name may stand for a `Dim`.
    `examples` are further calls of the module: what differs between them is dynamic. Each is a tuple of arguments, a
    dict of keywords, or a pair of both.

    `domains` are the operator domains beside ONNX's own that the model may use: by default those of the engine, which
    is "com.microsoft" for onnxruntime; with none of them, `()`, the model runs anywhere. `translations` are functions,
    by operator (`torch.ops.mylib.op`), that are used in place of the table's. `functions` are classes of modules, or
    their names, whose calls become calls of ONNX functions. Everything else is an option, see `Options`. With
    `native=True` groups of operators become kernels of a library, without which the model does not run: see
    `Program.library`. Functions stay as they are.

    A dynamic size may be zero. Some kernels of ONNX Runtime fail or crash on tensors without elements; the program
    avoids them by itself, and with `empty_sizes=True` the model does so in any session, by an `If` around each.

    >>> program = export(torch.nn.Linear(4, 2).eval(), (torch.ones(3, 4),), dynamic_shapes=({0: "batch"},))
    >>> program.model.graph.inputs[0].shape
    Shape([SymbolicDim('batch'), 4])
    """
    model = _as_module(model)
    chosen = _chosen(options, opset)
    args = (args,) if isinstance(args, torch.Tensor) else tuple(args)
    kwargs = dict(kwargs or {})
    chosen = Options.of(chosen, translations=translations) if translations is not None else chosen
    own = chosen.translations or {}
    with collecting() as report:
        graph_report = new_graph_report("exported", 0)
        call = args, kwargs, dynamic_shapes, examples
        with graph_report.stage("capture"), write_capture_repro_on_error(chosen, model, *call):
            traced = _trace(model, *call, own)
        with graph_report.stage("translate"):
            traced, translation = _with_numbers(traced, chosen, own)
            refuse_constant_floats(traced, examples)
        captured = traced.captured
        graph_report.operators = sum(node.op == "call_function" for node in captured.graph.graph.nodes)
        with write_repro_on_error(chosen, captured.graph, door="export", kind="exported"):
            with graph_report.stage("translate"):
                translation = translation or _translate(captured, chosen, own)
                calling = _calling(translation, traced)
                graph_report.note_own(translation.own)
                onnx_functions.make_functions(translation.model, functions)
            device = device_of(captured.graph)
            library = build_file(
                translation.model,
                device,
                chosen,
                graph_report,
                domains=domains,
                empty_sizes=empty_sizes,
                name=lambda graph: _name(graph, calling, input_names, output_names, traced.names_of_sizes()),
            )
    program = Program(translation.model, calling, device, chosen, report, library, captured)
    _warn(program, captured)
    if chosen.verify:
        _verify(program, model, args, kwargs)
    page = page_of(chosen)
    if page is not None:
        page.report_program(program, args, kwargs, model)
    return program


def _chosen(options: Mapping[str, Any], opset: int | None) -> Options:
    """The options, with an opset that onnx has and the engine takes."""
    newest = onnx.defs.onnx_opset_version()
    if opset is not None and opset > newest:
        raise OptionError(f"opset is {opset}, which this onnx does not have", hint=f"{newest} is its newest")
    chosen = Options.of(options, opset=opset)
    return Options.of(chosen, opset=opset_of_files(chosen))


def _as_module(model: Any) -> torch.nn.Module:
    if isinstance(model, torch.nn.Module):
        if model.training:
            log.warning("the model is in training mode, and is exported so; for inference call model.eval() first")
        return model
    if not callable(model):
        raise TypeError(f"export takes a module or a function, not {type(model).__name__}")
    module = torch.nn.Module()
    module.forward = model
    return module


def _trace(
    model: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dynamic_shapes: Any,
    examples: Sequence[Any],
    own: Mapping[str, Any],
) -> TracedCall:
    if examples and dynamic_shapes is not None:
        raise OptionError("both dynamic_shapes and examples are given", hint="either says what is dynamic")
    if examples:
        dynamic_shapes = shapes_of_examples(model, args, kwargs, examples)
    call = ExampleCall.of(model, args, kwargs)
    traced = TracedCall.of(call, specs_by_name(call, dynamic_shapes), own)
    refuse_constants(call, traced.captured, traced.specs, source_of)
    return traced


# From the graph to a model that holds its weights


def _with_numbers(
    traced: TracedCall, options: Options, translations: Mapping[str, Callable[..., Any]]
) -> tuple[TracedCall, Translation | None]:
    """The call with those numbers as inputs that ONNX can take, and its translation; None if there are none."""
    traced = traced.with_numbers(traced.candidates())
    while traced.call.numbers:
        try:
            return traced, _translation(traced.captured, options, translations)
        except NotExpressible as error:
            refused = traced.numbers_of([refusal.node for refusal in error.refusals]) or traced.call.numbers
            traced = traced.with_numbers(sorted(traced.call.numbers - refused))
    return traced, None


def _translate(captured: Captured, options: Options, translations: Mapping[str, Callable[..., Any]]) -> Translation:
    try:
        return _translation(captured, options, translations)
    except NotExpressible as error:
        raise unsupported(error.refusals, hint="export(..., translations={operator: function}) adds one") from error


def _translation(captured: Captured, options: Options, translations: Mapping[str, Callable[..., Any]]) -> Translation:
    outputs = _outputs(captured)
    return translate(
        captured.graph,
        opset=opset_of_files(options),
        outputs=list(outputs),
        orders=[None] * len(outputs),
        weights=captured.held,
        lack=lambda node: lack(node, opset_of_files(options), None),
        noise="nodes",
        translations=translations,
        translator=options.translator,
    )


def _calling(translation: Translation, traced: TracedCall) -> Calling:
    """Give the model its weights and inputs; how it is called."""
    captured = traced.captured
    _hold(translation, captured)
    outputs = _outputs(captured)
    return Calling(
        in_spec=captured.in_spec,
        out_spec=captured.out_spec,
        names=list(traced.call.arguments),
        arguments=_arguments(traced),
        binding=Binding(
            inputs=tuple(_keep_inputs(translation, captured)),
            results=tuple(_result(value, outputs) for value in captured.returned),
        ),
        mutated={place: _result(node, outputs) for place, node in captured.mutated.items()},
        conditions=traced.conditions(),
    )


def _arguments(traced: TracedCall) -> list[Argument]:
    nodes = traced.captured.graph.graph.find_nodes(op="placeholder")
    given = {place: nodes[index] for index, place in traced.captured.given.items()}
    return [
        Argument(path, "number", leaf)
        if at in traced.call.numbers
        else _argument(path, leaf, given[at].meta.get("val"))
        for at, (path, leaf) in enumerate(traced.call.leaves)
    ]


def _argument(path: str, leaf: Any, value: Any) -> Argument:
    if not isinstance(value, torch.Tensor):
        return Argument(path, _kind(value), leaf)
    sizes = [dim if isinstance(dim, int) else None for dim in dims_of(value)]
    return Argument(path, "tensor", None, value.dtype, sizes)


def _kind(value: Any) -> Kind:
    return "size" if isinstance(value, torch.SymInt) and not isinstance(dim_of(value), int) else "constant"


def _outputs(captured: Captured) -> dict[torch.fx.Node, int]:
    outputs: dict[torch.fx.Node, int] = {}
    for value in (*captured.returned, *captured.mutated.values()):
        if isinstance(value, torch.fx.Node):
            outputs.setdefault(value, len(outputs))
    return outputs


def _result(value: Any, outputs: Mapping[torch.fx.Node, int]) -> Result:
    if not isinstance(value, torch.fx.Node):
        return Result(constant=value)
    val = value.meta.get("val")
    if not isinstance(val, torch.Tensor):
        return Result(outputs[value], number=True)
    return Result(outputs[value], complex=val.dtype.is_complex)


def _hold(translation: Translation, captured: Captured) -> None:
    """Give weights the names they have in the module, and their tensors; a tensor that has two names is one weight."""
    graph = translation.model.graph
    values = {index: graph.initializers[placeholder] for placeholder, index in translation.weights.items()}
    for i in reversed(range(len(translation.inputs))):  # complex and empty ones, which are no constants
        if translation.inputs[i] in captured.held:
            values[translation.inputs.pop(i)] = graph.inputs.pop(i)
    first: dict[Any, ir.Value] = {}
    for index, value in values.items():
        name, tensor = captured.held[index]
        tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor.resolve_neg()
        same = first.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype), value)
        if same is value or not tensor.numel():
            graph.initializers.pop(str(value.name), None)
            value.name, value.const_value = name, TorchTensor(tensor.detach(), name=name)
            graph.register_initializer(value)
        else:
            ir.convenience.replace_all_uses_with(value, same)
            del graph.initializers[str(value.name)]
    translation.weights.clear()


def _keep_inputs(translation: Translation, captured: Captured) -> list[int]:
    """Inputs for all tensors that the caller gives, used or not, in the caller's order; their places."""
    graph = translation.model.graph
    have = dict(zip(translation.inputs, graph.inputs, strict=True))
    wanted = []
    for index, placeholder in enumerate(captured.graph.graph.find_nodes(op="placeholder")):
        if index in captured.given and isinstance(placeholder.meta.get("val"), torch.Tensor) and index not in have:
            have[index] = described(placeholder.name, placeholder.meta["val"])
        if index in have:
            wanted.append(index)
    graph.inputs[:] = [have[index] for index in wanted]
    translation.inputs[:] = wanted
    return [captured.given[index] for index in wanted]


# Names


def _name(
    graph: ir.Graph,
    calling: Calling,
    input_names: Sequence[str],
    output_names: Sequence[str],
    sizes: Mapping[sympy.Symbol, str],
) -> None:
    ends = {id(value) for value in (*graph.inputs, *graph.outputs)}
    inner = (value for node in graph for value in node.outputs if id(value) not in ends)
    taken = {str(name) for name in graph.initializers} | {str(value.name) for value in inner}
    _rename(graph.inputs, input_names or [str(x.name) for x in graph.inputs], "input", taken)
    _rename(graph.outputs, _output_names(calling, output_names, graph), "output", taken)
    if sizes:
        _name_sizes(graph, sizes)


def _rename(values: Sequence[ir.Value], names: Sequence[str], what: str, taken: set[str]) -> None:
    if len(names) != len(values):
        raise OptionError(f"{len(names)} {what} names are given for {len(values)} {what}s")
    for value, name in zip(values, names, strict=True):
        unique, number = name, 1
        while unique in taken:
            unique, number = f"{name}_{number}", number + 1
        taken.add(unique)
        value.name = unique


def _output_names(calling: Calling, given: Sequence[str], graph: ir.Graph) -> list[str]:
    """The names that are given to results, or follow from where they are; those of edited arguments follow them."""
    names = _paths(calling, len(graph.outputs))
    unnamed = {place for place, name in enumerate(names) if not name}
    for place, output in _mutated_outputs(calling):
        source = graph.inputs[calling.binding.inputs.index(place)]
        names[output] = names[output] or f"{source.name}_mutated"
    if len(given) == len(names) - len(unnamed):
        return [*given, *names[len(given) :]]
    return list(given) or names


def _mutated_outputs(calling: Calling) -> list[tuple[int, int]]:
    """The place of each argument that the module edits, and the output that has the new value."""
    return [(place, result.output) for place, result in calling.mutated.items() if result.output is not None]


def _paths(calling: Calling, count: int) -> list[str]:
    """Names of outputs from where they are in the results: "logits", "hidden_states_0", "output"."""
    results = calling.binding.results
    marks = pytree.tree_unflatten(list(range(len(results))), calling.out_spec)
    names = [""] * count
    for path, place in pytree.tree_flatten_with_path(marks)[0]:
        output = results[place].output
        if output is not None and not names[output]:
            parts = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", "")))) for key in path]
            names[output] = "_".join(p for p in parts if p) if parts else "output"
            if names[output][:1].isdigit():
                names[output] = f"output_{names[output]}"
    return names


def _name_sizes(graph: ir.Graph, names: Mapping[sympy.Symbol, str]) -> None:
    """Write symbolic sizes with the user's names."""
    symbols = {symbol: sympy.Symbol(name, **symbol.assumptions0) for symbol, name in names.items()}
    values = [*graph.inputs, *(value for node in graph for value in node.outputs)]
    for value in values:
        dims = value.meta.get("dims")
        if dims is not None and not all(isinstance(dim, int) for dim in dims):
            inference.set_dims(value, tuple(d if isinstance(d, int) else d.xreplace(symbols) for d in dims))


# The rest of the way


def _verify(program: Program, model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    with torch.no_grad():
        expected, results = (_results(run, args, kwargs) for run in (model, program))
    for index, (got, want) in enumerate(zip(results, expected, strict=True)):
        if isinstance(want, torch.Tensor) and not close(got, want):
            raise VerificationError(
                f"output {index} differs from PyTorch by {difference(got, want):.2e} of its magnitude",
                hint="sardonyx.diagnose.bisect, or `sardonyx bisect`, says whether a rewrite rule is the cause",
            )


def _results(run: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The flattened results of a call, and what it leaves in its arguments."""
    args, kwargs = fresh(args, kwargs)
    return pytree.tree_leaves((run(*args, **kwargs), args, kwargs))


def _warn(program: Program, captured: Captured) -> None:
    """Tell what a file cannot do: edit what it is called with or what it holds, or check its sizes."""
    for condition in program.calling.conditions:
        if condition.where:
            log.warning("the exported model is for calls with %s alone, decided at %s", condition.text, condition.where)
    for name in captured.buffers:
        log.warning("the exported model does not update the buffer %s", name)
    for place, output in _mutated_outputs(program.calling):
        log.warning(
            "the model edits its argument %s in place, which a file cannot: its output %s is the new value. "
            "The program copies that into the argument",
            program.calling.arguments[place].path,
            program.outputs[output],
        )
