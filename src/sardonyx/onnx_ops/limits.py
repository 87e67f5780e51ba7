"""Reject calls that would crash ONNX Runtime, or for which it deviates from the ONNX specification."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sardonyx.onnx_ops.nodes import NodeSpec, call_error
from sardonyx.onnx_ops.schemas import Operator

_NOT_EMPTY = {
    *("Conv", "ConvInteger", "ConvTranspose", "DeformConv", "QLinearConv", "InstanceNormalization"),
    *("DFT", "STFT", "GRU", "LSTM", "RNN", "QuantizeLinear", "Unique"),
}
"""Operators whose kernels divide by the number of elements, or read the first, without a check."""
_MAY_BE_EMPTY = {"BiasGelu", "FastGelu", "FusedMatMul", "Gelu", "QuickGelu", "TransposeMatMul"}
"""com.microsoft operators known to handle empty tensors; all others are rejected."""
_WITH_PAST = {"GroupQueryAttention", "MultiHeadAttention"}
_POSITIVE = {
    "num_heads",
    "q_num_heads",
    "kv_num_heads",
    "num_groups",
    "group",
    "hidden_size",
    "blocksize",
    "num_outputs",
}


def check_call(spec: NodeSpec) -> None:
    """Raise an error for attributes or outputs that are not supported."""
    for name, value in spec.attributes:
        if name in _POSITIVE and value < 1:
            raise call_error(spec.operator, f"{name} is {value}, and must be positive")
    limit = _LIMITS.get((spec.operator.domain, spec.operator.op_type))
    reason = limit(spec) if limit is not None else None
    if reason is not None:
        raise call_error(spec.operator, reason)


def check_tensors(operator: Operator, tensors: Sequence[torch.Tensor]) -> None:
    """Raise an error for unsupported shapes or values of tensors."""
    empty = [x for x in tensors if not x.numel()]
    if empty and not _may_be_empty(operator, empty):
        raise call_error(operator, "a tensor is empty, which ONNX Runtime's kernel does not support")
    if operator.op_type == "Inverse" and (tensors[0].dim() < 2 or tensors[0].shape[-1] != tensors[0].shape[-2]):
        raise call_error(operator, f"the matrices are not square: {tuple(tensors[0].shape)}")
    if operator.op_type == "STFT" and any(x.item() < 1 for x in tensors if not x.dim()):
        raise call_error(operator, "the frame step or frame length is not positive")


def _may_be_empty(operator: Operator, empty: Sequence[torch.Tensor]) -> bool:
    if not operator.domain:
        return operator.op_type not in _NOT_EMPTY
    if operator.op_type in _WITH_PAST:
        return all(x.dim() == 4 and x.shape[2] == 0 for x in empty)  # an empty past
    return operator.op_type in _MAY_BE_EMPTY


def _max_unpool(spec: NodeSpec) -> str | None:
    return (
        "with an output_shape, onnxruntime puts values in positions that differ from the ONNX specification"
        if len(spec.inputs) > 2
        else None
    )


def _attention(spec: NodeSpec) -> str | None:
    attributes = dict(spec.attributes)
    masked = 3 in spec.outputs and attributes.get("qk_matmul_output_mode") == 2 and attributes.get("is_causal")
    return "onnxruntime returns masked scores without the causal part of the mask" if masked else None


_LIMITS: dict[tuple[str, str], Callable[[NodeSpec], str | None]] = {
    ("", "MaxUnpool"): _max_unpool,
    ("", "Attention"): _attention,
}
"""Found by ONNX's own backend tests: by operator, a function that returns why a call is rejected."""
