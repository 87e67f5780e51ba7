"""Translate an FX graph to an ONNX graph, node by node with the table."""

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
from sardonyx.sizes import dim_of, dims_of, environment_of, equality, expression_of
from sardonyx.translate import complex_as_real, control, inference, table, torchlib
from sardonyx.translate.builder import Builder
from sardonyx.translate.random_inputs import RandomInput, RandomMode

WEIGHTS_LOCATION = "torch"
"""The external-data location of initializers whose data is in a torch tensor."""


@dataclass(frozen=True)
class Refusal:
    """A node that cannot be translated, and why."""

    node: torch.fx.Node
    reason: str
    inside: torch.fx.Node | None = None
    """The node of a subgraph that is the cause, if the node is control flow."""


class NotExpressible(Exception):
    """Some nodes of a graph cannot be translated; all of them are listed."""

    def __init__(self, refusals: Sequence[Refusal]) -> None:
        self.refusals = list(refusals)
        super().__init__(", ".join(str(r.node.target) for r in refusals))


@dataclass
class Translation:
    """An ONNX model, and how its inputs and outputs map to the FX graph."""

    model: ir.Model
    inputs: list[int]
    """For each ONNX input, the index of its FX placeholder."""
    weights: dict[str, int]
    """For each initializer that shares torch's memory, the index of its FX placeholder."""
    random_inputs: list[RandomInput] = field(default_factory=list)
    """The ONNX inputs after those, which are random numbers."""
    own: dict[str, str] = field(default_factory=dict)
    """With torchlib first: operators that our own table translated, and why."""


@dataclass
class _State:
    """The state of one translation."""

    g: Builder
    unsupported_reason: Callable[[ir.Node], str | None]
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
    unsupported_reason: Callable[[ir.Node], str | None] = lambda node: None,
    random_mode: RandomMode = "inputs",
    translations: Mapping[str, Callable[..., Any]] | None = None,
    translator: str = "sardonyx",
) -> Translation:
    """Translate the whole graph, or raise `NotExpressible` with every node that cannot be translated.

    `outputs` are the FX nodes to return, each with its axes permuted by `orders`. `weights` are the placeholders that
    become initializers sharing torch's memory, `numbers` those that become constants, `stays` the nodes that torch
    computes, which are inputs of this graph. `unsupported_reason` returns why a node cannot run on the engine, if so.
    `random_mode` is where random numbers come from. `translations`, by qualified name, override the table. With the
    `translator` "torchlib", torchlib is tried before the table too.
    """
    values = (node.meta.get("val") for node in graph.graph.nodes)
    g = Builder(opset, random_mode=random_mode, equal=equality(environment_of(values)))
    run = _State(g, unsupported_reason, translations or {}, torchlib_first=translator == "torchlib")
    run.g.reserve(node.name for node in graph.graph.nodes)
    frozen = set(weights)
    placeholders = list(graph.graph.find_nodes(op="placeholder"))
    tensors_first = sorted(enumerate(placeholders), key=lambda item: _is_size(item[1]))
    for index, node in tensors_first:  # so that sizes are read from tensors if possible
        if numbers and index in numbers:
            run.values[node] = run.g.scalar(numbers[index], node.meta["val"].dtype)
        else:
            _add_input(run, node, frozen=index in frozen)
    _add_nodes(run, graph, stays)
    if run.refusals:
        raise NotExpressible(run.refusals)
    return _assemble(run, placeholders, outputs, orders)


def _add_nodes(run: _State, graph: torch.fx.GraphModule, stays: Set[torch.fx.Node] = frozenset()) -> None:
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            _add_constant(run, graph, node)
        elif node.op == "call_function" and node in stays:
            _add_input(run, node, frozen=False)
        elif node.op == "call_function":
            _add_call(run, node)


def _add_input(run: _State, node: torch.fx.Node, *, frozen: bool) -> None:
    val = node.meta.get("val")
    if isinstance(val, torch.Tensor):
        if not dtypes.is_known(val.dtype):
            return  # nodes that use it are refused
        value = value_from_fx(node.name, val)
        run.g.sizes.learn(value, dims_of(val))
        value.meta["constant"] = getattr(val, "constant", None)  # the value of a small literal tensor
        if frozen and val.numel() and not (val.is_complex() or val.is_neg()):  # ONNX cannot share these
            value.const_value = external_weight(node.name, dtypes.to_onnx(val.dtype), tuple(map(int, val.shape)))
        run.values[node] = value
    elif isinstance(val, (tuple, list)):
        pass  # results of an operator that stays in torch; each getitem is an input
    elif isinstance(val, (torch.SymInt, int)):
        value = ir.Value(name=node.name, type=ir.TensorType(ir.DataType.INT64))
        inference.set_dims(value, (1,))
        run.values[node] = value
        dim = dim_of(val)
        if isinstance(dim, sympy.Expr):
            run.g.sizes.learn_input(dim, value)


def value_from_fx(name: str, val: torch.Tensor) -> ir.Value:
    """Return a value with the dtype and shape of FX's metadata."""
    value = ir.Value(name=name, type=ir.TensorType(dtypes.to_onnx(val.dtype)))
    inference.set_dims(value, complex_as_real.dims_of(val))
    return complex_as_real.mark(value) if val.dtype.is_complex else value


def external_weight(name: str, dtype: ir.DataType, shape: tuple[int, ...]) -> ir.ExternalTensor:
    """Return an external tensor without data, for a weight whose data stays in torch."""
    return ir.ExternalTensor(WEIGHTS_LOCATION, 0, 0, dtype, shape=ir.Shape(shape), name=name)


def _add_constant(run: _State, graph: torch.fx.GraphModule, node: torch.fx.Node) -> None:
    attribute: Any = graph
    for part in str(node.target).split("."):
        attribute = getattr(attribute, part)
    if not isinstance(attribute, torch.Tensor):
        run.values[node] = attribute
    elif dtypes.is_known(attribute.dtype):
        run.values[node] = run.g.constant(dtypes.to_array(attribute.cpu()), dtypes.to_onnx(attribute.dtype))


_WITHOUT_EFFECT = ("_assert_scalar", "_assert_async", "_assert_tensor_metadata", "sym_constrain_range_for_size")


def _add_call(run: _State, node: torch.fx.Node) -> None:
    if node.target in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default):
        _read_number(run, node)
    if _is_size_arithmetic(node):
        return
    if getattr(node.target, "_opname", "") in _WITHOUT_EFFECT:
        return
    missing = [n for n in node.all_input_nodes if n not in run.values and not _is_size(n)]
    if missing and node.target is operator.getitem:
        _add_input(run, node, frozen=False)  # a result of an operator that stays in torch
        return
    mark = len(run.g.nodes)
    try:
        if missing:
            raise Unsupported(f"its operand {missing[0].name} has no ONNX equivalent")
        with run.g.translating(node):
            result = None if _is_empty(node.meta.get("val")) else _translate_call(run, node)
            value = _state_types(run, node, result)
            _check_kernels(run, run.g.nodes[mark:])
            run.values[node] = value
    except Unsupported as refusal:
        run.refusals.append(Refusal(node, str(refusal), refusal.node if isinstance(refusal, _InSubgraph) else None))
        _add_input(run, node, frozen=False)
    except TypeError as error:
        if not _has_symbols(node):
            raise
        run.refusals.append(Refusal(node, f"its translation does not support a symbolic number: {error}"))
        _add_input(run, node, frozen=False)


def _has_symbols(node: torch.fx.Node) -> bool:
    """Whether an operand is a symbolic number, which some translations cannot compare."""
    return any(isinstance(source.meta.get("val"), (torch.SymInt, torch.SymFloat)) for source in node.all_input_nodes)


def _read_number(run: _State, node: torch.fx.Node) -> None:
    """Read a number from a tensor, as `.item()` does; a boolean is a number that equals one."""
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


def _check_kernels(run: _State, nodes: Sequence[ir.Node]) -> None:
    for node in nodes:
        reason = run.unsupported_reason(node)
        if reason is not None:
            raise Unsupported(reason)


def _is_size_arithmetic(node: torch.fx.Node) -> bool:
    """Whether the node computes a number from sizes, which the graph reads from tensors instead."""
    return _is_size(node) and node.target is not operator.getitem


def _is_size(node: torch.fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float))


def _translate_call(run: _State, node: torch.fx.Node) -> Any:
    if node.target is operator.getitem:
        return run.values[node.all_input_nodes[0]][node.args[1]]
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return _translate_control(run, node)
    numbers = _dtype_of_numbers(node)
    args = [_argument(run, arg, numbers) for arg in node.args]
    kwargs = {key: _argument(run, arg, numbers) for key, arg in node.kwargs.items()}
    own = run.translations.get(table.name_of(node.target))
    if own is None and complex_as_real.involves_complex(node):
        own = complex_as_real.find(node.target)
        if own is None:
            raise Unsupported("no translation for complex tensors")
    translation = own or table.find(node.target)
    if translation is None or (run.torchlib_first and own is None):
        try:
            return _translate_by_torchlib(run, node, args, kwargs)
        except Unsupported as refusal:
            if translation is None:
                raise
            run.own[str(node.target)] = str(refusal)
    return translation(run.g, *args, **kwargs)


def _translate_by_torchlib(run: _State, node: torch.fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Translate with torchlib, check the result at once, and undo it on failure, so that ours can follow."""
    mark = len(run.g.nodes)
    with run.g.translating(node):
        value = _state_types(run, node, torchlib.translate(run.g, node, args, kwargs, first=run.torchlib_first))
        _check_kernels(run, run.g.nodes[mark:])
    return value


def _translate_control(run: _State, node: torch.fx.Node) -> Any:
    translation = control.find(node.target)
    if any(node.kwargs.values()):
        raise Unsupported("its translation does not support " + ", ".join(node.kwargs))
    if complex_as_real.involves_complex(node):
        raise Unsupported("no translation for complex tensors")
    conditions = map(_condition, node.args)
    args = [_argument(run, arg) if c is None else c for arg, c in zip(node.args, conditions, strict=True)]
    return translation(run.g, lambda graph, operands: _inline(run, graph, operands), *args)


def _condition(arg: Any) -> Any:
    """Return the relation of a symbolic condition; None for anything else."""
    val = arg.meta.get("val") if isinstance(arg, torch.fx.Node) else None
    return expression_of(val) if isinstance(val, torch.SymBool) else None


class _InSubgraph(Unsupported):
    """A node of a subgraph cannot be translated."""

    def __init__(self, refusal: Refusal) -> None:
        self.node = refusal.inside or refusal.node
        super().__init__(f"in its subgraph, {refusal.node.target}: {refusal.reason}")


def _inline(run: _State, graph: torch.fx.GraphModule, operands: Sequence[Any]) -> control.Results:
    """Translate a subgraph into the builder's current graph; return its results for these operands."""
    g, mark = run.g, len(run.g.nodes)
    inner = _State(g, run.unsupported_reason, run.translations, run.torchlib_first, run.own)
    with g.sizes.scope():
        inner.values, symbols = control.bind(g, list(graph.graph.find_nodes(op="placeholder")), operands)
        _add_nodes(inner, graph)
        if inner.refusals:
            raise _InSubgraph(inner.refusals[0])
        returned = graph.graph.output_node().args[0]
        results = [_result(inner, x) for x in (returned if isinstance(returned, (tuple, list)) else (returned,))]
    control.rename(g, g.nodes[mark:], symbols)
    return results


def _result(run: _State, x: Any) -> ir.Value | None:
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
    raise Unsupported(f"it returns {x}, which has no ONNX equivalent")


_ACCEPT_SCALARS = frozenset(
    {"add", "sub", "rsub", "mul", "div", "floor_divide", "remainder", "fmod", "pow", "lerp"}
    | {"clamp", "clamp_min", "clamp_max", "where", "masked_fill", "full", "scalar_tensor"}
)
"""Operators whose translations accept a scalar tensor for a number, in the dtype of the result."""
_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
"""Operators whose translations do so in the dtype that torch promotes the tensor and a number to."""


def _dtype_of_numbers(node: torch.fx.Node) -> torch.dtype | None:
    """Return the dtype in which the translation accepts symbolic floats; None if it does not."""
    name = getattr(node.target, "_opname", "")
    if name in _COMPARISONS:
        tensor = node.args[0].meta["val"] if isinstance(node.args[0], torch.fx.Node) else None
        return torch.result_type(tensor, 1.0) if isinstance(tensor, torch.Tensor) else None
    return torch.float64 if name in _ACCEPT_SCALARS else None


def _argument(run: _State, arg: Any, numbers: torch.dtype | None = None) -> Any:
    """Convert FX arguments for translations: to ONNX values, expressions, Python values."""

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


def _state_types(run: _State, node: torch.fx.Node, result: Any) -> Any:
    """Check the results of a translation against FX's metadata, and record sizes."""
    expected = node.meta.get("val")
    if isinstance(expected, torch.Tensor):
        return _state_type(run, result, expected)
    if isinstance(expected, (tuple, list)) and isinstance(result, (tuple, list)):
        # For a result that is not read, a translation may return anything, such as an operand.
        numbered = enumerate(zip(result, expected, strict=False))
        return [_state_item(run, value, val) if run.g.reads_output(i) else None for i, (value, val) in numbered]
    return result


def _state_item(run: _State, value: Any, expected: Any) -> Any:
    if isinstance(expected, torch.SymInt) and isinstance(value, ir.Value):
        dim = dim_of(expected)
        if isinstance(dim, sympy.Expr):
            run.g.sizes.learn_input(dim, value)
    return _state_type(run, value, expected) if isinstance(expected, torch.Tensor) and value is not None else value


def _is_empty(expected: Any) -> bool:
    """Whether a result is empty for all inputs: ONNX leaves many operators undefined there."""
    return isinstance(expected, torch.Tensor) and 0 in dims_of(expected)


def _empty_value(g: Builder, expected: torch.Tensor) -> ir.Value:
    dims, dtype = dims_of(expected), dtypes.to_onnx(expected.dtype)
    sizes = [dim if isinstance(dim, int) else 1 for dim in dims]
    constant = g.constant(dtypes.to_array(torch.empty(sizes, dtype=expected.dtype)), dtype)
    tail = (2,) if complex_as_real.is_complex(constant) else ()
    value = g.expand(constant, (*dims, *tail))
    return complex_as_real.mark(value) if tail else value


def _state_type(run: _State, value: ir.Value, expected: torch.Tensor) -> ir.Value:
    if _is_empty(expected):
        return _empty_value(run.g, expected)
    if not isinstance(value, ir.Value):
        raise Unsupported(f"its translation returned {value!r} instead of a tensor")
    if value.dtype is None:
        value.type = ir.TensorType(dtypes.to_onnx(expected.dtype))
    if expected.dtype.is_complex:
        complex_as_real.mark(value)
    value = run.g.cast(value, expected.dtype)
    if value.producer() is not None:
        inference.set_dims(value, complex_as_real.dims_of(expected))
        run.g.sizes.learn(value, dims_of(expected))
    return value


def _assemble(
    run: _State,
    placeholders: Sequence[torch.fx.Node],
    outputs: Sequence[torch.fx.Node],
    orders: Sequence[tuple[int, ...] | None],
) -> Translation:
    g = run.g
    results = [_as_output(g, _value(run, node), order) for node, order in zip(outputs, orders, strict=True)]
    inputs, weights, initializers = [], {}, []
    for index, node in enumerate(placeholders):
        value = run.values.get(node)
        if value is None or not value.uses() or value.name in g.initializers:
            continue
        if value.const_value is not None:
            weights[node.name] = index
            initializers.append(value)
        else:
            inputs.append(index)
    initializers += [value for value in g.initializers.values() if value.uses()]
    random = [(value, about) for value, about in g.random.inputs if value.uses()]
    graph = ir.Graph(
        [*(run.values[placeholders[i]] for i in inputs), *(value for value, _ in random)],
        results,
        nodes=g.nodes,
        initializers=initializers,
        opset_imports={"": g.opset},
        name="sardonyx",
    )
    model = ir.Model(graph, ir_version=opsets.IR_VERSION, producer_name="sardonyx")
    return Translation(model, inputs, weights, [about for _, about in random], run.own)


def _value(run: _State, node: torch.fx.Node) -> ir.Value:
    """Return the value of a node; a symbolic number that is not computed yet is computed."""
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
    """Return the value as a graph output: with torch's memory layout, and computed by its own node."""
    if order is not None:
        value = g.transpose(value, [*order, len(order)] if complex_as_real.is_complex(value) else order)
    if value.producer() is None or value.meta.get("returned"):
        value = g.shaped(g.Identity(value), g.dims(value))
    value.meta["returned"] = True
    return value
