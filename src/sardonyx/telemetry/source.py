"""The line of the user's code that a graph node comes from."""

from __future__ import annotations

import re
from pathlib import Path

import torch

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)\n\s*(.*)')

_OURS = str(Path(__file__).parents[1])
"""Frames of this package are skipped: custom operators are called through its objects."""

_ROOT = re.compile(r"^L\['\w+'\]\.?")
"""The prefix for the model itself in dynamo's module paths."""


def source_of(node: torch.fx.Node | None) -> str:
    """Return the innermost line of the user's code, as `file:line in function, code: …`; empty if unknown."""
    trace = (node.meta.get("stack_trace") or "") if node is not None else ""
    frames = [frame for frame in _FRAME.findall(trace) if not frame[0].startswith(_OURS)]
    if not frames:
        return ""
    file, line, function, code = frames[-1]
    return f"{file}:{line} in {function}, code: {code.strip()}"


def module_of(node: torch.fx.Node | None) -> str:
    """Return the path of the innermost module that a node comes from; empty if unknown, and for the model itself."""
    stack = (node.meta.get("nn_module_stack") or {}) if node is not None else {}
    paths = [_ROOT.sub("", str(path)) for path, _ in stack.values()]
    return paths[-1] if paths else ""


def annotate(metadata: dict[str, str], node: torch.fx.Node | None) -> None:
    """Add the metadata by which graph viewers group nodes by module."""
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
