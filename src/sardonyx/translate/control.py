"""Control flow: torch's higher-order operators as If, Loop and Scan, whose bodies are graphs of their own."""

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
"""Translates a subgraph where the builder stands, for the given operands; what it returns."""


def find(target: Any) -> Callable[..., Results]:
    """The translation of a higher-order operator; numbers among its results are int64 tensors of shape [1]."""
    form = _FORMS.get(target.name())
    if form is None:
        raise Unsupported("no translation of this higher-order operator")
    return form


def _cond(g: Builder, inline: Inline, predicate: Any, then: Any, otherwise: Any, operands: Sequence[Any]) -> Results:
    if isinstance(predicate, bool):
        return inline(then if predicate else otherwise, operands)
    condition = _truth(g, predicate)
    branches, kinds = [], []
    for graph in (then, otherwise):
        with g.body() as nodes:
            results = inline(graph, operands)
            branches.append(_graph(g, nodes, [], _present(results)))
            kinds.append([None if x is None else x.dtype for x in results])
    if kinds[0] != kinds[1]:
        raise Unsupported("its branches return different dtypes")
    made = _call(g, "If", [condition], branches[0].outputs, then_branch=branches[0], else_branch=branches[1])
    return _restored(made, kinds[0])


def _while_loop(
    g: Builder, inline: Inline, goes_on: Any, body: Any, carried: Sequence[Any], captured: Sequence[Any]
) -> Results:
    start = [_value(g, x) for x in carried]
    first = _truth(g, inline(goes_on, [*start, *captured])[0])
    return list(_loop(g, inline, goes_on, body, first, start, captured, stacked=False))


def _stacking_loop(
    g: Builder, inline: Inline, goes_on: Any, body: Any, carried: Sequence[Any], captured: Sequence[Any]
) -> Results:
    """What each round computed, for the backward; without a round what went in, as torch has it."""
    start = [_value(g, x) for x in carried]
    first = _truth(g, inline(goes_on, [*start, *captured])[0])
    with g.body() as nodes:
        stacks = _loop(g, inline, goes_on, body, first, start, captured, stacked=True)
        some = _graph(g, nodes, [], [g.shaped(x, g.like(val)) for x, val in zip(stacks, g.out, strict=True)])
    with g.body() as nodes:
        none = _graph(g, nodes, [], [g.unsqueeze(x, [0]) for x in start])
    return list(_call(g, "If", [first], start, then_branch=some, else_branch=none))


def _loop(
    g: Builder,
    inline: Inline,
    goes_on: Any,
    body: Any,
    first: Value,
    start: list[Value],
    captured: Sequence[Any],
    *,
    stacked: bool,
) -> Sequence[Value]:
    """What is carried after the last round; or, stacked, after each.

    The condition stands before the loop, for the first round, and at the end of its body, for the next.
    """
    with g.body() as nodes:
        state = _inputs(g, body, len(start))
        after = _present(inline(body, [*state, *captured]))
        _require_same(start, after)
        again = _truth(g, inline(goes_on, [*after, *captured])[0])
        counted = [_input(g, ir.DataType.INT64), _input(g, ir.DataType.BOOL)]
        graph = _graph(g, nodes, [*counted, *state], [again, *after, *(after if stacked else ())])
    made = _call(g, "Loop", [None, first, *start], graph.outputs[1:], body=graph)
    return made[len(start) :] if stacked else made


def _scan(
    g: Builder, inline: Inline, combine: Any, init: Sequence[Any], xs: Sequence[Any], captured: Sequence[Any]
) -> Results:
    start = [_value(g, x) for x in init]
    if not xs:
        raise Unsupported("it scans no tensor, so that its length is unknown")
    with g.body() as nodes:
        given = _inputs(g, combine, len(start) + len(xs))
        results = inline(combine, [*given, *captured])
        after = _present(results[: len(start)])
        _require_same(start, after)
        graph = _graph(g, nodes, given, [*after, *_present(results[len(start) :])])
    made = _call(g, "Scan", [*start, *xs], graph.outputs, body=graph, num_scan_inputs=len(xs))
    return _restored(made, results)


def _map(g: Builder, inline: Inline, function: Any, xs: Sequence[Any], captured: Sequence[Any]) -> Results:
    return _scan(g, inline, function, [], xs, captured)


def _invoke(g: Builder, inline: Inline, function: Any, name: str, *operands: Any) -> Results:
    return inline(function, operands)


_FORMS: dict[str, Callable[..., Results]] = {
    "cond": _cond,
    "while_loop": _while_loop,
    "while_loop_stack_output": _stacking_loop,
    "scan": _scan,
    "map_impl": _map,
    "invoke_subgraph": _invoke,
}


def _call(
    g: Builder, op_type: str, inputs: Sequence[Value | None], like: Sequence[Value], **attributes: Any
) -> Sequence[Value]:
    """A node whose results have the dtypes of the values they are like."""
    if not like:
        return ()
    made = g.several(op_type, len(like), inputs, **attributes)
    for result, value in zip(made, like, strict=True):
        result.type = value.type
    return made


def _graph(g: Builder, nodes: list[ir.Node], inputs: Sequence[Value], results: Sequence[Value]) -> ir.Graph:
    """The nodes as a body; each result by a node of its own, as values from around it cannot be returned."""
    own = {id(output) for node in nodes for output in node.outputs}
    outputs: list[Value] = []
    for value in results:
        if id(value) not in own or any(value is other for other in outputs):
            value = g.shaped(g.Identity(value), g.dims(value))
        outputs.append(value)
    return ir.Graph(inputs, outputs, nodes=nodes, name=g.fresh("body"))


def _inputs(g: Builder, graph: torch.fx.GraphModule, count: int) -> list[Value]:
    """Inputs of a body, for the first operands of the graph that it is."""
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
    """A tensor as it is, an integer as a tensor of one element."""
    if isinstance(x, Value):
        return x
    if isinstance(x, (int, sympy.Expr)) and not isinstance(x, bool):
        return g.sizes.value(x)
    raise Unsupported(f"{x!r} is carried, and only tensors and integers can be")


def _truth(g: Builder, predicate: Any) -> Value:
    """A condition as a boolean tensor without dimensions."""
    value = predicate if isinstance(predicate, Value) else g.sizes.condition(predicate)
    if value.dtype != ir.DataType.BOOL:
        raise Unsupported("its condition is not boolean")
    return g.reshape(value, ())


def _require_same(before: Sequence[Value], after: Sequence[Value]) -> None:
    if [x.dtype for x in before] != [x.dtype for x in after]:
        raise Unsupported("what it carries changes its dtype on the way")


def _present(results: Sequence[Value | None]) -> list[Value]:
    return [x for x in results if x is not None]


def _restored(made: Sequence[Value], results: Sequence[Any]) -> Results:
    """The results of a node, with None where the subgraph returned it."""
    left = iter(made)
    return [None if x is None else next(left) for x in results]


# What names mean inside a subgraph


def bind(
    g: Builder, placeholders: Sequence[torch.fx.Node], given: Sequence[Any]
) -> tuple[dict[torch.fx.Node, Any], set[sympy.Symbol]]:
    """What the placeholders of a subgraph stand for, and the symbols that mean something of their own in it."""
    values: dict[torch.fx.Node, Any] = {}
    sources: dict[sympy.Symbol, tuple[Value, int | None]] = {}
    kept: set[sympy.Symbol] = set()
    for node, x in zip(placeholders, given, strict=True):
        val = node.meta.get("val")
        if isinstance(val, torch.Tensor) and isinstance(x, Value):
            values[node], new = _seen_as(g, x, dims_of(val))
            sources.update(new)
            kept |= _symbols(dims_of(val)) - new.keys()
        elif isinstance(val, (int, torch.SymInt)):
            dim = dim_of(val)
            if not isinstance(x, Value) and x == dim:
                kept |= _symbols((dim,))
            elif isinstance(dim, sympy.Symbol):
                sources[dim] = (_value(g, x), None)
            else:
                raise Unsupported(f"its operand {node.name} is {dim} inside and {x} outside")
        elif x is None:
            values[node] = None
        else:
            raise Unsupported(f"its operand {node.name} is neither a tensor nor an integer")
    if kept & sources.keys():
        raise Unsupported("a size has two meanings inside it")
    for symbol, (source, axis) in sources.items():
        g.sizes.bind(symbol, source, axis)
    for value in _present(list(values.values())):
        g.sizes.learn(value, g.dims(value))
    return values, set(sources)


def _seen_as(g: Builder, x: Value, dims: Dims) -> tuple[Value, dict[sympy.Symbol, tuple[Value, int | None]]]:
    """A value with the sizes that a subgraph knows it by, and the symbols that are then read off it."""
    old = g.dims(x)
    if old == dims:
        return x, {}
    x = g.shaped(g.Identity(x), dims)
    renamed = {axis: dim for axis, dim in enumerate(dims) if isinstance(dim, sympy.Symbol) and old[axis] != dim}
    return x, {dim: (x, axis) for axis, dim in renamed.items()}


def rename(g: Builder, nodes: Iterable[ir.Node], symbols: Set[sympy.Symbol]) -> None:
    """Give symbols that meant something of their own in a subgraph other names in what was made for it."""
    names = {symbol: sympy.Symbol(g.fresh(f"{symbol}"), **symbol.assumptions0) for symbol in symbols}
    for value in _values(nodes) if names else ():
        dims: Dims = value.meta.get("dims") or ()
        if _symbols(dims) & symbols:
            g.shaped(value, [dim.xreplace(names) if isinstance(dim, sympy.Expr) else dim for dim in dims])


def _values(nodes: Iterable[ir.Node]) -> Iterator[Value]:
    """What the nodes compute, and all that is inside their bodies."""
    for node in nodes:
        yield from node.outputs
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                yield from attribute.as_graph().inputs
                yield from _values(attribute.as_graph())


def _symbols(dims: Dims) -> set[sympy.Symbol]:
    return {symbol for dim in dims if isinstance(dim, sympy.Expr) for symbol in dim.free_symbols}
