"""Operators implemented by hand: memory, scalars, indexing, running statistics, fused cells and attention."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import gelu, layer_norm, linear

from sardonyx.eager.dispatch import HANDWRITTEN, compute, handwritten, with_cpu_fallback
from sardonyx.eager.memory import DEVICE, is_on_device, on_device, on_host
from sardonyx.eager.plans import PLANS
from sardonyx.eager.variants import composite, variant_of

aten = torch.ops.aten


@handwritten("aten::empty.memory_format")
def _empty(size: Sequence[int], *, memory_format: Any = None, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    host = torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format)
    return on_device(host, _index(device))


@handwritten("aten::empty_strided")
def _empty_strided(
    size: Sequence[int], stride: Sequence[int], *, dtype: Any = None, device: Any = None, **_: Any
) -> Any:
    return on_device(torch.empty_strided(size, stride, dtype=dtype), _index(device))


@handwritten("aten::_efficientzerotensor")
def _efficient_zeros(size: Sequence[int], *, dtype: Any = None, device: Any = None, **_: Any) -> torch.Tensor:
    """Return zeros with real memory; the CPU's kernel allocates none."""
    return torch.zeros(size, dtype=dtype, device=device or DEVICE)


def _index(device: Any) -> int:
    return 0 if device is None else PLANS.index(torch.device(device))


@handwritten("aten::copy_")
def _copy(self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    _copy_into(self, _cast(src, self.dtype))
    return self


def _copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy over one shared storage if both tensors use it, so that torch detects the overlap."""
    shared = is_on_device(source) and target.dtype == source.dtype and _storage_id(target) == _storage_id(source)
    if not shared or target.is_conj() or target.is_neg() or source.is_conj() or source.is_neg():
        _host(target).copy_(_host(source))
        return
    storage = on_host(target.as_strided((target.untyped_storage().nbytes() // target.element_size(),), (1,), 0))
    views = [storage.as_strided(x.shape, x.stride(), x.storage_offset()) for x in (target, source)]
    views[0].copy_(views[1])


def _storage_id(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast a device tensor with ONNX Runtime; return a CPU tensor unchanged."""
    if tensor.dtype == dtype or not is_on_device(tensor) or tensor.is_complex() != dtype.is_complex:
        return tensor
    return cast(tensor, dtype)


def cast(self: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast a device tensor with ONNX Runtime."""
    operator = aten._to_copy.default
    result: torch.Tensor = with_cpu_fallback(
        operator, (self,), {"dtype": dtype}, lambda: _functional(operator)(self, dtype=dtype)
    )
    return result


@handwritten("aten::_copy_from")
def _copy_from(self: torch.Tensor, dst: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    _copy_into(dst, _cast(self, dst.dtype))
    return dst


@handwritten("aten::_copy_from_and_resize")
def _copy_from_and_resize(self: torch.Tensor, dst: torch.Tensor) -> torch.Tensor:
    dst.resize_(self.shape)
    _host(dst).copy_(_host(self))
    return dst


def _host(tensor: torch.Tensor) -> torch.Tensor:
    return on_host(tensor) if is_on_device(tensor) else tensor


@handwritten("aten::_local_scalar_dense")
def _local_scalar_dense(self: torch.Tensor) -> Any:
    return on_host(self).item()


@handwritten("aten::equal")
def _equal(self: torch.Tensor, other: torch.Tensor) -> bool:
    if self.shape != other.shape:
        return False
    return bool(aten.eq.Tensor(self, other).all().item())


@handwritten("aten::resize_")
def _resize(self: torch.Tensor, size: Sequence[int], *, memory_format: Any = None) -> torch.Tensor:
    """Resize in place; memory from DLPack cannot grow, so a tensor that does not share its memory gets new memory."""
    sizes = tuple(int(n) for n in size)
    if sizes == tuple(self.shape):
        return self
    like = torch.empty(sizes, dtype=self.dtype, device="meta", memory_format=memory_format or torch.contiguous_format)
    storage = self.untyped_storage()
    capacity = storage.nbytes() // self.element_size()
    if self.storage_offset() + like.numel() <= capacity:
        return _set_tensor(self, self.as_strided(sizes, like.stride(), self.storage_offset()))
    if capacity and torch._C._storage_Use_Count(storage._cdata) > _UNSHARED_USE_COUNT:
        raise RuntimeError("aten::resize_: the memory is shared and cannot grow; executor='native' supports it")
    grown = torch.empty(self.storage_offset() + like.numel(), dtype=self.dtype)
    grown[:capacity].copy_(on_host(self.as_strided((capacity,), (1,), 0)))
    return _set_tensor(
        self, on_device(grown, self.get_device()).as_strided(sizes, like.stride(), self.storage_offset())
    )


_UNSHARED_USE_COUNT = 2
"""Use count of an unshared storage: the tensor, and the storage object of Python."""


@handwritten("aten::set_.source_Tensor")
def _set_tensor(self: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    self.data = source
    return self


@handwritten("aten::set_.source_Storage", "aten::set_.source_Storage_storage_offset")
def _set_storage(
    self: torch.Tensor, source: Any, storage_offset: int = 0, size: Any = None, stride: Any = None
) -> torch.Tensor:
    """Use a storage's memory, kept alive by the tensor; Python cannot pass torch the storage itself."""
    count = source.nbytes() // self.element_size()
    size = (count,) if size is None else size
    if not count:
        return _set_tensor(self, on_device(torch.empty(size, dtype=self.dtype), self.get_device()))
    memory: Any = (ctypes.c_uint8 * source.nbytes()).from_address(source.data_ptr())
    memory.owner = source
    flat = torch.frombuffer(memory, dtype=self.dtype, count=count)
    view = flat.as_strided(size, stride or _strides(size), storage_offset)
    return _set_tensor(self, on_device(view, self.get_device()))


def _strides(size: Sequence[int]) -> tuple[int, ...]:
    return torch.empty(size, device="meta").stride()


@handwritten("aten::set_")
def _set(self: torch.Tensor) -> torch.Tensor:
    return _set_tensor(self, on_device(torch.empty(0, dtype=self.dtype), self.get_device()))


@handwritten("aten::index.Tensor")
def _index_tensor(self: torch.Tensor, indices: Sequence[Any]) -> Any:
    """Index; boolean masks become the positions of their true elements."""
    return _functional(aten.index.Tensor)(self, _integer_indices(indices, self.device))


@handwritten("aten::index_put")
def _index_put(
    self: torch.Tensor, indices: Sequence[Any], values: torch.Tensor, accumulate: bool = False
) -> torch.Tensor:
    written: torch.Tensor = _functional(aten.index_put.default)(
        self, _integer_indices(indices, self.device), values, accumulate
    )
    return written


@handwritten("aten::_index_put_impl_")
def _index_put_in_place(
    self: torch.Tensor, indices: Sequence[Any], values: torch.Tensor, accumulate: bool = False, unsafe: bool = False
) -> torch.Tensor:
    """Implement `index_put_`, which torch composes from this operator."""
    return _copy(self, _index_put(self, indices, values, accumulate))


def _integer_indices(indices: Sequence[Any], device: torch.device) -> list[Any]:
    """Return indices as integers on the device; torch accepts CPU indices for any device."""
    converted: list[Any] = []
    for index in indices:
        if index is None:
            converted.append(None)
        elif index.dtype in (torch.bool, torch.uint8):
            converted += index.to(device).nonzero().unbind(1)
        else:
            converted.append(index.to(device))
    return converted


@handwritten("aten::native_batch_norm")
def _batch_norm(
    input: torch.Tensor,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """Update the running statistics in place, which the schema does not declare."""
    if not training:
        return _functional(aten._native_batch_norm_legit_no_training.default)(
            input, weight, bias, running_mean, running_var, momentum, eps
        )
    if running_mean is None:
        return _functional(aten._native_batch_norm_legit.no_stats)(input, weight, bias, True, momentum, eps)
    *results, mean, variance = _functional(aten._native_batch_norm_legit_functional.default)(
        input, weight, bias, running_mean, running_var, True, momentum, eps
    )
    running_mean.copy_(mean)
    running_var.copy_(variance)
    return tuple(results)


def _functional(operator: Any) -> Any:
    variant = variant_of(operator)
    assert variant is not None
    return lambda *args, **kwargs: compute(variant, args, kwargs)


HANDWRITTEN["aten::_native_batch_norm_legit"] = _batch_norm


@handwritten("aten::_batch_norm_with_update")
def _batch_norm_with_update(
    input: torch.Tensor, weight: Any, bias: Any, running_mean: Any, running_var: Any, momentum: float, eps: float
) -> Any:
    """Return an empty reserve, which only other devices use for the gradient."""
    results = _batch_norm(input, weight, bias, running_mean, running_var, True, momentum, eps)
    return *results, torch.empty(0, dtype=torch.uint8, device=input.device)


# Gradient scaling for mixed precision


@handwritten("aten::_amp_foreach_non_finite_check_and_unscale_")
def _unscale(self: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    for gradient in self:
        found_inf.copy_(torch.maximum(found_inf, (~gradient.isfinite()).any().to(found_inf.dtype)))
        gradient.mul_(inv_scale)


@handwritten("aten::_amp_update_scale_")
def _update_scale(
    self: torch.Tensor,
    growth_tracker: torch.Tensor,
    found_inf: torch.Tensor,
    scale_growth_factor: float,
    scale_backoff_factor: float,
    growth_interval: int,
) -> torch.Tensor:
    steps, grown = growth_tracker + 1, self * scale_growth_factor
    due = steps == growth_interval
    scale = torch.where(due & grown.isfinite(), grown, self)
    self.copy_(torch.where(found_inf > 0, self * scale_backoff_factor, scale))
    growth_tracker.copy_(torch.where((found_inf > 0) | due, 0, steps))
    return self


# Operators compiled to one model as compositions of other operators

composite("aten::convolution_overrideable")(aten.convolution.default)


@composite("aten::convolution_backward_overrideable")
def _convolution_backward(
    grad_output: Any,
    input: Any,
    weight: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    output_mask: Any,
) -> Any:
    biases = [weight.shape[1] * groups if transposed else weight.shape[0]]
    settings = (stride, padding, dilation, transposed, output_padding, groups)
    return aten.convolution_backward.default(grad_output, input, weight, biases, *settings, output_mask)


# Recurrent cells, which torch calls fused on devices other than the CPU


@composite("aten::_thnn_fused_lstm_cell")
def _lstm_cell(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    cx: torch.Tensor,
    input_bias: Any = None,
    hidden_bias: Any = None,
) -> Any:
    gates = _add(input_gates, hidden_gates, input_bias, hidden_bias)
    i, f, c, o = gates.chunk(4, 1)
    i, f, c, o = i.sigmoid(), f.sigmoid(), c.tanh(), o.sigmoid()
    cy = f * cx + i * c
    return o * cy.tanh(), cy, torch.cat([i, f, c, o], 1)


@composite("aten::_thnn_fused_lstm_cell_backward_impl")
def _lstm_cell_backward(grad_hy: Any, grad_cy: Any, cx: Any, cy: Any, workspace: torch.Tensor, has_bias: bool) -> Any:
    i, f, c, o = workspace.chunk(4, 1)
    t = cy.tanh()
    grad = torch.zeros_like(cy) if grad_cy is None else grad_cy
    if grad_hy is not None:
        grad = grad + grad_hy * o * (1 - t * t)
    to_o = torch.zeros_like(o) if grad_hy is None else grad_hy * t * o * (1 - o)
    gates = torch.cat([grad * c * i * (1 - i), grad * cx * f * (1 - f), grad * i * (1 - c * c), to_o], 1)
    return gates, grad * f, gates.sum(0) if has_bias else None


@composite("aten::_thnn_fused_gru_cell")
def _gru_cell(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    hx: torch.Tensor,
    input_bias: Any = None,
    hidden_bias: Any = None,
) -> Any:
    ir, iz, in_ = _add(input_gates, None, input_bias).chunk(3, 1)
    hr, hz, hn = _add(hidden_gates, None, hidden_bias).chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    n = (in_ + r * hn).tanh()
    return n + z * (hx - n), torch.cat([r, z, n, hx, hn], 1)


@composite("aten::_thnn_fused_gru_cell_backward")
def _gru_cell_backward(grad_hy: torch.Tensor, workspace: torch.Tensor, has_bias: bool) -> Any:
    r, z, n, hx, hn = workspace.chunk(5, 1)
    to_n = grad_hy * (1 - z) * (1 - n * n)
    to_z = grad_hy * (hx - n) * z * (1 - z)
    to_r = to_n * hn * r * (1 - r)
    inputs, hiddens = torch.cat([to_r, to_z, to_n], 1), torch.cat([to_r, to_z, to_n * r], 1)
    biases = (inputs.sum(0), hiddens.sum(0)) if has_bias else (None, None)
    return inputs, hiddens, grad_hy * z, *biases


def _add(first: torch.Tensor, *others: Any) -> torch.Tensor:
    for other in others:
        first = first if other is None else first + other
    return first


# Attention and encoder layers, which torch's modules call fused without gradients


@composite("aten::_native_multi_head_attention")
def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    mask: torch.Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> Any:
    """A nonzero mask hides positions: mask_type 0 attention mask, 1 key padding mask, 2 both merged."""
    projections = zip((query, key, value), qkv_weight.chunk(3), qkv_bias.chunk(3), strict=True)
    q, k, v = (linear(x, w, b).view(*x.shape[:2], num_head, -1).transpose(1, 2) for x, w, b in projections)
    scores = q @ k.mT * (embed_dim // num_head) ** -0.5
    if mask is not None:
        scores = scores.masked_fill((mask[:, None, None] if mask_type == 1 else mask).bool(), -torch.inf)
    weights = scores.softmax(-1)
    attended = linear((weights @ v).transpose(1, 2).flatten(2), proj_weight, proj_bias)
    returned_weights = weights.mean(1) if average_attn_weights else weights
    return attended, returned_weights if need_weights else None


@composite("aten::_transformer_encoder_layer_fwd")
def _encoder_layer(
    src: torch.Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Any,
    qkv_bias: Any,
    proj_weight: Any,
    proj_bias: Any,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Any,
    norm_bias_1: Any,
    norm_weight_2: Any,
    norm_bias_2: Any,
    ffn_weight_1: Any,
    ffn_bias_1: Any,
    ffn_weight_2: Any,
    ffn_bias_2: Any,
    mask: Any = None,
    mask_type: int | None = None,
) -> torch.Tensor:
    def first(x: torch.Tensor) -> torch.Tensor:
        return layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def second(x: torch.Tensor) -> torch.Tensor:
        return layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    def attended(x: torch.Tensor) -> torch.Tensor:
        weights = (qkv_weight, qkv_bias, proj_weight, proj_bias)
        output: torch.Tensor = _attention(x, x, x, embed_dim, num_heads, *weights, mask, mask_type=mask_type)[0]
        return output

    def fed_forward(x: torch.Tensor) -> torch.Tensor:
        x = linear(x, ffn_weight_1, ffn_bias_1)
        return linear(gelu(x) if use_gelu else x.relu(), ffn_weight_2, ffn_bias_2)

    if norm_first:
        src = src + attended(first(src))
        return src + fed_forward(second(src))
    src = first(src + attended(src))
    return second(src + fed_forward(src))
