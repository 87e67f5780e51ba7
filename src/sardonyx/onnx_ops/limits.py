"""Calls that are refused because ONNX Runtime would crash, or compute something else than ONNX says."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sardonyx.onnx_ops.nodes import Call, refused
from sardonyx.onnx_ops.schemas import Operator

_NOT_EMPTY = {
    *("Conv", "ConvInteger", "ConvTranspose", "DeformConv", "QLinearConv", "InstanceNormalization"),
    *("DFT", "STFT", "GRU", "LSTM", "RNN", "QuantizeLinear", "Unique"),
}
"""Operators whose kernels divide by the number of elements, or read the first, without looking."""
_MAY_BE_EMPTY = {"BiasGelu", "FastGelu", "FusedMatMul", "Gelu", "QuickGelu", "TransposeMatMul"}
"""Operators of Microsoft's that are known to do without elements: others are not tried."""
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


def check_call(call: Call) -> None:
    """Refuse a call for its attributes and outputs."""
    for name, value in call.attributes:
        if name in _POSITIVE and value < 1:
            raise refused(call.operator, f"its {name} is {value}")
    limit = _LIMITS.get((call.operator.domain, call.operator.op_type))
    why = limit(call) if limit is not None else None
    if why is not None:
        raise refused(call.operator, why)


def check_tensors(operator: Operator, tensors: Sequence[torch.Tensor]) -> None:
    """Refuse a call for the sizes of its tensors, or for their values."""
    empty = [x for x in tensors if not x.numel()]
    if empty and not _may_be_empty(operator, empty):
        raise refused(operator, "a tensor has no elements, for which ONNX Runtime's kernel is not made")
    if operator.op_type == "Inverse" and (tensors[0].dim() < 2 or tensors[0].shape[-1] != tensors[0].shape[-2]):
        raise refused(operator, f"its matrices are not square: {tuple(tensors[0].shape)}")
    if operator.op_type == "STFT" and any(x.item() < 1 for x in tensors if not x.dim()):
        raise refused(operator, "its step or its frames are not positive")


def _may_be_empty(operator: Operator, empty: Sequence[torch.Tensor]) -> bool:
    if not operator.domain:
        return operator.op_type not in _NOT_EMPTY
    if operator.op_type in _WITH_PAST:
        return all(x.dim() == 4 and x.shape[2] == 0 for x in empty)  # there is no past
    return operator.op_type in _MAY_BE_EMPTY


def _max_unpool(call: Call) -> str | None:
    return (
        "with an output_shape, onnxruntime puts the values elsewhere than ONNX says" if len(call.inputs) > 2 else None
    )


def _attention(call: Call) -> str | None:
    given = dict(call.attributes)
    masked = 3 in call.outputs and given.get("qk_matmul_output_mode") == 2 and given.get("is_causal")
    return "onnxruntime gives the masked scores without the causal part of the mask" if masked else None


_LIMITS: dict[tuple[str, str], Callable[[Call], str | None]] = {
    ("", "MaxUnpool"): _max_unpool,
    ("", "Attention"): _attention,
}
"""What ONNX's own tests found: by operator, why a call is refused."""
