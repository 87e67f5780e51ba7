"""Load a user's model for lowering: a copy, with functions inlined and names, types and shapes inferred."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import InlinePass, NameFixPass, RemoveUnusedNodesPass

from sardonyx.model_files import UserModel, blame_invalid_model, load_model, quiet_onnx_ir
from sardonyx.native.inference import infer


def load_inferred_model(model: UserModel) -> ir.Model:
    """Return a copy of a model. Weights are not copied, and external ones are read only when needed."""
    with blame_invalid_model(model), quiet_onnx_ir():
        return _infer_model(load_model(model))


def _infer_model(model: ir.Model) -> ir.Model:
    if model.functions:
        model = InlinePass()(model).model
    _name_sizes(model.graph)
    NameFixPass()(model)
    infer(model)
    RemoveUnusedNodesPass()(model)
    for node in model.graph.all_nodes():  # branches do not record the opset version
        node.version = node.version or model.graph.opset_imports.get(node.domain)
    return model


def _name_sizes(graph: ir.Graph) -> None:
    """Name unknown sizes of inputs: kernels read them from the inputs of each call."""
    for value in graph.inputs:
        if value.shape is not None and value.shape.has_unknown_dim():
            value.shape = ir.Shape([_name_dim(dim, f"{value.name}_{axis}") for axis, dim in enumerate(value.shape)])


def _name_dim(dim: int | ir.SymbolicDim, name: str) -> int | ir.SymbolicDim:
    return ir.SymbolicDim(name) if isinstance(dim, ir.SymbolicDim) and dim.value is None else dim
