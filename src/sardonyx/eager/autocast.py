"""Autocast on the device: operators cast to lower precision, and operators cast to float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch.utils import _pytree as pytree

from sardonyx.eager.memory import DEVICE, is_on_device

_LOWER_PRECISION = (
    *("matmul", "mm", "bmm", "mv", "addmm", "addmv", "addbmm", "baddbmm", "linear", "einsum", "chain_matmul", "prelu"),
    *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input"),
    *("convolution", "scaled_dot_product_attention", "lstm_cell", "gru_cell"),
)
_FLOAT32 = (
    *("exp", "expm1", "log", "log10", "log1p", "log2", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar"),
    *("softplus", "layer_norm", "group_norm", "norm.Scalar", "cosine_similarity", "nll_loss", "cross_entropy_loss"),
    *("mse_loss", "l1_loss", "smooth_l1_loss", "kl_div", "binary_cross_entropy_with_logits", "cdist", "cumsum"),
    *("cumprod", "prod", "sum", "sum.dim_IntList", "softmax.int", "log_softmax.int", "rsqrt", "reciprocal", "sinh"),
    *("cosh", "tan", "asin", "acos", "erfinv", "hinge_embedding_loss", "poisson_nll_loss", "dist", "pdist"),
)
_AUTOCAST_KEY = DispatchKeySet(DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]  # torch has it


def install() -> list[Any]:
    """Register the kernels; return the libraries to keep alive."""
    fallthrough: Any = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
    fallthrough.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    aten: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for names, dtype in ((_LOWER_PRECISION, None), (_FLOAT32, torch.float32)):
        for name in names:
            packet, _, overload = name.partition(".")
            operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
            aten.impl(name, _casting_kernel(operator, dtype), "AutocastPrivateUse1")
    return [fallthrough, aten]


def _casting_kernel(operator: Any, dtype: torch.dtype | None) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        target = dtype or torch.get_autocast_dtype(DEVICE)
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_KEY):
            args, kwargs = pytree.tree_map_only(torch.Tensor, lambda x: _cast(x, target), (args, kwargs))
            return operator(*args, **kwargs)

    return call


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    castable = is_on_device(tensor) and tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(dtype) if castable else tensor
