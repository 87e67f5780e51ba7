"""Calls of `torch.ops.ort` and what they should give, in torch's own operators and double precision."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

Tensor = torch.Tensor


@dataclass(frozen=True)
class Sample:
    """A call and its reference, which takes the same arguments."""

    name: str
    args: list[Any]
    reference: Callable[..., Any]
    kwargs: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-5
    compiles: bool = True
    """Whether sizes do not depend on values."""

    def call(self, args: list[Any]) -> list[Tensor]:
        return _several(getattr(torch.ops.ort, self.name)(*args, **self.kwargs))

    def expected(self) -> list[Tensor]:
        return _several(self.reference(*(_exact(x) for x in self.args), **self.kwargs))

    def __str__(self) -> str:
        return "-".join([self.name, *(f"{k}={v}".replace(" ", "") for k, v in self.kwargs.items())])


def _several(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def _exact(x: Any) -> Any:
    if isinstance(x, list):
        return [_exact(y) for y in x]
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


_generator = torch.Generator().manual_seed(0)


def randn(*sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=_generator)


def integers(low: int, high: int, *sizes: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    return torch.randint(low, high, sizes, generator=_generator).to(dtype)


# Products and norms


def gemm(
    a: Tensor, b: Tensor, c: Any = None, *, alpha: float = 1, beta: float = 1, transA: int = 0, transB: int = 0
) -> Tensor:
    product = alpha * (a.t() if transA else a) @ (b.t() if transB else b)
    return product if c is None else product + beta * c


def fused_matmul(a: Tensor, b: Tensor, *, alpha: float = 1, transA: int = 0, transB: int = 0) -> Tensor:
    return alpha * (a.mT if transA else a) @ (b.mT if transB else b)


def fused_gemm(a: Tensor, b: Tensor, c: Tensor, *, activation: str, transB: int) -> Tensor:
    return gemm(a, b, c, transB=transB).relu()


def layer_norm(x: Tensor, scale: Tensor, bias: Any = None, *, axis: int = -1, epsilon: float = 1e-5) -> Tensor:
    return F.layer_norm(x, x.shape[axis:], scale, bias, epsilon)


def skip_layer_norm(
    x: Tensor, skip: Tensor, gamma: Tensor, beta: Any = None, bias: Any = None, *, outputs: list[int], epsilon: float
) -> list[Tensor]:
    total = x + skip + (0 if bias is None else bias)
    mean, var = total.mean(-1, keepdim=True), total.var(-1, keepdim=True, unbiased=False)
    found = [F.layer_norm(total, gamma.shape, gamma, beta, epsilon), mean, (var + epsilon).rsqrt(), total]
    return [found[i] for i in outputs]


def rms_norm(x: Tensor, scale: Tensor, *, epsilon: float = 1e-5) -> Tensor:
    return F.rms_norm(x, scale.shape, scale, epsilon)


def skip_rms_norm(x: Tensor, skip: Tensor, gamma: Tensor, *, epsilon: float) -> Tensor:
    return rms_norm(x + skip, gamma, epsilon=epsilon)


def fused_conv(x: Tensor, weight: Tensor, bias: Tensor, *, activation: str, pads: list[int]) -> Tensor:
    return F.conv2d(x, weight, bias, padding=pads[0]).relu()


# Activations


def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    return F.gelu(x, approximate=approximate)


def fast_gelu(x: Tensor, bias: Any = None) -> Tensor:
    return F.gelu(x if bias is None else x + bias, approximate="tanh")


def quick_gelu(x: Tensor, *, alpha: float = 1.702) -> Tensor:
    return x * torch.sigmoid(alpha * x)


# Attention


def rotary(x: Tensor, cos: Tensor, sin: Tensor, positions: Any = None, *, interleaved: int = 0) -> Tensor:
    """Of (batch, heads, length, size)."""
    cos, sin = (c[:, None] if positions is None else c[positions][:, None] for c in (cos, sin))
    first, second = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    real, imaginary = cos * first - sin * second, sin * first + cos * second
    return torch.stack([real, imaginary], -1).flatten(-2) if interleaved else torch.cat([real, imaginary], -1)


def microsoft_rotary(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, *, interleaved: int = 0) -> Tensor:
    return rotary(x, cos, sin, positions, interleaved=interleaved)


def by_heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def attended(q: Tensor, k: Tensor, v: Tensor, causal: Any = False) -> Tensor:
    """Queries are the last of the sequence."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2]) if causal else None
    return F.scaled_dot_product_attention(q, k, v, mask)


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Any = None, past_key: Any = None, past_value: Any = None, *,
    is_causal: int = 0, q_num_heads: int = 0, kv_num_heads: int = 0, scale: Any = None, outputs: Any = (0,),
) -> list[Tensor]:  # fmt: skip
    flat = q.dim() == 3
    if flat:
        q, k, v = by_heads(q, q_num_heads), by_heads(k, kv_num_heads), by_heads(v, kv_num_heads)
    if past_key is not None:
        k, v = torch.cat([past_key, k], 2), torch.cat([past_value, v], 2)
    q = q if scale is None else q * scale * math.sqrt(q.shape[-1])
    y = attended(q, k, v, is_causal) if mask is None else F.scaled_dot_product_attention(q, k, v, mask)
    found = [y.transpose(1, 2).flatten(2) if flat else y, k, v]
    return [found[i] for i in outputs]


def multi_head(
    q: Tensor, k: Tensor, v: Tensor, bias: Any = None, padding: Any = None, added: Any = None, past_key: Any = None,
    past_value: Any = None, *, num_heads: int, unidirectional: int = 0, outputs: Any = (0,),
) -> list[Tensor]:  # fmt: skip
    if bias is not None:
        q, k, v = (x + part for x, part in zip((q, k, v), bias.chunk(3), strict=True))
    heads = {"q_num_heads": num_heads, "kv_num_heads": num_heads, "is_causal": unidirectional}
    return attention(q, k, v, added, past_key, past_value, outputs=outputs, **heads)


def group_query(
    q: Tensor, k: Tensor, v: Tensor, past_key: Any, past_value: Any, lengths: Tensor, total: Tensor, *,
    num_heads: int, kv_num_heads: int, outputs: Any = (0,),
) -> list[Tensor]:  # fmt: skip
    heads = {"q_num_heads": num_heads, "kv_num_heads": kv_num_heads}
    return attention(q, k, v, None, past_key, past_value, is_causal=1, outputs=outputs, **heads)


def microsoft_attention(x: Tensor, weight: Tensor, bias: Tensor, *, num_heads: int, unidirectional: int) -> Tensor:
    q, k, v = (by_heads(part, num_heads) for part in (x @ weight + bias).chunk(3, -1))
    return attended(q, k, v, unidirectional).transpose(1, 2).flatten(2)


# Quantised


def quantized(x: Tensor, scale: Tensor, zero: Tensor, *, axis: int = 1) -> Tensor:
    low, high = torch.iinfo(zero.dtype).min, torch.iinfo(zero.dtype).max
    scale, zero_ = (
        t.reshape([-1 if i == axis else 1 for i in range(x.dim())]) if t.dim() else t for t in (scale, zero)
    )
    return ((x / scale).round() + zero_.double()).clamp(low, high).to(zero.dtype)


def dequantized(x: Tensor, scale: Tensor, zero: Tensor, *, axis: int = 1) -> Tensor:
    scale, zero = (t.reshape([-1 if i == axis else 1 for i in range(x.dim())]) if t.dim() else t for t in (scale, zero))
    return (x.double() - zero.double()) * scale


def dynamically(x: Tensor) -> list[Tensor]:
    scale = (x.max().clamp(min=0) - x.min().clamp(max=0)) / 255
    zero = (-x.min().clamp(max=0) / scale).round().clamp(0, 255).to(torch.uint8)
    return [quantized(x, scale, zero), scale, zero]


def qlinear_matmul(*given: Tensor) -> Tensor:
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = given
    return quantized(dequantized(a, a_scale, a_zero) @ dequantized(b, b_scale, b_zero), y_scale, y_zero)


def qlinear_add(*given: Tensor) -> Tensor:
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = given
    return quantized(dequantized(a, a_scale, a_zero) + dequantized(b, b_scale, b_zero), y_scale, y_zero)


def matmul_integer(a: Tensor, b: Tensor, a_zero: Any = None, b_zero: Any = None) -> Tensor:
    a, b = (x.double() - (0 if z is None else z.double()) for x, z in ((a, a_zero), (b, b_zero)))
    return (a @ b).to(torch.int32)


def matmul_integer_to_float(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, a_zero: Tensor, b_zero: Tensor, bias: Tensor
) -> Tensor:
    return dequantized(a, a_scale, a_zero) @ dequantized(b, b_scale, b_zero) + bias


def dynamic_quantize_matmul(a: Tensor, b: Tensor, b_scale: Tensor, b_zero: Tensor, bias: Tensor) -> Tensor:
    rounded, scale, zero = dynamically(a)
    return dequantized(rounded, scale, zero) @ dequantized(b, b_scale, b_zero) + bias


def matmul_nbits(a: Tensor, b: Tensor, scales: Tensor, *, K: int, N: int, bits: int, block_size: int) -> Tensor:
    halves = torch.stack([b & 15, b >> 4], -1).reshape(N, K // block_size, block_size)
    return a @ ((halves.double() - 8) * scales.reshape(N, -1, 1)).reshape(N, K).t()


SAMPLES = [
    Sample("gemm", [randn(2, 3), randn(3, 4)], gemm),
    Sample("gemm", [randn(3, 2), randn(4, 3), randn(4)], gemm, {"alpha": 0.5, "beta": 2.0, "transA": 1, "transB": 1}),
    Sample("fused_matmul", [randn(2, 3, 8), randn(2, 5, 8)], fused_matmul, {"alpha": 0.25, "transB": 1}),
    Sample("transpose_matmul", [randn(2, 8, 3), randn(2, 8, 5)], fused_matmul, {"transA": 1}),
    Sample("fused_gemm", [randn(2, 3), randn(4, 3), randn(4)], fused_gemm, {"activation": "Relu", "transB": 1}),
    Sample("fused_conv", [randn(2, 3, 6, 7), randn(4, 3, 3, 3), randn(4)], fused_conv,
           {"activation": "Relu", "pads": [1, 1, 1, 1]}, 1e-4),
    Sample("layer_normalization", [randn(2, 3, 8), randn(8), randn(8)], layer_norm),
    Sample("layer_normalization", [randn(2, 3, 8), randn(3, 8)], layer_norm, {"axis": 1, "epsilon": 1e-3}),
    Sample("rms_normalization", [randn(2, 3, 8), randn(8)], rms_norm),
    Sample("skip_layer_normalization", [randn(2, 3, 8), randn(2, 3, 8), randn(8), randn(8), randn(8)], skip_layer_norm,
           {"outputs": [0, 3], "epsilon": 1e-5}),
    Sample("skip_layer_normalization", [randn(2, 3, 8), randn(2, 3, 8), randn(8)], skip_layer_norm,
           {"outputs": [3, 2, 0, 1], "epsilon": 1e-5}),
    Sample("skip_simplified_layer_normalization", [randn(2, 3, 8), randn(2, 3, 8), randn(8)], skip_rms_norm,
           {"epsilon": 1e-5}),
    Sample("gelu", [randn(3, 5)], gelu),
    Sample("gelu", [randn(3, 5)], gelu, {"approximate": "tanh"}),
    Sample("microsoft_gelu", [randn(3, 5)], gelu),
    Sample("bias_gelu", [randn(3, 5), randn(5)], lambda x, bias: F.gelu(x + bias)),
    Sample("fast_gelu", [randn(3, 5)], fast_gelu),
    Sample("fast_gelu", [randn(3, 5), randn(5)], fast_gelu),
    Sample("quick_gelu", [randn(3, 5)], quick_gelu),
    Sample("quick_gelu", [randn(3, 5)], quick_gelu, {"alpha": 1.0}),
    Sample("rotary_embedding",
           [randn(2, 4, 3, 8), randn(10, 4), randn(10, 4), integers(0, 10, 2, 3, dtype=torch.int64)], rotary),
    Sample("rotary_embedding", [randn(2, 4, 3, 8), randn(2, 3, 4), randn(2, 3, 4)], rotary, {"interleaved": 1}),
    Sample("microsoft_rotary_embedding",
           [randn(2, 4, 3, 8), integers(0, 10, 2, 3, dtype=torch.int64), randn(10, 4), randn(10, 4)],
           microsoft_rotary, {"interleaved": 1}),
    Sample("attention", [randn(2, 4, 3, 8), randn(2, 2, 5, 8), randn(2, 2, 5, 8)], attention, {"scale": 0.5}),
    Sample("attention", [randn(2, 4, 5, 8), randn(2, 4, 5, 8), randn(2, 4, 5, 8)], attention, {"is_causal": 1}),
    Sample("attention", [randn(2, 4, 3, 8), randn(2, 4, 5, 8), randn(2, 4, 5, 8), randn(3, 5)], attention),
    Sample("attention", [randn(2, 3, 32), randn(2, 5, 16), randn(2, 5, 16), None, randn(2, 2, 6, 8), randn(2, 2, 6, 8)],
           attention, {"q_num_heads": 4, "kv_num_heads": 2, "outputs": [0, 1, 2]}),
    Sample("microsoft_attention", [randn(2, 3, 16), randn(16, 48), randn(48)], microsoft_attention,
           {"num_heads": 4, "unidirectional": 1}, 1e-4),
    Sample("multi_head_attention", [randn(2, 3, 16), randn(2, 5, 16), randn(2, 5, 16), randn(48)], multi_head,
           {"num_heads": 4}),
    Sample("multi_head_attention",
           [randn(2, 3, 16), randn(2, 3, 16), randn(2, 3, 16), None, None, None, randn(2, 4, 6, 4), randn(2, 4, 6, 4)],
           multi_head, {"num_heads": 4, "outputs": [0, 1, 2]}),
    Sample("group_query_attention",
           [randn(2, 3, 32), randn(2, 3, 16), randn(2, 3, 16), None, None,
            torch.full((2,), 2, dtype=torch.int32), torch.tensor(3, dtype=torch.int32)],
           group_query, {"num_heads": 4, "kv_num_heads": 2}),
    Sample("group_query_attention",
           [randn(1, 3, 32), randn(1, 3, 16), randn(1, 3, 16), randn(1, 2, 5, 8), randn(1, 2, 5, 8),
            torch.full((1,), 7, dtype=torch.int32), torch.tensor(8, dtype=torch.int32)],
           group_query, {"num_heads": 4, "kv_num_heads": 2, "outputs": [0, 1, 2]}, compiles=False),
    Sample("group_query_attention",
           [randn(1, 3, 32), randn(1, 3, 16), randn(1, 3, 16), randn(1, 2, 0, 8), randn(1, 2, 0, 8),
            torch.full((1,), 2, dtype=torch.int32), torch.tensor(3, dtype=torch.int32)],
           group_query, {"num_heads": 4, "kv_num_heads": 2}, compiles=False),
    Sample("quantize_linear", [randn(3, 5), torch.tensor(0.05), torch.tensor(3, dtype=torch.int8)], quantized),
    Sample("quantize_linear", [randn(3, 5), torch.tensor([0.05, 0.1, 0.02]), integers(0, 9, 3)], quantized,
           {"axis": 0}),
    Sample("dequantize_linear", [integers(0, 255, 3, 5), torch.tensor(0.05), torch.tensor(120, dtype=torch.uint8)],
           dequantized),
    Sample("dequantize_linear", [integers(-9, 9, 3, 5, dtype=torch.int8), torch.tensor([0.5, 0.25, 2.0]),
                                 integers(-3, 3, 3, dtype=torch.int8)], dequantized, {"axis": 0}),
    Sample("dynamic_quantize_linear", [randn(3, 5)], dynamically),
    Sample("qlinear_matmul",
           [integers(0, 255, 2, 8), torch.tensor(0.02), torch.tensor(128, dtype=torch.uint8), integers(0, 255, 8, 4),
            torch.tensor(0.03), torch.tensor(120, dtype=torch.uint8), torch.tensor(0.1),
            torch.tensor(127, dtype=torch.uint8)], qlinear_matmul),
    Sample("qlinear_add",
           [integers(0, 255, 2, 8), torch.tensor(0.02), torch.tensor(128, dtype=torch.uint8), integers(0, 255, 8),
            torch.tensor(0.03), torch.tensor(120, dtype=torch.uint8), torch.tensor(0.07),
            torch.tensor(127, dtype=torch.uint8)], qlinear_add),
    Sample("matmul_integer", [integers(0, 255, 2, 8), integers(-127, 127, 8, 4, dtype=torch.int8)], matmul_integer),
    Sample("matmul_integer",
           [integers(0, 255, 2, 8), integers(0, 255, 8, 4), torch.tensor(12, dtype=torch.uint8),
            torch.tensor(7, dtype=torch.uint8)], matmul_integer),
    Sample("matmul_integer_to_float",
           [integers(0, 255, 2, 8), integers(0, 255, 8, 4), torch.tensor(0.02), torch.tensor(0.03),
            torch.tensor(12, dtype=torch.uint8), torch.tensor(7, dtype=torch.uint8), randn(4)],
           matmul_integer_to_float, tolerance=1e-4),
    Sample("dynamic_quantize_matmul",
           [randn(2, 8), integers(0, 255, 8, 4), torch.tensor(0.03), torch.tensor(7, dtype=torch.uint8), randn(4)],
           dynamic_quantize_matmul, tolerance=1e-4),
    Sample("matmul_nbits", [randn(2, 3, 64), integers(0, 255, 5, 2, 16), randn(5, 2)], matmul_nbits,
           {"K": 64, "N": 5, "bits": 4, "block_size": 32}, 1e-4),
    Sample("concat", [[randn(2, 3), randn(4, 3)]], lambda tensors, axis: torch.cat(tensors, axis), {"axis": 0}),
    Sample("my_cat", [[randn(2, 3), randn(2, 1)], 1], torch.cat),
    Sample("inverse", [randn(2, 4, 4)], torch.linalg.inv, tolerance=1e-3),
    Sample("cdist", [randn(3, 4), randn(5, 4)], lambda a, b, metric: torch.cdist(a, b), {"metric": "euclidean"}, 1e-4),
    Sample("unfold_tensor", [randn(3, 9)], lambda x, dim, size, step: x.unfold(dim, size, step),
           {"dim": 1, "size": 3, "step": 2}),
]  # fmt: skip
