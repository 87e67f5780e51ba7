"""Models as users have them, as a graph that can be taken apart: a copy, with names, types and sizes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol, TypeAlias

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass, NameFixPass, RemoveUnusedNodesPass

from sardonyx.errors import SardonyxError
from sardonyx.native.inference import infer


class HoldsModel(Protocol):
    """Something around a model, as what `sardonyx.export` and `sardonyx.optimize` return."""

    model: ir.Model


Given: TypeAlias = "str | os.PathLike[str] | bytes | onnx.ModelProto | ir.Model | HoldsModel"
"""A file, its content, a model in memory, or a `Program`."""


def given(model: Given) -> ir.Model:
    """A copy of a model. Weights are not copied, and those in files beside it are left there until they are read."""
    taken = _read(model)
    if taken.functions:
        taken = InlinePass()(taken).model
    _name_sizes(taken.graph)
    NameFixPass()(taken)
    infer(taken)
    RemoveUnusedNodesPass()(taken)
    for node in taken.graph.all_nodes():  # a branch does not say by itself which version its operators are of
        node.version = node.version or taken.graph.opset_imports.get(node.domain)
    return taken


def _read(model: Given) -> ir.Model:
    if isinstance(model, ir.Model):
        return model.clone()
    if isinstance(model, onnx.ModelProto):
        return ir.from_proto(model)
    if isinstance(model, (str, os.PathLike)):
        return _of_file(Path(model))
    if isinstance(model, bytes):
        return _of_bytes(model)
    if isinstance(getattr(model, "model", None), ir.Model):
        return model.model.clone()
    raise TypeError(
        "a model is a path, bytes, an onnx.ModelProto, an onnx_ir.Model or a sardonyx.Program, "
        f"not {type(model).__name__}"
    )


def _of_file(path: Path) -> ir.Model:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        return ir.load(path)
    except Exception as error:
        raise SardonyxError(f"{path} is no ONNX model that can be read: {error}") from error


def _of_bytes(content: bytes) -> ir.Model:
    try:
        return ir.from_proto(onnx.load_model_from_string(content))
    except Exception as error:
        raise SardonyxError(f"these {len(content)} bytes are no ONNX model: {error}") from error


def _name_sizes(graph: ir.Graph) -> None:
    """Give sizes of inputs that have none a name: kernels read them from the inputs of each call."""
    for value in graph.inputs:
        if value.shape is not None and value.shape.has_unknown_dim():
            value.shape = ir.Shape([_named(dim, f"{value.name}_{axis}") for axis, dim in enumerate(value.shape)])


def _named(dim: int | ir.SymbolicDim, name: str) -> int | ir.SymbolicDim:
    return ir.SymbolicDim(name) if isinstance(dim, ir.SymbolicDim) and dim.value is None else dim
