"""Dynamic sizes of an export: parse dynamic_shapes, and check the traced graph against it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.export import Dim
from torch.utils import _pytree as pytree

from sardonyx.capture.example import ArgsKwargs, ExampleCall
from sardonyx.capture.export import DYNAMIC_SHAPES_HINT, Captured
from sardonyx.errors import CaptureError
from sardonyx.sizes import dim_of

log = logging.getLogger(__name__)


# Declarations


def shapes_of_examples(
    model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], examples: Sequence[Any]
) -> Any:
    """Return dynamic_shapes in which every size and integer that differs between the example calls is dynamic."""
    calls: Any = torch.export.AdditionalInputs()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    for example in examples:
        calls.add(*_without_floats(parse_example(example, args, kwargs)))
    try:
        return calls.dynamic_shapes(model, *_without_floats((tuple(args), dict(kwargs))))
    except Exception as error:
        raise CaptureError(
            f"the example calls differ in structure: {str(error).splitlines()[0]}",
            hint="give each the structure of the first: only sizes and numbers may differ",
        ) from error


def _without_floats(call: ArgsKwargs) -> ArgsKwargs:
    """Replace all floats by one value: torch requires them to be equal."""
    replaced: ArgsKwargs = pytree.tree_map_only(float, lambda _: 0.0, call)
    return replaced


def parse_example(example: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ArgsKwargs:
    """Parse an example call: a tuple of arguments, a dict of keywords, a pair of both, or a tensor."""
    if isinstance(example, Mapping):
        return tuple(args), {**kwargs, **example}
    if isinstance(example, torch.Tensor):
        return (example,), dict(kwargs)
    if len(example) == 2 and isinstance(example[0], tuple) and isinstance(example[1], Mapping):
        return example[0], dict(example[1])
    return tuple(example), dict(kwargs)


def specs_by_name(call: ExampleCall, dynamic_shapes: Any) -> dict[str, Any]:
    """Return the spec of each argument, in the order of the call; None where nothing is declared."""
    if dynamic_shapes is None:
        return dict.fromkeys(call.arguments)
    declared = dynamic_shapes if isinstance(dynamic_shapes, Mapping) else _specs_by_position(call, list(dynamic_shapes))
    specs: dict[str, Any] = dict.fromkeys(call.arguments)
    for name, spec in declared.items():
        specs |= _specs_by_argument(call, name, spec)
    return specs


def _specs_by_position(call: ExampleCall, specs: list[Any]) -> Mapping[str, Any]:
    """Match specs to the parameters of `forward`, as torch.export does, or to the arguments."""
    if len(specs) == len(call.grouped) and all(map(_matches_parameter, call.grouped.items(), specs)):
        return dict(zip(call.grouped, specs, strict=True))
    if len(specs) == len(call.arguments):
        return dict(zip(call.arguments, specs, strict=True))
    arguments = f"{len(call.arguments)} arguments: {', '.join(call.arguments)}"
    raise _declaration_error(f"dynamic_shapes has {len(specs)} elements, and the call {arguments}")


def _declaration_error(what: str) -> CaptureError:
    return CaptureError(f"torch.export cannot capture the model: {what}", hint=DYNAMIC_SHAPES_HINT)


def _matches_parameter(group: tuple[str, Sequence[str]], spec: Any) -> bool:
    name, names = group
    return list(names) == [name] or spec is None or _is_grouped(names, spec)


def _is_grouped(names: Sequence[str], spec: Any) -> bool:
    """Whether a spec has one entry per argument of `*args` or `**kwargs`."""
    if isinstance(spec, Mapping):
        return set(spec) <= set(names)
    return isinstance(spec, (tuple, list)) and len(spec) == len(names)


def _specs_by_argument(call: ExampleCall, name: str, spec: Any) -> dict[str, Any]:
    names = call.grouped.get(name, [name] if name in call.arguments else None)
    if names is None:
        raise _declaration_error(
            f"dynamic_shapes names {name!r}, which is not an argument: {', '.join(call.arguments)}"
        )
    if list(names) == [name]:
        return {name: spec}
    if spec is None:
        return {}
    if not _is_grouped(names, spec):
        raise _declaration_error(f"dynamic_shapes has {spec!r} for the {len(names)} arguments of {name!r}")
    return dict(spec) if isinstance(spec, Mapping) else dict(zip(names, spec, strict=True))


def names_to_dim_hints(specs: Any) -> Any:
    """Replace names of sizes given as strings, which torch.export does not accept, by `Dim.DYNAMIC`."""
    if isinstance(specs, str):
        return Dim.DYNAMIC
    if isinstance(specs, Mapping):
        return {key: names_to_dim_hints(value) for key, value in specs.items()}
    if isinstance(specs, (tuple, list)):
        return type(specs)(map(names_to_dim_hints, specs))
    return specs


def leaf_specs(call: ExampleCall, specs: Mapping[str, Any]) -> list[Any]:
    """Return the spec of each flattened argument; None where nothing is declared."""
    return [spec for name, value in call.arguments.items() for spec in _leaves(value, specs[name])]


def _leaves(value: Any, spec: Any) -> Iterator[Any]:
    parts = _children(value)
    if parts is None:
        yield spec
        return
    if isinstance(value, Mapping):
        inner_specs = [spec.get(key) if isinstance(spec, Mapping) else None for key in value]
    else:
        inner_specs = list(spec) if isinstance(spec, (tuple, list)) and len(spec) == len(parts) else [None] * len(parts)
    for part, inner in zip(parts, inner_specs, strict=True):
        yield from _leaves(part, inner)


def _children(value: Any) -> list[Any] | None:
    """Return the children of a pytree node; None for a leaf."""
    parts, spec = pytree.tree_flatten(value, is_leaf=lambda x: x is not value)
    return None if spec.is_leaf() else parts


# The traced graph


def _declared_sizes(
    call: ExampleCall, captured: Captured, specs: Mapping[str, Any]
) -> Iterator[tuple[str, torch.SymInt | int, Any]]:
    """Yield each declared size and integer: its path, its value in the trace, and its declaration."""
    values = [node.meta.get("val") for node in captured.graph.graph.find_nodes(op="placeholder")]
    paths, declared = [path for path, _ in call.leaves], leaf_specs(call, specs)
    for index, place in captured.inputs.items():
        value, path, spec = values[index], paths[place], declared[place]
        if not isinstance(value, torch.Tensor):
            if spec is not None and isinstance(value, (int, torch.SymInt)):
                yield path, value, spec
        elif spec is not None:
            for axis, dim in spec.items() if isinstance(spec, Mapping) else enumerate(spec):
                yield f"{path}.shape[{axis}]", value.shape[axis], dim


def names_of_sizes(call: ExampleCall, captured: Captured, specs: Mapping[str, Any]) -> dict[sympy.Symbol, str]:
    """Return the user's names of symbolic sizes, from `Dim("batch")` or a string in dynamic_shapes."""
    names: dict[sympy.Symbol, str] = {}
    for name, size in _named_sizes(call, captured, specs):
        symbol = dim_of(size)
        if isinstance(symbol, sympy.Symbol):
            names.setdefault(symbol, name)
    return names


def _name_of(dim: Any) -> str:
    return dim if isinstance(dim, str) else getattr(dim, "__name__", None) or ""


def _named_sizes(
    call: ExampleCall, captured: Captured, specs: Mapping[str, Any]
) -> list[tuple[str, torch.SymInt | int]]:
    return [(_name_of(dim), size) for _, size, dim in _declared_sizes(call, captured, specs) if _name_of(dim)]


def unify_sizes(call: ExampleCall, captured: Captured, specs: Mapping[str, Any]) -> None:
    """Unify the symbols of sizes that have the same name.

    They are equal in the example, so comparing them makes torch add the guard that unifies them.
    """
    first: dict[str, torch.SymInt | int] = {}
    for name, size in _named_sizes(call, captured, specs):
        bool(first.setdefault(name, size) == size)


def refuse_constants(
    call: ExampleCall, captured: Captured, specs: Mapping[str, Any], line_of: Callable[[torch.fx.Node], str]
) -> None:
    """Raise for a size that was declared dynamic and became a constant; for `Dim.AUTO` only warn."""
    for path, size, dim in _declared_sizes(call, captured, specs):
        if dim is None or isinstance(dim, int) or _hint(dim) == "STATIC" or not isinstance(dim_of(size), int):
            continue
        where = _cause_line(captured, size, line_of)
        if _hint(dim) == "AUTO":
            log.warning("%s is a constant of the exported model, %d%s", path, size, f", at {where}" if where else "")
            continue
        raise CaptureError(
            f"{path} was declared dynamic, but became the constant {int(size)}",
            where=where,
            hint="change that line, or remove the size from dynamic_shapes",
        )


def _hint(dim: Any) -> str:
    """Return the name of a dim hint, such as AUTO for `Dim.AUTO`; empty for a named size."""
    return str(getattr(getattr(dim, "type", None), "name", ""))


def _cause_line(captured: Captured, size: torch.SymInt | int, line_of: Callable[[torch.fx.Node], str]) -> str | None:
    """Return the line that made a size a constant."""
    if not isinstance(size, torch.SymInt):
        return None
    cause = captured.specialized.get(size.node._expr, "")
    if isinstance(cause, str):
        return cause or None
    return line_of(cause) or f"the decomposition of {cause.target}"
