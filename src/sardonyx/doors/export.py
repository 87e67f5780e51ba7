"""`sardonyx.export`: a module as an ONNX model."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import onnx_ir as ir
import sympy
import torch
from onnx_ir.tensor_adapters import TorchTensor
from torch.utils import _pytree as pytree

from sardonyx.capture.dynamic import parse_example, refuse_constants, shapes_of_examples, specs_by_name
from sardonyx.capture.example import ExampleCall, as_module, clone_tensors
from sardonyx.capture.export import Captured
from sardonyx.capture.number_inputs import TracedCall, refuse_constant_floats
from sardonyx.capture.partitioner import unsupported
from sardonyx.capture.regions import Result, device_of
from sardonyx.doors.call_arguments import Argument, ArgumentKind
from sardonyx.doors.program import CallSpec, Program, calibration_calls, calibration_inputs
from sardonyx.engines.registry import opset_of_files
from sardonyx.errors import OptionError, VerificationError
from sardonyx.optimize.legalize import unsupported_reason
from sardonyx.options import Options, check_keywords
from sardonyx.pipeline import build_file
from sardonyx.precision.metric import relative_error
from sardonyx.run.binding import Binding
from sardonyx.sizes import dim_of, dims_of
from sardonyx.telemetry.report import GraphReport, collecting, new_graph_report
from sardonyx.telemetry.report_page import page_of
from sardonyx.telemetry.repro import write_repro_on_error
from sardonyx.telemetry.repro_capture import write_capture_repro_on_error
from sardonyx.telemetry.source import source_of
from sardonyx.telemetry.verify import close, difference
from sardonyx.translate import functions as onnx_functions
from sardonyx.translate import inference
from sardonyx.translate.translator import NotExpressible, Translation, translate, value_from_fx

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
    calibration: Iterable[Any] = (),
    **options: Any,
) -> Program:
    """Export a module, or a function of tensors, called with these arguments, as an ONNX model.

    `dynamic_shapes` declares the dynamic sizes as for `torch.export.export`; a string may replace a `Dim`. `examples`
    are further calls of the module: sizes that differ between them are dynamic. Each is a tuple of arguments, a dict of
    keywords, or a pair of both.

    `domains` are the operator domains, in addition to ONNX's own, that the model may use: by default those of the
    engine ("com.microsoft" for onnxruntime); with `()` the model runs anywhere. `translations` are functions, by
    operator (`torch.ops.mylib.op`), that replace those of the table. `functions` are module classes, or their names,
    whose calls become calls of ONNX functions. Other keywords are options, see `Options`. With `native=True` groups of
    operators become kernels of a library that the model needs to run: see `Program.library`.

    A dynamic size may be zero. Some kernels of ONNX Runtime fail or crash on tensors without elements; the program
    avoids them, and with `empty_sizes=True` the model does so in any session, by an `If` around each.

    With `precision` layers become standard operators in fewer bits, as far as results stay within `max_drop` of those
    in float32 in the calls of `calibration`, each given like one of `examples`; by default in the call exported.

    >>> program = export(torch.nn.Linear(4, 2).eval(), (torch.ones(3, 4),), dynamic_shapes=({0: "batch"},))
    >>> program.model.graph.inputs[0].shape
    Shape([SymbolicDim('batch'), 4])
    """
    check_keywords(options, export)
    model, chosen = _as_module(model), _chosen(options, opset, translations)
    _check_functions(functions, chosen)
    calls = calibration_calls(calibration)
    if calls:
        chosen.require_precision("calibration")
    args, kwargs = (args,) if isinstance(args, torch.Tensor) else tuple(args), dict(kwargs or {})
    with collecting() as report:
        graph_report = new_graph_report("exported", 0)
        traced, translation = _captured(model, (args, kwargs, dynamic_shapes, examples), chosen, graph_report)
        captured, device = traced.captured, device_of(traced.captured.graph)
        with write_repro_on_error(chosen, captured.graph, door="export", kind="exported"):
            with graph_report.stage("translate"):
                translation = translation or _translate(captured, chosen)
                call_spec = _call_spec(translation, traced)
                graph_report.note_own(translation.own)
                onnx_functions.make_functions(translation.model, functions)
            feeds = _calibration(call_spec, calls, args, kwargs) if chosen.precision != "float32" else []
            library = build_file(
                translation.model,
                device,
                chosen,
                graph_report,
                domains=domains,
                empty_sizes=empty_sizes,
                name=lambda graph: _name(graph, call_spec, input_names, output_names, traced.names_of_sizes()),
                calibration=feeds,
            )
    program = Program(translation.model, call_spec, device, chosen, report, library, captured)
    _check(program, model, args, kwargs, chosen)
    return program


def _check_functions(functions: Sequence[Any], options: Options) -> None:
    if functions and options.precision != "float32":
        raise OptionError(
            f"precision={options.precision!r} with functions=",
            hint="leave out one of them: layers inside ONNX functions stay in float32",
        )


def _chosen(options: Mapping[str, Any], opset: int | None, translations: Mapping[Any, Any] | None) -> Options:
    """Return the options, with the opset of the engine unless they set one."""
    chosen = Options.of(options, opset=opset)
    own = {} if translations is None else {"translations": translations}
    return Options.of(chosen, opset=opset_of_files(chosen), **own)


def _calibration(
    call_spec: CallSpec, calls: Iterable[Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[list[torch.Tensor]]:
    """Return the model's inputs in the calibration calls; by default in the call exported."""
    parsed = [_calibration_call(call_spec, call, args, kwargs) for call in calls]
    return [calibration_inputs(call_spec, *call) for call in parsed or [(tuple(args), dict(kwargs))]]


def _calibration_call(
    call_spec: CallSpec, call: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the arguments of a call; those that a dict does not name are the example's."""
    if not isinstance(call, Mapping):
        return parse_example(call, args, kwargs)
    names = list(call_spec.names)
    if not set(call) <= set(names):
        raise OptionError(f"a call of calibration= has {sorted(set(call) - set(names))}, and the model takes {names}")
    values = {**dict(zip(names, args, strict=False)), **kwargs, **call}
    return [values[name] for name in names[: len(args)]], {name: values[name] for name in names[len(args) :]}


def _as_module(model: Any) -> torch.nn.Module:
    if isinstance(model, torch.nn.Module):
        if model.training:
            log.warning("the model is exported in training mode; for inference call model.eval() first")
        return model
    if not callable(model):
        raise TypeError(f"export takes a module or a function, not {type(model).__name__}")
    return as_module(model)


_Call: TypeAlias = tuple[Sequence[Any], Mapping[str, Any], Any, Sequence[Any]]
"""Arguments, keywords, `dynamic_shapes` and further examples."""


def _captured(
    model: torch.nn.Module, call: _Call, options: Options, report: GraphReport
) -> tuple[TracedCall, Translation | None]:
    """The call traced, with the numbers as inputs that can be; and its translation, if that had to be made to tell."""
    with report.stage("capture"), write_capture_repro_on_error(options, model, *call):
        traced = _trace(model, call, options)
    with report.stage("translate"):
        traced, translation = _with_numbers(traced, options)
        refuse_constant_floats(traced, call[-1])
    report.operators = sum(node.op == "call_function" for node in traced.captured.graph.graph.nodes)
    return traced, translation


def _trace(model: torch.nn.Module, call: _Call, options: Options) -> TracedCall:
    args, kwargs, dynamic_shapes, examples = call
    if examples and dynamic_shapes is not None:
        raise OptionError("both dynamic_shapes and examples are given", hint="use one of them to declare dynamic sizes")
    if examples:
        dynamic_shapes = shapes_of_examples(model, args, kwargs, examples)
    example = ExampleCall.of(model, args, kwargs)
    traced = TracedCall.of(example, specs_by_name(example, dynamic_shapes), options.translations or {})
    refuse_constants(example, traced.captured, traced.specs, source_of)
    return traced


# Translation


def _with_numbers(traced: TracedCall, options: Options) -> tuple[TracedCall, Translation | None]:
    """Return the call with the numbers as inputs that ONNX supports, and its translation; None if there are none."""
    traced = traced.with_numbers(traced.candidates())
    while traced.call.numbers:
        try:
            return traced, _translation(traced.captured, options)
        except NotExpressible as error:
            refused = traced.numbers_of([refusal.node for refusal in error.refusals]) or traced.call.numbers
            traced = traced.with_numbers(sorted(traced.call.numbers - refused))
    return traced, None


def _translate(captured: Captured, options: Options) -> Translation:
    try:
        return _translation(captured, options)
    except NotExpressible as error:
        raise unsupported(error.refusals, hint="export(..., translations={operator: function}) adds one") from error


def _translation(captured: Captured, options: Options) -> Translation:
    outputs = _outputs(captured)
    return translate(
        captured.graph,
        opset=opset_of_files(options),
        outputs=list(outputs),
        orders=[None] * len(outputs),
        weights=captured.weights,
        unsupported_reason=lambda node: unsupported_reason(node, opset_of_files(options), None),
        random_mode="nodes",
        translations=options.translations,
        translator=options.translator,
    )


def _call_spec(translation: Translation, traced: TracedCall) -> CallSpec:
    """Attach weights and inputs to the model, and return its call spec."""
    captured = traced.captured
    _attach_weights(translation, captured)
    outputs = _outputs(captured)
    return CallSpec(
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
    placeholders = {place: nodes[index] for index, place in traced.captured.inputs.items()}
    return [
        Argument(path, "number", leaf)
        if at in traced.call.numbers
        else _argument(path, leaf, placeholders[at].meta.get("val"))
        for at, (path, leaf) in enumerate(traced.call.leaves)
    ]


def _argument(path: str, leaf: Any, value: Any) -> Argument:
    if not isinstance(value, torch.Tensor):
        return Argument(path, _kind(value), leaf)
    sizes = [dim if isinstance(dim, int) else None for dim in dims_of(value)]
    return Argument(path, "tensor", None, value.dtype, sizes)


def _kind(value: Any) -> ArgumentKind:
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


def _attach_weights(translation: Translation, captured: Captured) -> None:
    """Attach the tensors of weights, with their names in the module; tied weights become one initializer."""
    graph = translation.model.graph
    values = {index: graph.initializers[placeholder] for placeholder, index in translation.weights.items()}
    for i in reversed(range(len(translation.inputs))):  # complex and empty weights, which are inputs
        if translation.inputs[i] in captured.weights:
            values[translation.inputs.pop(i)] = graph.inputs.pop(i)
    first: dict[Any, ir.Value] = {}
    for index, value in values.items():
        name, tensor = captured.weights[index]
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
    """Make inputs of all tensor arguments, also unused ones, in the caller's order; return their indices."""
    graph = translation.model.graph
    inputs = dict(zip(translation.inputs, graph.inputs, strict=True))
    wanted = []
    for index, placeholder in enumerate(captured.graph.graph.find_nodes(op="placeholder")):
        if index in captured.inputs and isinstance(placeholder.meta.get("val"), torch.Tensor) and index not in inputs:
            inputs[index] = value_from_fx(placeholder.name, placeholder.meta["val"])
        if index in inputs:
            wanted.append(index)
    graph.inputs[:] = [inputs[index] for index in wanted]
    translation.inputs[:] = wanted
    return [captured.inputs[index] for index in wanted]


# Names


def _name(
    graph: ir.Graph,
    call_spec: CallSpec,
    input_names: Sequence[str],
    output_names: Sequence[str],
    sizes: Mapping[sympy.Symbol, str],
) -> None:
    ends = {id(value) for value in (*graph.inputs, *graph.outputs)}
    inner = (value for node in graph for value in node.outputs if id(value) not in ends)
    taken = {str(name) for name in graph.initializers} | {str(value.name) for value in inner}
    _rename(graph.inputs, input_names or [str(x.name) for x in graph.inputs], "input", taken)
    _rename(graph.outputs, _output_names(call_spec, output_names, graph), "output", taken)
    if sizes:
        _name_sizes(graph, sizes)


def _rename(values: Sequence[ir.Value], names: Sequence[str], what: str, taken: set[str]) -> None:
    if len(names) != len(values):
        raise OptionError(f"{len(names)} {what} names are given, but the model has {len(values)} {what}s")
    for value, name in zip(values, names, strict=True):
        unique, number = name, 1
        while unique in taken:
            unique, number = f"{name}_{number}", number + 1
        taken.add(unique)
        value.name = unique


def _output_names(call_spec: CallSpec, user_names: Sequence[str], graph: ir.Graph) -> list[str]:
    """Return the names of outputs: the user's, or those of their paths; mutated arguments come last."""
    names = _names_from_paths(call_spec, len(graph.outputs))
    unnamed = {place for place, name in enumerate(names) if not name}
    for place, output in _mutated_outputs(call_spec):
        source = graph.inputs[call_spec.binding.inputs.index(place)]
        names[output] = names[output] or f"{source.name}_mutated"
    if len(user_names) == len(names) - len(unnamed):
        return [*user_names, *names[len(user_names) :]]
    return list(user_names) or names


def _mutated_outputs(call_spec: CallSpec) -> list[tuple[int, int]]:
    """Return the index of each argument that the module modifies in place, and the output with its new value."""
    return [(place, result.output) for place, result in call_spec.mutated.items() if result.output is not None]


def _names_from_paths(call_spec: CallSpec, count: int) -> list[str]:
    """Return names of outputs from their paths in the results: "logits", "hidden_states_0", "output"."""
    results = call_spec.binding.results
    marks = pytree.tree_unflatten(list(range(len(results))), call_spec.out_spec)
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
    """Rename symbolic sizes to the user's names."""
    symbols = {symbol: sympy.Symbol(name, **symbol.assumptions0) for symbol, name in names.items()}
    values = [*graph.inputs, *(value for node in graph for value in node.outputs)]
    for value in values:
        dims = value.meta.get("dims")
        if dims is not None and not all(isinstance(dim, int) for dim in dims):
            inference.set_dims(value, tuple(d if isinstance(d, int) else d.xreplace(symbols) for d in dims))


# Verification and warnings


def _check(
    program: Program, model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], options: Options
) -> None:
    """Warn of what a file cannot do; compare it with the module and add it to the HTML report, where asked to."""
    _warn(program)
    if options.verify:
        _verify(program, model, args, kwargs, _bound(program, options))
    page = page_of(options)
    if page is not None:
        page.report_program(program, args, kwargs, model)


def _bound(program: Program, options: Options) -> float:
    """Return how far results in lower precision may be from PyTorch's; as far as any, if the user measures it."""
    choice = program.report.precision
    if choice is None or choice.is_float32:
        return 0.0
    return math.inf if options.metric is not None else options.max_drop * _ROUNDING


_ROUNDING = 1.01
"""What the rounding of float32 may add to a drop, which is relative to the model in float32 and not to PyTorch."""


def _verify(
    program: Program, model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], bound: float
) -> None:
    with torch.no_grad():
        expected, results = (_results(run, args, kwargs) for run in (model, program))
    for index, (got, want) in enumerate(zip(results, expected, strict=True)):
        if isinstance(want, torch.Tensor) and not (close(got, want) or _is_within(got, want, bound)):
            raise VerificationError(
                f"output {index} differs from PyTorch by {difference(got, want):.2e} of its magnitude",
                hint="sardonyx.diagnose.bisect, or `sardonyx bisect`, says whether a rewrite rule is the cause",
            )


def _is_within(got: torch.Tensor, want: torch.Tensor, bound: float) -> bool:
    return bound > 0 and want.is_floating_point() and relative_error(got, want) <= bound


def _results(run: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the flattened results of a call, and its arguments after it."""
    args, kwargs = clone_tensors(args, kwargs)
    return pytree.tree_leaves((run(*args, **kwargs), args, kwargs))


def _warn(program: Program) -> None:
    """Warn of what a file cannot do: modify arguments and buffers in place, or check sizes."""
    for condition in program.call_spec.conditions:
        if condition.where:
            log.warning("the exported model is only valid for %s, because of %s", condition.text, condition.where)
    for name in program.captured.buffers if program.captured else ():
        log.warning("the exported model does not update the buffer %s", name)
    for place, output in _mutated_outputs(program.call_spec):
        log.warning(
            "the model modifies its argument %s in place, which a file cannot: its output %s is the new value. "
            "The program copies it into the argument",
            program.call_spec.arguments[place].path,
            program.outputs[output],
        )
