"""From an FX graph to an ONNX graph, node by node through the table."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir
import sympy
import torch
from torch.fx.node import map_arg

from sardonyx import dtypes, opsets
from sardonyx.errors import Unsupported
from sardonyx.sizes import dim_of, dims_of, expression_of
from sardonyx.translate import control, inference, pairs, table, torchlib
from sardonyx.translate.builder import Builder
from sardonyx.translate.noise import Draw, Source

WEIGHTS_LOCATION = "torch"
"""The external-data location that marks an initializer whose bytes live in a torch tensor."""


@dataclass(frozen=True)
class Refusal:
    """A node that ONNX cannot express, and why."""

    node: torch.fx.Node
    reason: str
    inside: torch.fx.Node | None = None
    """The node of a subgraph that is the cause, where the node is control flow."""


class NotExpressible(Exception):
    """Some nodes of a graph have no translation; all of them are listed."""

    def __init__(self, refusals: Sequence[Refusal]) -> None:
        self.refusals = list(refusals)
        super().__init__(", ".join(str(r.node.target) for r in refusals))


@dataclass
class Translation:
    """An ONNX model and how its inputs and outputs relate to the FX graph it came from."""

    model: ir.Model
    inputs: list[int]
    """For each ONNX input, the index of the FX placeholder it is."""
    weights: dict[str, int]
    """For each initializer that lives in torch, the index of its FX placeholder."""
    draws: list[Draw] = field(default_factory=list)
    """For each ONNX input after those: the random numbers that it is."""
    own: dict[str, str] = field(default_factory=dict)
    """Where torchlib comes first: operators that our own table translated, and why."""


@dataclass
class _Run:
    """The state of one translation."""

    g: Builder
    lack: Callable[[ir.Node], str | None]
    translations: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    torchlib_first: bool = False
    own: dict[str, str] = field(default_factory=dict)
    values: dict[torch.fx.Node, Any] = field(default_factory=dict)
    refusals: list[Refusal] = field(default_factory=list)


def translate(
    graph: torch.fx.GraphModule,
    *,
    opset: int,
    outputs: Sequence[torch.fx.Node],
    orders: Sequence[tuple[int, ...] | None] = (),
    weights: Iterable[int] = (),
    numbers: Mapping[int, float] | None = None,
    stays: Set[torch.fx.Node] = frozenset(),
    lack: Callable[[ir.Node], str | None] = lambda node: None,
    noise: Source = "inputs",
    translations: Mapping[str, Callable[..., Any]] | None = None,
    translator: str = "sardonyx",
) -> Translation:
    """Translate the whole graph, or raise `NotExpressible` with every node that stands in the way.

    `outputs` are the FX nodes to return, each with its axes in the order that `orders` gives. `weights` are the
    placeholders that become initializers sharing torch's memory, `numbers` those that become constants, `stays` the
    nodes that torch computes and this graph receives. `lack` says why a node could not run on the engine, if so.
    `noise` says where random numbers come from. `translations`, by the qualified names of operators, come before the
    table's. With the `translator` "torchlib" torchlib's come before the table's too.
    """
    run = _Run(Builder(opset, noise=noise), lack, translations or {}, torchlib_first=translator == "torchlib")
    run.g.reserve(node.name for node in graph.graph.nodes)
    frozen = set(weights)
    placeholders = list(graph.graph.find_nodes(op="placeholder"))
    tensors_first = sorted(enumerate(placeholders), key=lambda item: _is_size(item[1]))
    for index, node in tensors_first:  # so that sizes are read off tensors where they can be
        if numbers and index in numbers:
            run.values[node] = run.g.scalar(numbers[index], node.meta["val"].dtype)
        else:
            _add_input(run, node, frozen=index in frozen)
    _add_nodes(run, graph, stays)
    if run.refusals:
        raise NotExpressible(run.refusals)
    return _assemble(run, placeholders, outputs, orders)


def _add_nodes(run: _Run, graph: torch.fx.GraphModule, stays: Set[torch.fx.Node] = frozenset()) -> None:
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            _add_constant(run, graph, node)
        elif node.op == "call_function" and node in stays:
            _add_input(run, node, frozen=False)
        elif node.op == "call_function":
            _add_call(run, node)


def _add_input(run: _Run, node: torch.fx.Node, *, frozen: bool) -> None:
    val = node.meta.get("val")
    if isinstance(val, torch.Tensor):
        if not dtypes.is_known(val.dtype):
            return  # what uses it is refused
        value = described(node.name, val)
        run.g.sizes.learn(value, dims_of(val))
        value.meta["constant"] = getattr(val, "constant", None)  # of a tensor that the model writes out, if it is small
        if frozen and val.numel() and not (val.is_complex() or val.is_neg()):  # memory that is not what ONNX is given
            value.const_value = in_torch(node.name, dtypes.to_onnx(val.dtype), tuple(map(int, val.shape)))
        run.values[node] = value
    elif isinstance(val, (tuple, list)):
        pass  # results of an operator that stays in torch; each is an input when it is taken out
    elif isinstance(val, (torch.SymInt, int)):
        value = ir.Value(name=node.name, type=ir.TensorType(ir.DataType.INT64))
        inference.set_dims(value, (1,))
        run.values[node] = value
        dim = dim_of(val)
        if isinstance(dim, sympy.Expr):
            run.g.sizes.learn_input(dim, value)


def described(name: str, val: torch.Tensor) -> ir.Value:
    """A value as FX describes it."""
    value = ir.Value(name=name, type=ir.TensorType(dtypes.to_onnx(val.dtype)))
    inference.set_dims(value, pairs.dims_of(val))
    return pairs.mark(value) if val.dtype.is_complex else value


def in_torch(name: str, dtype: ir.DataType, shape: tuple[int, ...]) -> ir.ExternalTensor:
    """A tensor whose bytes are elsewhere: those of a weight stay in torch."""
    return ir.ExternalTensor(WEIGHTS_LOCATION, 0, 0, dtype, shape=ir.Shape(shape), name=name)


def _add_constant(run: _Run, graph: torch.fx.GraphModule, node: torch.fx.Node) -> None:
    held: Any = graph
    for part in str(node.target).split("."):
        held = getattr(held, part)
    if not isinstance(held, torch.Tensor):
        run.values[node] = held
    elif dtypes.is_known(held.dtype):
        run.values[node] = run.g.constant(dtypes.to_array(held.cpu()), dtypes.to_onnx(held.dtype))


_WITHOUT_EFFECT = ("_assert_scalar", "_assert_async", "_assert_tensor_metadata", "sym_constrain_range_for_size")


def _add_call(run: _Run, node: torch.fx.Node) -> None:
    if node.target in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default):
        _read_number(run, node)
    if _is_size_arithmetic(node):
        return
    if getattr(node.target, "_opname", "") in _WITHOUT_EFFECT:
        return
    missing = [n for n in node.all_input_nodes if n not in run.values and not _is_size(n)]
    if missing and node.target is operator.getitem:
        _add_input(run, node, frozen=False)  # one result of an operator that stays in torch
        return
    mark = len(run.g.nodes)
    try:
        if missing:
            raise Unsupported(f"ONNX has no tensors like its operand {missing[0].name}")
        with run.g.translating(node):
            result = None if _is_empty(node.meta.get("val")) else _translate_call(run, node)
            value = _state_types(run, node, result)
            _check_runs(run, run.g.nodes[mark:])
            run.values[node] = value
    except Unsupported as refusal:
        run.refusals.append(Refusal(node, str(refusal), refusal.node if isinstance(refusal, _Inside) else None))
        _add_input(run, node, frozen=False)
    except TypeError as error:
        if not _has_symbols(node):
            raise
        run.refusals.append(Refusal(node, f"its translation takes no symbolic number: {error}"))
        _add_input(run, node, frozen=False)


def _has_symbols(node: torch.fx.Node) -> bool:
    """Whether an operand is a symbolic number, which translations that compare it cannot take."""
    return any(isinstance(source.meta.get("val"), (torch.SymInt, torch.SymFloat)) for source in node.all_input_nodes)


def _read_number(run: _Run, node: torch.fx.Node) -> None:
    """Learn a number that is the value of a tensor, as `.item()` gives; a boolean is a number that equals one."""
    val, x = node.meta.get("val"), run.values.get(node.all_input_nodes[0])
    if isinstance(val, torch.SymFloat) and isinstance(x, ir.Value):
        with run.g.translating(node):
            run.g.sizes.learn_real(expression_of(val), run.g.reshape(run.g.cast(x, torch.float64), ()))
        return
    if not isinstance(val, (torch.SymInt, torch.SymBool)) or not isinstance(x, ir.Value):
        return
    expression = expression_of(val)
    number = expression.args[0] if isinstance(val, torch.SymBool) and expression.args else expression
    if expression in (number, sympy.Eq(number, 1)):
        with run.g.translating(node):
            run.g.sizes.learn_input(number, run.g.reshape(run.g.cast(x, torch.int64), (1,)))


def _check_runs(run: _Run, made: Sequence[ir.Node]) -> None:
    for node in made:
        reason = run.lack(node)
        if reason is not None:
            raise Unsupported(reason)


def _is_size_arithmetic(node: torch.fx.Node) -> bool:
    """Whether the node computes a number from sizes, which the graph reads off tensors instead."""
    return _is_size(node) and node.target is not operator.getitem


def _is_size(node: torch.fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float))


def _translate_call(run: _Run, node: torch.fx.Node) -> Any:
    if node.target is operator.getitem:
        return run.values[node.all_input_nodes[0]][node.args[1]]
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return _translate_control(run, node)
    numbers = _dtype_of_numbers(node)
    args = [_argument(run, arg, numbers) for arg in node.args]
    kwargs = {key: _argument(run, arg, numbers) for key, arg in node.kwargs.items()}
    own = run.translations.get(table.name_of(node.target))
    if own is None and pairs.concern(node):
        own = pairs.find(node.target)
        if own is None:
            raise Unsupported("no translation for complex tensors")
    translation = own or table.find(node.target)
    if translation is None or (run.torchlib_first and own is None):
        try:
            return _by_torchlib(run, node, args, kwargs)
        except Unsupported as refusal:
            if translation is None:
                raise
            run.own[str(node.target)] = str(refusal)
    return translation(run.g, *args, **kwargs)


def _by_torchlib(run: _Run, node: torch.fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """torchlib's translation, checked at once and undone if it will not do, so that ours can come after it."""
    mark = len(run.g.nodes)
    with run.g.translating(node):
        value = _state_types(run, node, torchlib.translate(run.g, node, args, kwargs, first=run.torchlib_first))
        _check_runs(run, run.g.nodes[mark:])
    return value


def _translate_control(run: _Run, node: torch.fx.Node) -> Any:
    translation = control.find(node.target)
    if any(node.kwargs.values()):
        raise Unsupported("its translation does not take " + ", ".join(node.kwargs))
    if pairs.concern(node):
        raise Unsupported("no translation for complex tensors")
    conditions = map(_condition, node.args)
    args = [_argument(run, arg) if c is None else c for arg, c in zip(node.args, conditions, strict=True)]
    return translation(run.g, lambda graph, given: _inline(run, graph, given), *args)


def _condition(arg: Any) -> Any:
    """The relation that a symbolic condition is; None for all else."""
    val = arg.meta.get("val") if isinstance(arg, torch.fx.Node) else None
    return expression_of(val) if isinstance(val, torch.SymBool) else None


class _Inside(Unsupported):
    """A node of a subgraph cannot be expressed."""

    def __init__(self, refusal: Refusal) -> None:
        self.node = refusal.inside or refusal.node
        super().__init__(f"in it, {refusal.node.target}: {refusal.reason}")


def _inline(run: _Run, graph: torch.fx.GraphModule, given: Sequence[Any]) -> control.Results:
    """Translate a subgraph where the builder stands; what it returns for these operands."""
    g, mark = run.g, len(run.g.nodes)
    inner = _Run(g, run.lack, run.translations, run.torchlib_first, run.own)
    with g.sizes.scope():
        inner.values, symbols = control.bind(g, list(graph.graph.find_nodes(op="placeholder")), given)
        _add_nodes(inner, graph)
        if inner.refusals:
            raise _Inside(inner.refusals[0])
        returned = graph.graph.output_node().args[0]
        results = [_returned(inner, x) for x in (returned if isinstance(returned, (tuple, list)) else (returned,))]
    control.rename(g, g.nodes[mark:], symbols)
    return results


def _returned(run: _Run, x: Any) -> ir.Value | None:
    val = x.meta.get("val") if isinstance(x, torch.fx.Node) else x
    if isinstance(val, torch.Tensor) and x in run.values:
        value: ir.Value = run.values[x]
        return value
    if isinstance(val, (bool, torch.SymBool)):
        return run.g.sizes.condition(expression_of(val) if isinstance(val, torch.SymBool) else val)
    if isinstance(val, (int, torch.SymInt)):
        return run.g.sizes.value(dim_of(val))
    if val is None:
        return None
    raise Unsupported(f"it returns {x}, which ONNX has no tensor for")


_TAKE_NUMBERS = frozenset(
    {"add", "sub", "rsub", "mul", "div", "floor_divide", "remainder", "fmod", "pow", "lerp"}
    | {"clamp", "clamp_min", "clamp_max", "where", "masked_fill", "full", "scalar_tensor"}
)
"""Operators whose translations take a tensor without dimensions for a number, in the dtype of the result."""
_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
"""Operators whose translations do so in the dtype that torch has for the tensor and a number."""


def _dtype_of_numbers(node: torch.fx.Node) -> torch.dtype | None:
    """The dtype in which the translation takes symbolic floats; None if it takes none."""
    name = getattr(node.target, "_opname", "")
    if name in _COMPARISONS:
        tensor = node.args[0].meta["val"] if isinstance(node.args[0], torch.fx.Node) else None
        return torch.result_type(tensor, 1.0) if isinstance(tensor, torch.Tensor) else None
    return torch.float64 if name in _TAKE_NUMBERS else None


def _argument(run: _Run, arg: Any, numbers: torch.dtype | None = None) -> Any:
    """FX arguments as translations see them: ONNX values, expressions, Python values."""

    def one(node: torch.fx.Node) -> Any:
        val = node.meta.get("val")
        if isinstance(val, (torch.SymInt, int)) and not isinstance(val, bool):
            return dim_of(val)
        if numbers is not None and isinstance(val, torch.SymFloat):
            return run.g.cast(run.g.sizes.real(expression_of(val)), numbers)
        if isinstance(val, (torch.SymFloat, torch.SymBool)):
            raise Unsupported(f"{node.name} is a symbolic number, {val}")
        return run.values[node]

    return map_arg(arg, one)


def _state_types(run: _Run, node: torch.fx.Node, result: Any) -> Any:
    """Check what a translation returned against what FX promised, and record sizes."""
    expected = node.meta.get("val")
    if isinstance(expected, torch.Tensor):
        return _state_type(run, result, expected)
    if isinstance(expected, (tuple, list)) and isinstance(result, (tuple, list)):
        # In place of a result that nobody reads a translation may return anything, an operand for instance.
        numbered = enumerate(zip(result, expected, strict=False))
        return [_state_item(run, value, val) if run.g.reads_output(i) else None for i, (value, val) in numbered]
    return result


def _state_item(run: _Run, value: Any, expected: Any) -> Any:
    if isinstance(expected, torch.SymInt) and isinstance(value, ir.Value):
        dim = dim_of(expected)
        if isinstance(dim, sympy.Expr):
            run.g.sizes.learn_input(dim, value)
    return _state_type(run, value, expected) if isinstance(expected, torch.Tensor) and value is not None else value


def _is_empty(expected: Any) -> bool:
    """Whether a result has no elements, whatever the inputs hold: ONNX leaves many operators undefined there."""
    return isinstance(expected, torch.Tensor) and 0 in dims_of(expected)


def _nothing(g: Builder, expected: torch.Tensor) -> ir.Value:
    """A tensor without elements, of sizes that may be symbolic."""
    dims = dims_of(expected)
    sizes = [dim if isinstance(dim, int) else 1 for dim in dims]
    constant = g.constant(dtypes.to_array(torch.empty(sizes, dtype=expected.dtype)), dtypes.to_onnx(expected.dtype))
    tail = (2,) if pairs.are_pairs(constant) else ()
    value = g.expand(constant, (*dims, *tail))
    return pairs.mark(value) if tail else value


def _state_type(run: _Run, value: ir.Value, expected: torch.Tensor) -> ir.Value:
    if _is_empty(expected):
        return _nothing(run.g, expected)
    if not isinstance(value, ir.Value):
        raise Unsupported(f"its translation gave {value!r} instead of a tensor")
    if value.dtype is None:
        value.type = ir.TensorType(dtypes.to_onnx(expected.dtype))
    if expected.dtype.is_complex:
        pairs.mark(value)
    value = run.g.cast(value, expected.dtype)
    if value.producer() is not None:
        inference.set_dims(value, pairs.dims_of(expected))
        run.g.sizes.learn(value, dims_of(expected))
    return value


def _assemble(
    run: _Run,
    placeholders: Sequence[torch.fx.Node],
    outputs: Sequence[torch.fx.Node],
    orders: Sequence[tuple[int, ...] | None],
) -> Translation:
    g = run.g
    results = [_as_output(g, _value(run, node), order) for node, order in zip(outputs, orders, strict=True)]
    inputs, weights, held = [], {}, []
    for index, node in enumerate(placeholders):
        value = run.values.get(node)
        if value is None or not value.uses() or value.name in g.initializers:
            continue
        if value.const_value is not None:
            weights[node.name] = index
            held.append(value)
        else:
            inputs.append(index)
    held += [value for value in g.initializers.values() if value.uses()]
    drawn = [(value, draw) for value, draw in g.noise.draws if value.uses()]
    graph = ir.Graph(
        [*(run.values[placeholders[i]] for i in inputs), *(value for value, _ in drawn)],
        results,
        nodes=g.nodes,
        initializers=held,
        opset_imports={"": g.opset},
        name="sardonyx",
    )
    model = ir.Model(graph, ir_version=opsets.IR_VERSION, producer_name="sardonyx")
    return Translation(model, inputs, weights, [draw for _, draw in drawn], run.own)


def _value(run: _Run, node: torch.fx.Node) -> ir.Value:
    """What a node is in the graph; a size, which nothing may have computed so far, as a number."""
    if node in run.values:
        value: ir.Value = run.values[node]
        return value
    number = node.meta["val"]
    if isinstance(number, torch.SymBool):
        return run.g.Squeeze(run.g.sizes.condition(expression_of(number)), run.g.ints([0]))
    if isinstance(number, torch.SymFloat):
        return run.g.sizes.real(number.node.expr)
    return run.g.scalar(dim_of(number), torch.int64)


def _as_output(g: Builder, value: ir.Value, order: tuple[int, ...] | None) -> ir.Value:
    """The value as a result: laid out in memory as torch expects it, and by a node of its own."""
    if order is not None:
        value = g.transpose(value, [*order, len(order)] if pairs.are_pairs(value) else order)
    if value.producer() is None or value.meta.get("returned"):
        value = g.shaped(g.Identity(value), g.dims(value))
    value.meta["returned"] = True
    return value
