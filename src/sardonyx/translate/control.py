"""Control flow: torch's higher-order operators as If, Loop and Scan with subgraphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any, TypeAlias

import onnx_ir as ir
import sympy
import torch

from sardonyx import dtypes
from sardonyx.errors import Unsupported
from sardonyx.sizes import Dims, dim_of, dims_of
from sardonyx.translate import inference
from sardonyx.translate.builder import Builder

Value = ir.Value
Results: TypeAlias = "list[ir.Value | None]"
Inline: TypeAlias = Callable[[torch.fx.GraphModule, Sequence[Any]], Results]
"""Translates a subgraph into the current graph of the builder, for these operands; returns its results."""


def find(target: Any) -> Callable[..., Results]:
    """Return the translation of a higher-order operator; integers among its results are int64 tensors of shape [1]."""
    translation = _TRANSLATIONS.get(target.name())
    if translation is None:
        raise Unsupported("no translation of this higher-order operator")
    return translation


def _cond(g: Builder, inline: Inline, predicate: Any, then: Any, otherwise: Any, operands: Sequence[Any]) -> Results:
    if isinstance(predicate, bool):
        return inline(then if predicate else otherwise, operands)
    condition = _condition(g, predicate)
    branches, dtypes = [], []
    for graph in (then, otherwise):
        with g.body() as nodes:
            results = inline(graph, operands)
            branches.append(_graph(g, nodes, [], _without_none(results)))
            dtypes.append([None if x is None else x.dtype for x in results])
    if dtypes[0] != dtypes[1]:
        raise Unsupported("its branches return different dtypes")
    outputs = _call(g, "If", [condition], branches[0].outputs, then_branch=branches[0], else_branch=branches[1])
    return _with_none(outputs, dtypes[0])


def _while_loop(
    g: Builder, inline: Inline, condition: Any, body: Any, state: Sequence[Any], captured: Sequence[Any]
) -> Results:
    start = [_value(g, x) for x in state]
    first = _condition(g, inline(condition, [*start, *captured])[0])
    return list(_loop(g, inline, condition, body, first, start, captured, stacked=False))


def _while_loop_stack_output(
    g: Builder, inline: Inline, condition: Any, body: Any, state: Sequence[Any], captured: Sequence[Any]
) -> Results:
    """Return the state after each iteration, stacked, for the backward; without iterations the initial state."""
    start = [_value(g, x) for x in state]
    first = _condition(g, inline(condition, [*start, *captured])[0])
    with g.body() as nodes:
        stacks = _loop(g, inline, condition, body, first, start, captured, stacked=True)
        some = _graph(g, nodes, [], [g.shaped(x, g.like(val)) for x, val in zip(stacks, g.out, strict=True)])
    with g.body() as nodes:
        none = _graph(g, nodes, [], [g.unsqueeze(x, [0]) for x in start])
    return list(_call(g, "If", [first], start, then_branch=some, else_branch=none))


def _loop(
    g: Builder,
    inline: Inline,
    condition: Any,
    body: Any,
    first: Value,
    start: list[Value],
    captured: Sequence[Any],
    *,
    stacked: bool,
) -> Sequence[Value]:
    """Return the state after the last iteration; or, stacked, after each.

    The condition is computed before the loop, for the first iteration, and at the end of the body, for the next.
    """
    with g.body() as nodes:
        state = _inputs(g, body, len(start))
        after = _without_none(inline(body, [*state, *captured]))
        _require_same_dtypes(start, after)
        again = _condition(g, inline(condition, [*after, *captured])[0])
        counted = [_input(g, ir.DataType.INT64), _input(g, ir.DataType.BOOL)]
        graph = _graph(g, nodes, [*counted, *state], [again, *after, *(after if stacked else ())])
    outputs = _call(g, "Loop", [None, first, *start], graph.outputs[1:], body=graph)
    return outputs[len(start) :] if stacked else outputs


def _scan(
    g: Builder, inline: Inline, combine: Any, init: Sequence[Any], xs: Sequence[Any], captured: Sequence[Any]
) -> Results:
    start = [_value(g, x) for x in init]
    if not xs:
        raise Unsupported("it scans no tensor, so its length is unknown")
    with g.body() as nodes:
        inputs = _inputs(g, combine, len(start) + len(xs))
        results = inline(combine, [*inputs, *captured])
        after = _without_none(results[: len(start)])
        _require_same_dtypes(start, after)
        graph = _graph(g, nodes, inputs, [*after, *_without_none(results[len(start) :])])
    outputs = _call(g, "Scan", [*start, *xs], graph.outputs, body=graph, num_scan_inputs=len(xs))
    return _with_none(outputs, results)


def _map(g: Builder, inline: Inline, function: Any, xs: Sequence[Any], captured: Sequence[Any]) -> Results:
    return _scan(g, inline, function, [], xs, captured)


def _invoke(g: Builder, inline: Inline, function: Any, name: str, *operands: Any) -> Results:
    return inline(function, operands)


_TRANSLATIONS: dict[str, Callable[..., Results]] = {
    "cond": _cond,
    "while_loop": _while_loop,
    "while_loop_stack_output": _while_loop_stack_output,
    "scan": _scan,
    "map_impl": _map,
    "invoke_subgraph": _invoke,
}


def _call(
    g: Builder, op_type: str, inputs: Sequence[Value | None], like: Sequence[Value], **attributes: Any
) -> Sequence[Value]:
    """Append a node whose outputs have the dtypes of the values in `like`."""
    if not like:
        return ()
    outputs = g.several(op_type, len(like), inputs, **attributes)
    for result, value in zip(outputs, like, strict=True):
        result.type = value.type
    return outputs


def _graph(g: Builder, nodes: list[ir.Node], inputs: Sequence[Value], results: Sequence[Value]) -> ir.Graph:
    """Return the nodes as a body; each result gets its own node, since a body cannot return outer values."""
    own = {id(output) for node in nodes for output in node.outputs}
    outputs: list[Value] = []
    for value in results:
        if id(value) not in own or any(value is other for other in outputs):
            value = g.shaped(g.Identity(value), g.dims(value))
        outputs.append(value)
    return ir.Graph(inputs, outputs, nodes=nodes, name=g.fresh("body"))


def _inputs(g: Builder, graph: torch.fx.GraphModule, count: int) -> list[Value]:
    """Return inputs of a body, for the first operands of the graph."""
    return [_input_like(g, node.meta.get("val")) for node in list(graph.graph.find_nodes(op="placeholder"))[:count]]


def _input_like(g: Builder, val: Any) -> Value:
    if isinstance(val, torch.Tensor):
        return g.shaped(_input(g, dtypes.to_onnx(val.dtype)), dims_of(val))
    return g.shaped(_input(g, ir.DataType.INT64), (1,))


def _input(g: Builder, dtype: ir.DataType) -> Value:
    value = Value(name=g.fresh("given"), type=ir.TensorType(dtype))
    inference.set_dims(value, ())
    return value


def _value(g: Builder, x: Any) -> Value:
    """Return a tensor unchanged, and an integer as a tensor of one element."""
    if isinstance(x, Value):
        return x
    if isinstance(x, (int, sympy.Expr)) and not isinstance(x, bool):
        return g.sizes.value(x)
    raise Unsupported(f"loop state can only be tensors and integers, not {x!r}")


def _condition(g: Builder, predicate: Any) -> Value:
    """Return a condition as a boolean scalar tensor."""
    value = predicate if isinstance(predicate, Value) else g.sizes.condition(predicate)
    if value.dtype != ir.DataType.BOOL:
        raise Unsupported("its condition is not boolean")
    return g.reshape(value, ())


def _require_same_dtypes(before: Sequence[Value], after: Sequence[Value]) -> None:
    if [x.dtype for x in before] != [x.dtype for x in after]:
        raise Unsupported("the dtype of its state changes between iterations")


def _without_none(results: Sequence[Value | None]) -> list[Value]:
    return [x for x in results if x is not None]


def _with_none(outputs: Sequence[Value], results: Sequence[Any]) -> Results:
    """Insert None into the results of a node where the subgraph returned None."""
    remaining = iter(outputs)
    return [None if x is None else next(remaining) for x in results]


# Symbols in a subgraph


def bind(
    g: Builder, placeholders: Sequence[torch.fx.Node], operands: Sequence[Any]
) -> tuple[dict[torch.fx.Node, Any], set[sympy.Symbol]]:
    """Return the values of a subgraph's placeholders, and the symbols that are defined only inside it."""
    values: dict[torch.fx.Node, Any] = {}
    sources: dict[sympy.Symbol, tuple[Value, int | None]] = {}
    local: set[sympy.Symbol] = set()
    for node, x in zip(placeholders, operands, strict=True):
        val = node.meta.get("val")
        if isinstance(val, torch.Tensor) and isinstance(x, Value):
            values[node], new = _with_dims(g, x, dims_of(val))
            sources.update(new)
            local |= _symbols(dims_of(val)) - new.keys()
        elif isinstance(val, (int, torch.SymInt)):
            dim = dim_of(val)
            if not isinstance(x, Value) and x == dim:
                local |= _symbols((dim,))
            elif isinstance(dim, sympy.Symbol):
                sources[dim] = (_value(g, x), None)
            else:
                raise Unsupported(f"its operand {node.name} is {dim} inside and {x} outside")
        elif x is None:
            values[node] = None
        else:
            raise Unsupported(f"its operand {node.name} is neither a tensor nor an integer")
    if local & sources.keys():
        raise Unsupported("a symbolic size has two definitions inside it")
    for symbol, (source, axis) in sources.items():
        g.sizes.bind(symbol, source, axis)
    for value in _without_none(list(values.values())):
        g.sizes.learn(value, g.dims(value))
    return values, set(sources)


def _with_dims(g: Builder, x: Value, dims: Dims) -> tuple[Value, dict[sympy.Symbol, tuple[Value, int | None]]]:
    """Return a value with the sizes that a subgraph has for it, and the symbols that are then read from it."""
    old = g.dims(x)
    if old == dims:
        return x, {}
    x = g.shaped(g.Identity(x), dims)
    renamed = {axis: dim for axis, dim in enumerate(dims) if isinstance(dim, sympy.Symbol) and old[axis] != dim}
    return x, {dim: (x, axis) for axis, dim in renamed.items()}


def rename(g: Builder, nodes: Iterable[ir.Node], symbols: Set[sympy.Symbol]) -> None:
    """Rename symbols that were defined only inside a subgraph in what was built for it."""
    names = {symbol: sympy.Symbol(g.fresh(f"{symbol}"), **symbol.assumptions0) for symbol in symbols}
    for value in _values(nodes) if names else ():
        dims: Dims = value.meta.get("dims") or ()
        if _symbols(dims) & symbols:
            g.shaped(value, [dim.xreplace(names) if isinstance(dim, sympy.Expr) else dim for dim in dims])


def _values(nodes: Iterable[ir.Node]) -> Iterator[Value]:
    """Yield the outputs of the nodes, and all values in their bodies."""
    for node in nodes:
        yield from node.outputs
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                yield from attribute.as_graph().inputs
                yield from _values(attribute.as_graph())


def _symbols(dims: Dims) -> set[sympy.Symbol]:
    return {symbol for dim in dims if isinstance(dim, sympy.Expr) for symbol in dim.free_symbols}
