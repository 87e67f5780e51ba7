"""A graph as the Python source of a module."""

from __future__ import annotations

import textwrap

import torch
from torch.fx.graph_module import _format_import_block
from torch.package.importer import sys_importer

_TORCH_NAMESPACES = ("aten", "prims", "prim", "higher_order", "quantized", "_c10d_functional")


def class_source(graph: torch.fx.GraphModule, name: str = "Graph") -> tuple[str, str]:
    """The imports and the source of a class whose forward is the graph; those of its branches come first.

    Constants are taken from a mapping VALUES, as `constants` names them.
    """
    code = graph.graph.python_code("self")
    imports = {_format_import_block(code.globals, sys_importer), "import torch"}
    before, made = [], []
    for attribute in _attribute_names(graph):
        held = _get_attribute(graph, attribute)
        if isinstance(held, torch.fx.GraphModule):
            inner_imports, inner = class_source(held, f"{name}_{attribute.replace('.', '_')}")
            imports |= set(inner_imports.splitlines())
            before.append(inner)
            made.append(f"self.{attribute} = {name}_{attribute.replace('.', '_')}()")
        else:
            made.append(f"self.{attribute} = VALUES[{f'{name}.{attribute}'!r}]")
    body = textwrap.indent("\n".join(["super().__init__()", *made]), " " * 8)
    forward = textwrap.indent(code.src.strip(), " " * 4)
    source = f"class {name}(torch.nn.Module):\n    def __init__(self):\n{body}\n\n{forward}\n"
    unique = sorted({line for block in imports for line in block.splitlines() if line})
    return "\n".join(unique), "\n\n".join([*before, source])


def constants(graph: torch.fx.GraphModule, name: str = "Graph") -> dict[str, torch.Tensor]:
    """The tensors that a graph holds, its branches' included."""
    found: dict[str, torch.Tensor] = {}
    for attribute in _attribute_names(graph):
        held = _get_attribute(graph, attribute)
        if isinstance(held, torch.fx.GraphModule):
            found |= constants(held, f"{name}_{attribute.replace('.', '_')}")
        else:
            found[f"{name}.{attribute}"] = held.detach()
    return found


def custom_operators(graph: torch.fx.GraphModule) -> list[str]:
    """The operators of a graph that torch does not have by itself."""
    modules = [module for module in graph.modules() if isinstance(module, torch.fx.GraphModule)]
    targets = (node.target for module in modules for node in module.graph.nodes if node.op == "call_function")
    return sorted(
        {str(x) for x in targets if isinstance(x, torch._ops.OpOverload) and x.namespace not in _TORCH_NAMESPACES}
    )


def _attribute_names(graph: torch.fx.GraphModule) -> list[str]:
    return list(dict.fromkeys(str(node.target) for node in graph.graph.nodes if node.op in ("get_attr", "call_module")))


def _get_attribute(graph: torch.fx.GraphModule, attribute: str) -> torch.fx.GraphModule | torch.Tensor:
    held = graph
    for part in attribute.split("."):
        held = getattr(held, part)
    return held
