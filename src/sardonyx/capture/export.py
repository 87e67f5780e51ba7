"""torch.export: from a module and example arguments to one functional graph of ATen operators.

The graph of torch.export is translated without decomposing it where our table can: decomposing all of it, as torch's
own exporter does, takes longer than everything else. Only operators without a translation are decomposed, in place.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import UnsupportedOperatorException
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, OutputSpec
from torch.utils import _pytree as pytree
from torch.utils._sympy.value_ranges import ValueRanges

from sardonyx.capture.aot import decompositions
from sardonyx.capture.composite_ops import preserve_composite_ops
from sardonyx.capture.conditions import (
    innermost_user_line,
    record_integers,
    record_small_sizes,
    record_specializations,
)
from sardonyx.capture.fake_graph import has_fake_arguments, trace_fake_graph
from sardonyx.capture.surgery import (
    decompose_composite,
    drop_inactive_dropout,
    functionalize_simple_edits,
    inline_wrappers,
    is_functorch_transform,
    mutates,
)
from sardonyx.capture.views import copies_of_more_than_one, rebase_as_strided
from sardonyx.errors import CaptureError
from sardonyx.telemetry.source import source_of
from sardonyx.translate import table

DYNAMIC_SHAPES_HINT = "give dynamic_shapes an entry per argument, by position or name; None if no size of it is dynamic"


@dataclass(frozen=True)
class Captured:
    """A captured graph, with the meaning of its placeholders and results."""

    graph: torch.fx.GraphModule
    weights: Mapping[int, tuple[str, torch.Tensor]]
    """Placeholders that are parameters, buffers or constants: the name in the module and the tensor."""
    inputs: Mapping[int, int]
    """Placeholders that are arguments: the index of the flattened argument."""
    returned: tuple[torch.fx.Node | Any, ...]
    """The flattened results: nodes, and constant values."""
    mutated: Mapping[int, torch.fx.Node]
    """The new value of each flattened argument that the call modifies in place."""
    buffers: Sequence[str]
    """Buffers that the call updates."""
    specialized: Mapping[sympy.Symbol, torch.fx.Node | str]
    """Sizes that became constants: the line, or the operator whose decomposition, that made them so."""
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    decisions: Sequence[tuple[sympy.Expr, str]] = ()
    """What the trace decided for dynamic sizes of two or more, without a guard, and the line that asked."""
    equations: Sequence[tuple[sympy.Expr, str]] = ()
    """What the trace took for an integer, as equations, and the line that did."""


def capture(
    model: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dynamic_shapes: Any = None,
    preserved: Collection[str] = (),
    *,
    empty: bool = False,
) -> Captured:
    """Trace the module with these arguments; `dynamic_shapes` is that of torch.export.

    Operators of our table and those named in `preserved` are not decomposed. With `empty` the graph also works for
    dynamic sizes of zero, unless `Dim(..., min=1)` excludes them.
    """
    if has_fake_arguments(args, kwargs):
        return _capture_fake_graph(model, args, kwargs, frozenset(preserved))
    with record_specializations() as lines, record_small_sizes() as decisions, record_integers() as equations:
        program = _run_torch_export(model, tuple(args), dict(kwargs), dynamic_shapes, lines)
    if any(map(mutates, program.graph.nodes)):  # an edit of a copy is not seen in its source
        decisions += [(decision, source_of(node)) for decision, node in copies_of_more_than_one(program.graph)]
    drop_inactive_dropout(program.graph_module)
    functionalize_simple_edits(program.graph_module)
    if any(mutates(node) or is_functorch_transform(node) for node in program.graph.nodes):
        program = _functionalize(program, preserved)
    graph = program.graph_module
    inline_wrappers(graph)
    constants: dict[sympy.Symbol, torch.fx.Node | str] = {**lines, **decompose_composite(graph, preserved)}
    _require_functional(graph)
    rebase_as_strided(graph.graph)
    if empty:
        _allow_empty_sizes(program)
    captured = _describe(program, graph, constants)
    return replace(captured, decisions=tuple(dict.fromkeys(decisions)), equations=tuple(dict.fromkeys(equations)))


def _capture_fake_graph(model: torch.nn.Module, args: Any, kwargs: Any, preserved: frozenset[str]) -> Captured:
    """Capture a graph that a backend received: its weights are arguments, and its sizes are already symbols."""
    try:
        graph, in_spec, out_spec = trace_fake_graph(model, args, kwargs, preserved)
    except Exception as error:
        raise CaptureError(
            f"a graph with fake arguments cannot be traced: {error}",
            hint="pass tensors, and integers instead of SymInts; declare dynamic sizes by dynamic_shapes",
        ) from error
    specialized = decompose_composite(graph, preserved)
    inputs = {index: index for index, _ in enumerate(graph.graph.find_nodes(op="placeholder"))}
    returned: Any = graph.graph.output_node().args[0]
    return Captured(graph, {}, inputs, tuple(returned), {}, (), specialized, in_spec, out_spec)


def _require_functional(graph: torch.fx.GraphModule) -> None:
    """Refuse in-place operators that are left: stages behind this one assume that there are none."""
    left = next(filter(mutates, graph.graph.nodes), None)
    if left is not None:
        raise CaptureError(
            f"{left.target} modifies a tensor in place, which could not be replaced",
            hint='use torch.compile(model, backend="sardonyx"), or write it without the in-place operator',
        )


def _allow_empty_sizes(program: ExportedProgram) -> None:
    """Lower the range of dynamic sizes to zero: torch.export sets the minimum 2 unless another is declared."""
    for node in program.graph.find_nodes(op="placeholder"):
        for size in getattr(node.meta.get("val"), "shape", ()):
            if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
                ranges, symbol = size.node.shape_env.var_to_range, size.node.expr
                declared = program.range_constraints.get(symbol, ranges[symbol])
                lower = 0 if declared.lower == 2 else declared.lower
                ranges[symbol] = ValueRanges(lower, declared.upper)


def _run_torch_export(
    model: torch.nn.Module, args: Any, kwargs: Any, dynamic_shapes: Any, lines: Mapping[sympy.Symbol, str]
) -> ExportedProgram:
    try:
        with torch.no_grad(), preserve_composite_ops(), _restore_dynamic_marks(args, kwargs):
            return torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)
    except Exception as error:
        raise _capture_error(error, lines) from error


@contextmanager
def _restore_dynamic_marks(args: Any, kwargs: Any) -> Iterator[None]:
    """Restore the caller's marks of dynamic sizes on the example tensors.

    torch.export deletes them, and does not remove its own when it fails.
    """
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    before = [_dynamic_marks(x) for x in tensors]
    try:
        yield
    finally:
        for tensor, marks in zip(tensors, before, strict=True):
            for name in _dynamic_marks(tensor):
                delattr(tensor, name)
            for name, value in marks.items():
                setattr(tensor, name, value)


def _dynamic_marks(tensor: torch.Tensor) -> dict[str, Any]:
    return {name: copy(value) for name, value in vars(tensor).items() if "_dynamo_" in name or name == "_specialize_on"}


def _functionalize(program: ExportedProgram, preserved: Collection[str]) -> ExportedProgram:
    """Remove in-place operators by torch's functionalization."""
    rules = {target: rule for target, rule in decompositions().items() if table.name_of(target) not in preserved}
    try:
        functional: ExportedProgram = program.run_decompositions(rules)
    except Exception as error:
        raise _capture_error(error, {}) from error
    return functional


# Errors


def _capture_error(error: Exception, constants: Mapping[sympy.Symbol, str]) -> CaptureError:
    text = str(error).strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    what = next((line for line in lines if line.startswith(_SIZE_ERROR)), lines[0] if lines else type(error).__name__)
    if _CHANGES_SHAPE in text:
        what = "it changes the shape of an argument in place, as t_() and squeeze_() do"
    where = _specializing_line(error, constants) or _user_line(error) or _user_line_in_message(text)
    return CaptureError(f"torch.export cannot capture the model: {what}", where=where, hint=_suggest_fix(text, error))


_SIZE_ERROR = "- You marked"
"""Prefix of the line in torch's message that says which size cannot be dynamic, and why."""


_CHANGES_SHAPE = "num_mutated_inp_runtime_indices"
"""Text of torch's assertion that fails when the shape of an argument changes in place."""


def _suggest_fix(text: str, error: Exception) -> str:
    if _SIZE_ERROR in text:
        return "that size cannot be dynamic in this model: remove it from dynamic_shapes"
    if "Suggested fixes" in text:
        suggested = text.split("Suggested fixes", 1)[1].lstrip(":\n ").splitlines()
        return "; ".join(line.strip() for line in suggested if line.strip())
    if "dynamic_shapes" in text:
        return DYNAMIC_SHAPES_HINT
    if "register a pytree" in text:
        return "return tensors, or tuples and dicts of them (for a transformers model: use_cache=False)"
    without_fake = _operator_without_fake(text, error)
    if without_fake is not None:
        return (
            f"{without_fake} has no fake kernel: pass shape= to sardonyx.custom_op({without_fake}, ...), "
            "or register one by torch.library.register_fake"
        )
    if "data-dependent" in text:
        return "control flow depends on a tensor's value: use torch.cond, torch.where, or torch._check for a size"
    return 'change that line, or use torch.compile(model, backend="sardonyx"), which can run parts in torch'


def _operator_without_fake(text: str, error: Exception) -> str | None:
    """Return the operator, `torch.ops.mylib.op`, that has no fake kernel, if that is the error."""
    if isinstance(error, UnsupportedOperatorException):
        return f"torch.ops.{error.func}".removesuffix(".default")
    if "tracing into a custom kernel" in text:
        return "torch.ops.mylib.op"  # a placeholder: torch's message has no name
    match = re.search(r"no fake impl registered for <CustomOpDef\((\w+)::(\w+)\)>", text)
    return None if match is None else f"torch.ops.{match[1]}.{match[2]}"


def _user_line(error: BaseException) -> str | None:
    return innermost_user_line(traceback.extract_tb(error.__traceback__))


def _user_line_in_message(text: str) -> str | None:
    """Return the user's line from the stack trace in torch's message about a node."""
    frames = re.findall(r'File "(.+?)", line (\d+), in (\S+)\n\s*(.*)', text)
    return innermost_user_line(
        [traceback.FrameSummary(file, int(at), name, line=line) for file, at, name, line in frames]
    )


def _specializing_line(error: BaseException, lines: Mapping[sympy.Symbol, str]) -> str | None:
    """Return the line that made a size a constant; torch raises only at the end of the trace, without that line."""
    from torch.fx.experimental.symbolic_shapes import ConstraintViolationError, ShapeEnv  # takes a while to import

    violation = error.__context__
    if not isinstance(violation, ConstraintViolationError):
        return None
    frames = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(violation.__traceback__)]
    environment = next((local for local in frames if isinstance(local, ShapeEnv)), None)
    if environment is None:
        return None
    named = [symbol for source, symbol in environment.source_to_var.items() if source in str(violation)]
    return next((lines[symbol] for symbol in (*named, *lines) if symbol in lines), None)


# Inputs and outputs of the graph


def _describe(
    program: ExportedProgram, graph: torch.fx.GraphModule, specialized: Mapping[sympy.Symbol, torch.fx.Node | str]
) -> Captured:
    weights: dict[int, tuple[str, torch.Tensor]] = {}
    inputs: dict[int, int] = {}
    for index, spec in enumerate(program.graph_signature.input_specs):
        if spec.kind == InputKind.USER_INPUT:
            inputs[index] = len(inputs)
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            assert spec.target is not None
            weights[index] = (spec.target, _weight_tensor(program, spec.target))
        else:
            raise CaptureError(f"the model has {spec.target}, which is not a tensor")
    in_spec, out_spec = program.call_spec.in_spec, program.call_spec.out_spec
    assert in_spec is not None
    assert out_spec is not None
    return Captured(
        graph=graph,
        weights=weights,
        inputs=inputs,
        returned=_returned_values(program, graph),
        mutated=_mutated_inputs(program, graph, inputs),
        buffers=[str(spec.target) for spec, _ in _outputs(program, graph, OutputKind.BUFFER_MUTATION)],
        specialized=specialized,
        in_spec=in_spec,
        out_spec=out_spec,
    )


def _weight_tensor(program: ExportedProgram, name: str) -> torch.Tensor:
    tensor = program.state_dict[name] if name in program.state_dict else program.constants[name]
    assert isinstance(tensor, torch.Tensor)
    return tensor


def _outputs(program: ExportedProgram, graph: torch.fx.GraphModule, kind: OutputKind) -> list[tuple[OutputSpec, Any]]:
    nodes: Any = graph.graph.output_node().args[0]
    specs = program.graph_signature.output_specs
    return [(spec, node) for spec, node in zip(specs, nodes, strict=True) if spec.kind == kind]


def _returned_values(program: ExportedProgram, graph: torch.fx.GraphModule) -> tuple[Any, ...]:
    outputs = _outputs(program, graph, OutputKind.USER_OUTPUT)
    return tuple(spec.arg.value if isinstance(spec.arg, ConstantArgument) else node for spec, node in outputs)


def _mutated_inputs(
    program: ExportedProgram, graph: torch.fx.GraphModule, inputs: Mapping[int, int]
) -> dict[int, torch.fx.Node]:
    names = {spec.arg.name: inputs[i] for i, spec in enumerate(program.graph_signature.input_specs) if i in inputs}
    return {names[str(spec.target)]: node for spec, node in _outputs(program, graph, OutputKind.USER_INPUT_MUTATION)}
