"""Prepare a graph of torch.export for translation: functionalize, inline wrappers, decompose composite operators."""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterator, Sequence, Set
from contextlib import contextmanager, nullcontext
from typing import Any

import sympy
import torch
from torch._C import DispatchKey
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch.fx.experimental.proxy_tensor import make_fx, py_sym_types
from torch.fx.node import map_arg

from sardonyx.capture.aot import decompositions
from sardonyx.errors import CaptureError
from sardonyx.sizes import environment_of
from sardonyx.translate import table


def mutates(node: torch.fx.Node) -> bool:
    """Whether a node modifies one of its operands in place."""
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and bool(schema.is_mutable)


def is_functorch_transform(node: torch.fx.Node) -> bool:
    """Whether a node belongs to `torch.vmap` or another transform, which torch resolves when it retraces."""
    return node.op == "call_function" and getattr(node.target, "__module__", "") == "torch._functorch.predispatch"


def drop_inactive_dropout(graph: torch.fx.GraphModule) -> None:
    """Remove dropout in eval mode: it returns its operand, an alias that torch loses when in-place operators follow."""
    for node in list(graph.graph.nodes):
        if getattr(node.target, "_opname", "").endswith("dropout") and node.args[2] is False:
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)


def functionalize_simple_edits(graph: torch.fx.GraphModule) -> None:
    """Replace in-place operators such as `relu_(x)` by `relu(x)`, if nothing else shares the memory of `x`.

    Other in-place operators need torch's functionalization, which retraces the whole graph.
    """
    for node in list(graph.graph.nodes):
        if mutates(node) and _shares_no_memory(node.args[0]) and (pure := _functional_operator(node)) is not None:
            node.target = pure
            node.args[0].replace_all_uses_with(
                node, delete_user_cb=lambda user, after=node: user is not after and after < user
            )


def _functional_operator(node: torch.fx.Node) -> torch._ops.OpOverload | None:
    """Return the functional variant of an in-place operator; None if there is none with the same result."""
    pure = functional_of(node.target)
    if pure is None:
        return None
    values: Any = map_arg((node.args, node.kwargs), lambda operand: operand.meta["val"])
    args, kwargs = values
    with detect_fake_mode(args) or nullcontext():
        result = pure(*args, **kwargs)
    # an in-place operator keeps the dtype: `logical_not` of floats gives bool, `logical_not_` floats
    return pure if getattr(result, "dtype", None) == args[0].dtype else None


def functional_of(target: Any) -> torch._ops.OpOverload | None:
    """Return the functional ATen operator with the same arguments: `pow.Tensor_Scalar` for `pow_.Scalar`.

    The overload of the same name may be another operator: `pow.Scalar` raises a number to the power of a tensor.
    """
    name = target._schema.name
    if not name.startswith("aten::") or not name.endswith("_") or name.endswith("__"):
        return None
    packet = getattr(torch.ops.aten, name[6:-1], None)
    overloads = [getattr(packet, overload) for overload in packet.overloads()] if packet is not None else []
    return next((pure for pure in overloads if _parameters(pure) == _parameters(target)), None)


def _parameters(target: torch._ops.OpOverload) -> list[tuple[Any, ...]]:
    return [(x.name, str(x.type), x.kwarg_only, x.default_value) for x in target._schema.arguments]


def _shares_no_memory(value: Any) -> bool:
    """Whether a value is a newly computed tensor without views."""
    return (
        isinstance(value, torch.fx.Node)
        and value.op == "call_function"
        and not mutates(value)  # its result is its operand
        and not any(map(_is_view, (value, *value.users)))
    )


_NEVER_VIEWS = frozenset(
    {"linear", "matmul", "conv1d", "conv2d", "conv3d", "batch_norm", "layer_norm", "group_norm", "instance_norm"}
)
"""Composite operators that never return an operand or a view of one; others may, as dropout does."""


def _is_view(node: torch.fx.Node) -> bool:
    """Whether the result may be a view of an operand."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return node.op != "output"
    if any(result.alias_info is not None and not result.alias_info.is_write for result in target._schema.returns):
        return True
    return _is_composite_implicit(target) and target._opname not in _NEVER_VIEWS


def _is_composite_implicit(target: torch._ops.OpOverload) -> bool:
    return bool(target.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd))


_WRAPPERS = ("wrap_with_set_grad_enabled", "wrap_with_autocast")


def inline_wrappers(graph: torch.fx.GraphModule) -> None:
    """Inline the bodies of `with torch.no_grad():` and similar blocks, which do not matter without gradients."""
    for node in list(graph.graph.nodes):
        if node.op == "call_function" and getattr(node.target, "__name__", "") in _WRAPPERS:
            body = next(i for i, arg in enumerate(node.args) if _is_body(arg))
            settings, arguments = node.args[:body], node.args[body + 1 :]
            if "autocast" in node.target.__name__ and settings[2]:
                raise CaptureError(
                    "the model uses torch.autocast",
                    hint="convert the model to the dtypes that you want before exporting it",
                )
            inner = getattr(graph, str(node.args[body].target))
            inline_wrappers(inner)
            _inline(graph, node, inner, arguments)
    graph.graph.eliminate_dead_code()


def _is_body(arg: Any) -> bool:
    return isinstance(arg, torch.fx.Node) and arg.op == "get_attr"


def decompose_composite(graph: torch.fx.GraphModule, preserved: Container[str]) -> dict[sympy.Symbol, torch.fx.Node]:
    """Decompose operators that have a decomposition in torch and no translation.

    Returns the symbolic sizes that became constants, each with the operator whose decomposition did it.
    """
    specialized: dict[sympy.Symbol, torch.fx.Node] = {}
    environment = environment_of(node.meta.get("val") for node in graph.graph.find_nodes(op="placeholder"))
    for node in list(graph.graph.nodes):
        if node.op == "call_function" and _is_composite(node.target) and table.name_of(node.target) not in preserved:
            inputs = node.all_input_nodes
            before = _specialized_symbols(environment)
            _inline(graph, node, _trace_decomposition(node, inputs), inputs)
            specialized |= dict.fromkeys(_specialized_symbols(environment) - before, node)
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten._linalg_check_errors.default):
        graph.graph.erase_node(node)  # it can only raise, which ONNX cannot
    graph.graph.eliminate_dead_code()
    return specialized


def _specialized_symbols(environment: Any) -> Set[sympy.Symbol]:
    """Return the symbolic sizes that became constants."""
    return {s for s, size in environment.replacements.items() if size.is_number} if environment is not None else set()


def _is_composite(target: Any) -> bool:
    if not isinstance(target, torch._ops.OpOverload) or table.find(target) is not None:
        return False
    if target._opname.startswith("sym_") or target is torch.ops.aten.item.default:
        return False  # numbers, which would get a new symbol, unlike the nodes that use them
    return target in decompositions() or _is_composite_implicit(target)


def _trace_decomposition(node: torch.fx.Node, inputs: Sequence[torch.fx.Node]) -> torch.fx.GraphModule:
    def call(*values: Any) -> Any:
        value_of = dict(zip(inputs, values, strict=True))
        args, kwargs = map_arg((node.args, node.kwargs), value_of.__getitem__)
        result = node.target(*args, **kwargs)  # type: ignore[operator]  # an operator, by _is_composite
        return result if isinstance(result, (tuple, list)) else (result,)

    values = [n.meta["val"] for n in inputs]
    try:
        with _preserve_symbols(values):
            traced = _traced(call, values)
            if any(map(mutates, traced.graph.nodes)):  # of its own tensors, as in circular padding
                traced = _traced(torch.func.functionalize(traced, remove="mutations"), values)
    except Exception as error:  # such as one that reads the numbers in a tensor
        what = str(error).partition("\n")[0]
        raise CaptureError(
            f"torch cannot decompose {node.target}: {what}",
            hint='use torch.compile(model, backend="sardonyx"), which leaves the operator to torch',
        ) from error
    return traced


def _traced(function: Callable[..., Any], values: Sequence[Any]) -> torch.fx.GraphModule:
    return make_fx(function, decomposition_table=decompositions(), _allow_non_fake_inputs=True)(*values)


@contextmanager
def _preserve_symbols(values: Sequence[Any]) -> Iterator[None]:
    """While active, symbolic sizes do not become constants.

    Composite C++ kernels, for which torch has alternatives in Python, and functions that create real tensors do that.
    """
    mode = detect_fake_mode(values) if any(map(_is_symbolic, values)) else None
    if mode is None:
        yield
    else:
        with enable_python_dispatcher(), mode:
            yield


def _is_symbolic(value: Any) -> bool:
    return isinstance(value, py_sym_types) or any(isinstance(s, torch.SymInt) for s in getattr(value, "shape", ()))


def _inline(graph: torch.fx.GraphModule, node: torch.fx.Node, inner: torch.fx.GraphModule, args: Sequence[Any]) -> None:
    """Replace a node by a graph, whose first result replaces the node if it has a single result."""
    env: dict[torch.fx.Node, Any] = dict(zip(inner.graph.find_nodes(op="placeholder"), args, strict=True))
    results: Any = ()
    with graph.graph.inserting_before(node):
        for inner_node in inner.graph.nodes:
            if inner_node.op == "get_attr":
                name = _unique_name(graph, f"_inner_{inner_node.target}")
                setattr(graph, name, _attribute(inner, str(inner_node.target)))
                env[inner_node] = graph.graph.get_attr(name)
                env[inner_node].meta.update(inner_node.meta)
            elif inner_node.op == "output":
                results = map_arg(inner_node.args[0], env.__getitem__)
            elif inner_node.op != "placeholder":
                env[inner_node] = graph.graph.node_copy(inner_node, env.__getitem__)
                env[inner_node].meta = {**node.meta, **inner_node.meta, **_origin(node)}
    _replace(node, results if isinstance(results, (tuple, list)) else (results,))
    graph.graph.erase_node(node)


def _origin(node: torch.fx.Node) -> dict[str, Any]:
    return {key: node.meta[key] for key in ("stack_trace", "nn_module_stack") if key in node.meta}


def _replace(node: torch.fx.Node, results: Sequence[Any]) -> None:
    if not isinstance(node.meta.get("val"), (tuple, list)):
        node.replace_all_uses_with(results[0])
        return
    for user in list(node.users):
        assert user.target is operator.getitem
        index = user.args[1]
        assert isinstance(index, int)
        user.replace_all_uses_with(results[index])
        user.graph.erase_node(user)


def _attribute(module: Any, path: str) -> Any:
    for part in path.split("."):
        module = getattr(module, part)
    return module


def _unique_name(module: torch.nn.Module, stem: str) -> str:
    stem = stem.replace(".", "_")
    name, number = stem, 0
    while hasattr(module, name):
        number += 1
        name = f"{stem}_{number}"
    return name
