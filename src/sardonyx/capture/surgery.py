"""Changes to a graph of torch.export, so that it can be translated: edits, wrappers and composed operators resolved."""

from __future__ import annotations

import operator
from collections.abc import Container, Iterator, Sequence, Set
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
from sardonyx.capture.conditions import environment_of
from sardonyx.errors import CaptureError
from sardonyx.translate import table


def mutates(node: torch.fx.Node) -> bool:
    """Whether a node writes into one of its operands."""
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and bool(schema.is_mutable)


def is_functorch_transform(node: torch.fx.Node) -> bool:
    """Whether a node is a step of `torch.vmap` or another transform, which torch resolves when it traces again."""
    return node.op == "call_function" and getattr(node.target, "__module__", "") == "torch._functorch.predispatch"


def drop_inactive_dropout(graph: torch.fx.GraphModule) -> None:
    """Take out dropout that is not at work. It hands back its operand, of which torch loses track when edits follow."""
    for node in list(graph.graph.nodes):
        if getattr(node.target, "_opname", "").endswith("dropout") and node.args[2] is False:
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)


def functionalize_simple_edits(graph: torch.fx.GraphModule) -> None:
    """Write `relu_(x)` as `relu(x)` for all that comes after, where nothing else shares the memory of `x`.

    torch would trace the whole graph again for such edits; that is left for harder ones.
    """
    for node in list(graph.graph.nodes):
        if mutates(node) and _shares_no_memory(node.args[0]) and (pure := _functional_operator(node)) is not None:
            node.target = pure
            node.args[0].replace_all_uses_with(
                node, delete_user_cb=lambda user, after=node: user is not after and after < user
            )


def _functional_operator(node: torch.fx.Node) -> torch._ops.OpOverload | None:
    """The operator that returns what this one writes into its first operand; None if there is none."""
    pure = functional_of(node.target)
    if pure is None:
        return None
    values: Any = map_arg((node.args, node.kwargs), lambda operand: operand.meta["val"])
    args, kwargs = values
    with detect_fake_mode(args) or nullcontext():
        result = pure(*args, **kwargs)
    # an edit keeps the dtype of what it edits: `logical_not` of floats gives bool, `logical_not_` floats
    return pure if getattr(result, "dtype", None) == args[0].dtype else None


def functional_of(target: Any) -> torch._ops.OpOverload | None:
    """The operator of ATen that takes the arguments of one that edits in place: `pow.Tensor_Scalar` for `pow_.Scalar`.

    An overload of the same name may be another operator: `pow.Scalar` raises a number to tensors.
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
    """Whether a value is a fresh tensor of which nobody holds a view."""
    return (
        isinstance(value, torch.fx.Node)
        and value.op == "call_function"
        and not mutates(value)  # its result is its operand
        and not any(map(_is_view, (value, *value.users)))
    )


_NEVER_VIEWS = frozenset(
    {"linear", "matmul", "conv1d", "conv2d", "conv3d", "batch_norm", "layer_norm", "group_norm", "instance_norm"}
)
"""Operators that torch composes of others, which may hand back an operand as dropout does, and that do not."""


def _is_view(node: torch.fx.Node) -> bool:
    """Whether a result may share memory with an operand, other than by being it."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return node.op != "output"
    if any(result.alias_info is not None and not result.alias_info.is_write for result in target._schema.returns):
        return True
    return _is_composed(target) and target._opname not in _NEVER_VIEWS


def _is_composed(target: torch._ops.OpOverload) -> bool:
    return bool(target.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd))


_WRAPPERS = ("wrap_with_set_grad_enabled", "wrap_with_autocast")


def inline_wrappers(graph: torch.fx.GraphModule) -> None:
    """Put the body of a `with torch.no_grad():` and the like in its place: nothing here computes gradients."""
    for node in list(graph.graph.nodes):
        if node.op == "call_function" and getattr(node.target, "__name__", "") in _WRAPPERS:
            body = next(i for i, arg in enumerate(node.args) if _is_body(arg))
            settings, arguments = node.args[:body], node.args[body + 1 :]
            if "autocast" in node.target.__name__ and settings[2]:
                raise CaptureError(
                    "the model computes a part under torch.autocast",
                    hint="export it with the dtypes it is to have",
                )
            inner = getattr(graph, str(node.args[body].target))
            inline_wrappers(inner)
            _inline(graph, node, inner, arguments)
    graph.graph.eliminate_dead_code()


def _is_body(arg: Any) -> bool:
    return isinstance(arg, torch.fx.Node) and arg.op == "get_attr"


def decompose_composite(graph: torch.fx.GraphModule, preserved: Container[str]) -> dict[sympy.Symbol, torch.fx.Node]:
    """Replace operators that only torch's decompositions can express by what those make of them.

    Returns the symbolic sizes that became constants meanwhile, each with the operator whose decomposition did it.
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
        graph.graph.erase_node(node)  # it only raises, which ONNX cannot
    graph.graph.eliminate_dead_code()
    return specialized


def _specialized_symbols(environment: Any) -> Set[sympy.Symbol]:
    """The symbolic sizes that turned out to be constants."""
    return {s for s, size in environment.replacements.items() if size.is_number} if environment is not None else set()


def _is_composite(target: Any) -> bool:
    if not isinstance(target, torch._ops.OpOverload) or table.find(target) is not None:
        return False
    if target._opname.startswith("sym_") or target is torch.ops.aten.item.default:
        return False  # numbers, which would get another symbol than the one that nodes after it have
    return target in decompositions() or _is_composed(target)


def _trace_decomposition(node: torch.fx.Node, inputs: Sequence[torch.fx.Node]) -> torch.fx.GraphModule:
    def call(*values: Any) -> Any:
        given = dict(zip(inputs, values, strict=True))
        args, kwargs = map_arg((node.args, node.kwargs), given.__getitem__)
        result = node.target(*args, **kwargs)  # type: ignore[operator]  # an operator, by _is_composite
        return result if isinstance(result, (tuple, list)) else (result,)

    values = [n.meta["val"] for n in inputs]
    with _preserve_symbols(values):
        return make_fx(call, decomposition_table=decompositions(), _allow_non_fake_inputs=True)(*values)


@contextmanager
def _preserve_symbols(values: Sequence[Any]) -> Iterator[None]:
    """While active, symbolic sizes are not taken for constants.

    As composite kernels in C++ do, to which torch has others in Python, and functions that make real tensors.
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
    """Put a graph in the place of a node; its first result is the node's where the node has one."""
    env: dict[torch.fx.Node, Any] = dict(zip(inner.graph.find_nodes(op="placeholder"), args, strict=True))
    results: Any = ()
    with graph.graph.inserting_before(node):
        for made in inner.graph.nodes:
            if made.op == "get_attr":
                name = _unique_name(graph, f"_inner_{made.target}")
                setattr(graph, name, _attribute(inner, str(made.target)))
                env[made] = graph.graph.get_attr(name)
                env[made].meta.update(made.meta)
            elif made.op == "output":
                results = map_arg(made.args[0], env.__getitem__)
            elif made.op != "placeholder":
                env[made] = graph.graph.node_copy(made, env.__getitem__)
                env[made].meta = {**node.meta, **made.meta, **_origin(node)}
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
