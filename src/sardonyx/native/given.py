"""Models as users have them, as a graph that can be taken apart: a copy, with names, types and sizes."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import InlinePass, NameFixPass, RemoveUnusedNodesPass

from sardonyx.model_files import UserModel, blame_invalid_model, load_model, quiet_onnx_ir
from sardonyx.native.inference import infer


def given(model: UserModel) -> ir.Model:
    """A copy of a model. Weights are not copied, and those in files beside it are left there until they are read."""
    with blame_invalid_model(model), quiet_onnx_ir():
        return _described(load_model(model))


def _described(taken: ir.Model) -> ir.Model:
    if taken.functions:
        taken = InlinePass()(taken).model
    _name_sizes(taken.graph)
    NameFixPass()(taken)
    infer(taken)
    RemoveUnusedNodesPass()(taken)
    for node in taken.graph.all_nodes():  # a branch does not say by itself which version its operators are of
        node.version = node.version or taken.graph.opset_imports.get(node.domain)
    return taken


def _name_sizes(graph: ir.Graph) -> None:
    """Give sizes of inputs that have none a name: kernels read them from the inputs of each call."""
    for value in graph.inputs:
        if value.shape is not None and value.shape.has_unknown_dim():
            value.shape = ir.Shape([_named(dim, f"{value.name}_{axis}") for axis, dim in enumerate(value.shape)])


def _named(dim: int | ir.SymbolicDim, name: str) -> int | ir.SymbolicDim:
    return ir.SymbolicDim(name) if isinstance(dim, ir.SymbolicDim) and dim.value is None else dim
