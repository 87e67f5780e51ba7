"""Weights of a file's model, which stay in torch's memory when a session is opened."""

from __future__ import annotations

import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import TorchTensor

from sardonyx.translate.translator import external_weight


def extract_weights(model: ir.Model) -> dict[str, torch.Tensor]:
    """Remove the data of weights from the model, and weights that nothing reads; return their tensors by name."""
    weights = {}
    for name, value in list(model.graph.initializers.items()):
        if not (value.uses() or value.is_graph_output() or value.is_graph_input()):
            del model.graph.initializers[name]  # ONNX Runtime refuses data for a weight that it drops
            continue
        stored = value.const_value
        if not isinstance(stored, (TorchTensor, ir.LazyTensor)) or not stored.size:
            continue
        tensor = stored.raw.detach() if isinstance(stored, TorchTensor) else torch.from_numpy(stored.numpy())
        weights[name] = tensor.contiguous()
        value.const_value = external_weight(name, stored.dtype, tuple(tensor.shape))
    return weights
