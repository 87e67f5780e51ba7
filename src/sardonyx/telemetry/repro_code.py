"""Write an FX graph as the Python source of a module."""

from __future__ import annotations

import textwrap

import torch
from torch.fx.graph_module import _format_import_block
from torch.package.importer import sys_importer

_TORCH_NAMESPACES = ("aten", "prims", "prim", "higher_order", "quantized", "_c10d_functional")


def class_source(graph: torch.fx.GraphModule, name: str = "Graph") -> tuple[str, str]:
    """Return the imports, and the source of a class whose forward is the graph; classes of subgraphs come first.

    Constants are read from a mapping VALUES, with the keys of `constants`.
    """
    code = graph.graph.python_code("self")
    imports = {_format_import_block(code.globals, sys_importer), "import torch"}
    inner_classes, assignments = [], []
    for attribute in _attribute_names(graph):
        value = _get_attribute(graph, attribute)
        if isinstance(value, torch.fx.GraphModule):
            inner_imports, inner = class_source(value, f"{name}_{attribute.replace('.', '_')}")
            imports |= set(inner_imports.splitlines())
            inner_classes.append(inner)
            assignments.append(f"self.{attribute} = {name}_{attribute.replace('.', '_')}()")
        else:
            assignments.append(f"self.{attribute} = VALUES[{f'{name}.{attribute}'!r}]")
    body = textwrap.indent("\n".join(["super().__init__()", *assignments]), " " * 8)
    forward = textwrap.indent(code.src.strip(), " " * 4)
    source = f"class {name}(torch.nn.Module):\n    def __init__(self):\n{body}\n\n{forward}\n"
    unique = sorted({line for block in imports for line in block.splitlines() if line})
    return "\n".join(unique), "\n\n".join([*inner_classes, source])


def constants(graph: torch.fx.GraphModule, name: str = "Graph") -> dict[str, torch.Tensor]:
    """Return the constant tensors of a graph and its subgraphs."""
    tensors: dict[str, torch.Tensor] = {}
    for attribute in _attribute_names(graph):
        value = _get_attribute(graph, attribute)
        if isinstance(value, torch.fx.GraphModule):
            tensors |= constants(value, f"{name}_{attribute.replace('.', '_')}")
        else:
            tensors[f"{name}.{attribute}"] = value.detach()
    return tensors


def custom_operators(graph: torch.fx.GraphModule) -> list[str]:
    """Return the names of a graph's custom operators."""
    modules = [module for module in graph.modules() if isinstance(module, torch.fx.GraphModule)]
    targets = (node.target for module in modules for node in module.graph.nodes if node.op == "call_function")
    return sorted(
        {str(x) for x in targets if isinstance(x, torch._ops.OpOverload) and x.namespace not in _TORCH_NAMESPACES}
    )


def _attribute_names(graph: torch.fx.GraphModule) -> list[str]:
    return list(dict.fromkeys(str(node.target) for node in graph.graph.nodes if node.op in ("get_attr", "call_module")))


def _get_attribute(graph: torch.fx.GraphModule, attribute: str) -> torch.fx.GraphModule | torch.Tensor:
    value = graph
    for part in attribute.split("."):
        value = getattr(value, part)
    return value
