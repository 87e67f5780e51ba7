"""Where in the user's code a node of a graph comes from."""

from __future__ import annotations

import re
from pathlib import Path

import torch

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)\n\s*(.*)')

_OURS = str(Path(__file__).parents[1])
"""What comes before a custom operator, which is called through an object of this package."""

_ROOT = re.compile(r"^L\['\w+'\]\.?")
"""How dynamo writes the model itself at the start of a module's path."""


def source_of(node: torch.fx.Node | None) -> str:
    """The innermost line of the user's code, as `file:line in function, code: …`; empty where torch kept none."""
    trace = (node.meta.get("stack_trace") or "") if node is not None else ""
    frames = [frame for frame in _FRAME.findall(trace) if not frame[0].startswith(_OURS)]
    if not frames:
        return ""
    file, line, function, code = frames[-1]
    return f"{file}:{line} in {function}, code: {code.strip()}"


def annotate(metadata: dict[str, str], node: torch.fx.Node | None) -> None:
    """Write the metadata that graph viewers group by module with."""
    if node is None:
        return
    stack = node.meta.get("nn_module_stack") or {}
    metadata["pkg.torch.onnx.fx_node"] = node.format_node() or node.name
    if stack:
        scopes = [_ROOT.sub("", str(path)) for path, _ in stack.values()]
        kinds = [_qualified(kind) for _, kind in stack.values()]
        metadata["pkg.torch.onnx.name_scopes"] = repr([*scopes, node.name])
        metadata["pkg.torch.onnx.class_hierarchy"] = repr([*kinds, str(node.target)])
    trace = node.meta.get("stack_trace")
    if trace:
        metadata["pkg.torch.onnx.stack_trace"] = trace


def _qualified(kind: type | str) -> str:
    return kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
