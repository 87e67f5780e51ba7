"""torch.export: from a module and example arguments to one graph of ATen operators that edits nothing in place.

What torch.export gives is translated as it is where our table can: taking everything apart, as torch's own exporter
does, costs more than all the rest. Only operators without a translation are taken apart, each where it stands.
"""

from __future__ import annotations

import inspect
import logging
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sympy
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.utils import _pytree as pytree

from sardonyx.capture.aot import decompositions
from sardonyx.capture.faked import is_faked, trace_faked
from sardonyx.capture.surgery import drop_idle_dropout, edits, inline_wrappers, take_apart, without_simple_edits
from sardonyx.capture.whole import keeping_whole
from sardonyx.errors import CaptureError
from sardonyx.translate import table
from sardonyx.translate.sizes import dim_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Captured:
    """A graph, what its placeholders are, and how the module is called."""

    graph: torch.fx.GraphModule
    held: Mapping[int, tuple[str, torch.Tensor]]
    """Placeholders that are parameters, buffers or constants: each one's name in the module, and its tensor."""
    given: Mapping[int, int]
    """Placeholders that the caller gives: each one's place among the flattened arguments."""
    returned: tuple[torch.fx.Node | Any, ...]
    """The flattened results: nodes, and values that are the same on every call."""
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec


def capture(
    model: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dynamic_shapes: Any = None,
    whole: Collection[str] = (),
) -> Captured:
    """Trace the module with these arguments; what is dynamic is said as torch.export takes it.

    Operators named in `whole` stay as they are, beside those of our table.
    """
    if is_faked(args, kwargs):
        return _faked(model, args, kwargs, frozenset(whole))
    program = _exported(model, tuple(args), dict(kwargs), dynamic_shapes)
    drop_idle_dropout(program.graph_module)
    without_simple_edits(program.graph_module)
    if any(edits(node) for node in program.graph.nodes):
        rules = {target: rule for target, rule in decompositions().items() if table.name_of(target) not in whole}
        program = program.run_decompositions(rules)
    graph = program.graph_module
    inline_wrappers(graph)
    take_apart(graph, whole)
    return _described(program, graph)


def _faked(model: torch.nn.Module, args: Any, kwargs: Any, whole: frozenset[str]) -> Captured:
    """A graph as a backend is handed it: its weights are arguments, and its sizes symbols already."""
    try:
        graph, in_spec, out_spec = trace_faked(model, args, kwargs, whole)
    except Exception as error:
        raise CaptureError(
            f"a graph with fake arguments cannot be traced: {error}",
            hint="pass tensors, and integers in the place of SymInts; dynamic_shapes says which sizes may change",
        ) from error
    take_apart(graph, whole)
    given = {index: index for index, _ in enumerate(graph.graph.find_nodes(op="placeholder"))}
    returned: Any = graph.graph.output_node().args[0]
    return Captured(graph, {}, given, tuple(returned), in_spec, out_spec)


def _exported(model: torch.nn.Module, args: Any, kwargs: Any, dynamic_shapes: Any) -> ExportedProgram:
    try:
        with torch.no_grad(), keeping_whole():
            return torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)
    except Exception as error:
        raise _capture_error(error) from error


# Errors


def _capture_error(error: Exception) -> CaptureError:
    text = str(error).strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    what = next((line for line in lines if line.startswith(_TELLING)), lines[0] if lines else type(error).__name__)
    return CaptureError(f"torch.export cannot capture the model: {what}", where=_user_line(error), hint=_fix(text))


_TELLING = "- You marked"
"""How torch begins the line that says which size cannot be dynamic, and why."""


def _fix(text: str) -> str:
    if _TELLING in text:
        return "that size cannot change in this model: leave it out of dynamic_shapes"
    if "Suggested fixes" in text:
        suggested = text.split("Suggested fixes", 1)[1].lstrip(":\n ").splitlines()
        return "; ".join(line.strip() for line in suggested if line.strip())
    if "dynamic_shapes" in text:
        return "dynamic_shapes says of every argument, by position or by name, which sizes may change; None for no size"
    if "register a pytree" in text:
        return "let the model return tensors, or tuples and dicts of them (a transformers model: use_cache=False)"
    if "data-dependent" in text:
        return "a tensor's value decides: use torch.cond or torch.where, or state the bounds of a size by torch._check"
    return 'change that line, or use torch.compile(model, backend="sardonyx"), which can leave parts in torch'


def _user_line(error: BaseException) -> str | None:
    """The innermost line that is neither torch's nor ours."""
    ours = tuple(str(Path(module).parent) for module in (torch.__file__, __file__))
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if not frame.filename.startswith((*ours, "<")):
            return f"{frame.filename}:{frame.lineno} in {frame.name}, code: {frame.line}"
    return None


# What the graph's inputs and outputs are


def _described(program: ExportedProgram, graph: torch.fx.GraphModule) -> Captured:
    held: dict[int, tuple[str, torch.Tensor]] = {}
    given: dict[int, int] = {}
    for index, spec in enumerate(program.graph_signature.input_specs):
        if spec.kind == InputKind.USER_INPUT:
            given[index] = len(given)
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            assert spec.target is not None
            held[index] = (spec.target, _tensor(program, spec.target))
        else:
            raise CaptureError(f"the model holds {spec.target}, which is no tensor")
    in_spec, out_spec = program.call_spec.in_spec, program.call_spec.out_spec
    assert in_spec is not None
    assert out_spec is not None
    return Captured(graph, held, given, _returned(program, graph), in_spec, out_spec)


def _tensor(program: ExportedProgram, name: str) -> torch.Tensor:
    found = program.state_dict[name] if name in program.state_dict else program.constants[name]
    assert isinstance(found, torch.Tensor)
    return found


def _returned(program: ExportedProgram, graph: torch.fx.GraphModule) -> tuple[Any, ...]:
    nodes: Any = graph.graph.output_node().args[0]
    returned = []
    for spec, node in zip(program.graph_signature.output_specs, nodes, strict=True):
        if spec.kind == OutputKind.USER_OUTPUT:
            returned.append(spec.arg.value if isinstance(spec.arg, ConstantArgument) else node)
        elif spec.kind == OutputKind.BUFFER_MUTATION:
            log.warning("the exported model does not update the buffer %s", spec.target)
        else:
            raise CaptureError(
                f"the model edits its input {spec.target} in place, which an ONNX model cannot",
                hint="return the edited tensor instead, or clone it first",
            )
    return tuple(returned)


# Dynamic sizes


def shapes_of_examples(
    model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], examples: Sequence[Any]
) -> Any:
    """What is dynamic: every size and number that differs between the example calls."""
    calls: Any = torch.export.AdditionalInputs()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    for example in examples:
        calls.add(*_call(example, args, kwargs))
    try:
        return calls.dynamic_shapes(model, tuple(args), dict(kwargs))
    except Exception as error:
        raise CaptureError(
            f"the example calls do not fit each other: {str(error).splitlines()[0]}",
            hint="each must have the same structure as the first: only sizes and numbers may differ",
        ) from error


def _call(example: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, Mapping):
        return tuple(args), {**kwargs, **example}
    if isinstance(example, torch.Tensor):
        return (example,), dict(kwargs)
    if len(example) == 2 and isinstance(example[0], tuple) and isinstance(example[1], Mapping):
        return example[0], dict(example[1])
    return tuple(example), dict(kwargs)


def hints(dynamic_shapes: Any) -> Any:
    """Names written as text, which torch.export does not take, as the hint that a size is dynamic."""
    if isinstance(dynamic_shapes, str):
        return torch.export.Dim.DYNAMIC
    if isinstance(dynamic_shapes, Mapping):
        return {key: hints(value) for key, value in dynamic_shapes.items()}
    if isinstance(dynamic_shapes, (tuple, list)):
        return type(dynamic_shapes)(map(hints, dynamic_shapes))
    return dynamic_shapes


def names_of_sizes(
    model: torch.nn.Module, captured: Captured, dynamic_shapes: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[sympy.Symbol, str]:
    """The user's names of symbolic sizes: that of `Dim("batch")`, or a text, at an axis names the size found there."""
    specs = list(_leaf_specs([*args, dict(kwargs)], _by_position(model, dynamic_shapes, args, kwargs)))
    placeholders = list(captured.graph.graph.find_nodes(op="placeholder"))
    names: dict[sympy.Symbol, str] = {}
    for index, place in captured.given.items():
        val, spec = placeholders[index].meta.get("val"), specs[place]
        if isinstance(val, torch.Tensor) and spec is not None:
            for axis, dim in spec.items() if isinstance(spec, Mapping) else enumerate(spec):
                symbol, name = dim_of(val.shape[axis]), dim if isinstance(dim, str) else getattr(dim, "__name__", None)
                if isinstance(symbol, sympy.Symbol) and name:
                    names.setdefault(symbol, name)
    return names


def _by_position(model: torch.nn.Module, dynamic_shapes: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What is said of sizes, in the order of the positional arguments, then by the name of the others."""
    if not isinstance(dynamic_shapes, Mapping):
        given = list(dynamic_shapes or ())
        return [*given[: len(args)], dict(zip(kwargs, given[len(args) :], strict=False))]
    positional: list[Any] = []
    for name, parameter in inspect.signature(model.forward).parameters.items():
        several = parameter.kind is inspect.Parameter.VAR_POSITIONAL
        positional += (dynamic_shapes.get(name) or ()) if several else [dynamic_shapes.get(name)]
    return [*positional[: len(args)], dynamic_shapes]


def _leaf_specs(value: Any, spec: Any) -> Iterator[Any]:
    """For each leaf of a tree of arguments what is said of its sizes; None where nothing is."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaf_specs(item, spec.get(key) if isinstance(spec, Mapping) else None)
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from _leaf_specs(item, spec[index] if isinstance(spec, (tuple, list)) and index < len(spec) else None)
    elif isinstance(value, torch.Tensor):
        yield spec
    else:
        yield from (None for _ in pytree.tree_leaves(value))
