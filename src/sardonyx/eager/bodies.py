"""Operators whose bodies are written by hand: memory, numbers, random draws, and running statistics."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from sardonyx.eager.dispatch import BODIES, body, computed
from sardonyx.eager.memory import is_on_device, on_device, on_host
from sardonyx.eager.plans import PLANS
from sardonyx.eager.variants import composed, variant_of

aten = torch.ops.aten


@body("aten::empty.memory_format")
def _empty(size: Sequence[int], *, memory_format: Any = None, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    made = torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format)
    return on_device(made, _index(device))


@body("aten::empty_strided")
def _empty_strided(
    size: Sequence[int], stride: Sequence[int], *, dtype: Any = None, device: Any = None, **_: Any
) -> Any:
    return on_device(torch.empty_strided(size, stride, dtype=dtype), _index(device))


def _index(device: Any) -> int:
    return 0 if device is None else PLANS.index(torch.device(device))


@body("aten::copy_")
def _copy(self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    _host(self).copy_(_host(_cast(src, self.dtype)))
    return self


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of the device in another dtype, by ONNX Runtime; one of the CPU's as it is."""
    if tensor.dtype == dtype or not is_on_device(tensor) or tensor.is_complex() != dtype.is_complex:
        return tensor
    return cast(tensor, dtype)


def cast(self: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of the device in another dtype, by ONNX Runtime."""
    made: torch.Tensor = _functional(aten._to_copy.default)(self, dtype=dtype)
    return made


@body("aten::_copy_from")
def _copy_from(self: torch.Tensor, dst: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    _host(dst).copy_(_host(_cast(self, dst.dtype)))
    return dst


@body("aten::_copy_from_and_resize")
def _copy_from_and_resize(self: torch.Tensor, dst: torch.Tensor) -> torch.Tensor:
    dst.resize_(self.shape)
    _host(dst).copy_(_host(self))
    return dst


def _host(tensor: torch.Tensor) -> torch.Tensor:
    return on_host(tensor) if is_on_device(tensor) else tensor


@body("aten::_local_scalar_dense")
def _local_scalar_dense(self: torch.Tensor) -> Any:
    return on_host(self).item()


@body("aten::equal")
def _equal(self: torch.Tensor, other: torch.Tensor) -> bool:
    if self.shape != other.shape:
        return False
    return bool(aten.eq.Tensor(self, other).all().item())


@body("aten::resize_")
def _resize(self: torch.Tensor, size: Sequence[int], *, memory_format: Any = None) -> torch.Tensor:
    """Memory that DLPack brought does not grow, so a tensor that has to is given other memory."""
    sizes = tuple(int(n) for n in size)
    if sizes == tuple(self.shape):
        return self
    made = torch.empty(sizes, dtype=self.dtype)
    host = on_host(self).reshape(-1)
    kept = min(host.numel(), made.numel())
    made.reshape(-1)[:kept].copy_(host[:kept])
    fresh = on_device(made, self.get_device())
    return _set_tensor(self, fresh)


@body("aten::set_.source_Tensor")
def _set_tensor(self: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    self.data = source
    return self


@body("aten::set_.source_Storage", "aten::set_.source_Storage_storage_offset")
def _set_storage(
    self: torch.Tensor, source: Any, storage_offset: int = 0, size: Any = None, stride: Any = None
) -> torch.Tensor:
    """Over a storage's memory, which the tensor keeps; torch cannot be handed the storage itself from Python."""
    count = source.nbytes() // self.element_size()
    size = (count,) if size is None else size
    if not count:
        return _set_tensor(self, on_device(torch.empty(size, dtype=self.dtype), self.get_device()))
    memory: Any = (ctypes.c_uint8 * source.nbytes()).from_address(source.data_ptr())
    memory.keeps = source
    whole = torch.frombuffer(memory, dtype=self.dtype, count=count)
    seen = whole.as_strided(size, stride or _strides(size), storage_offset)
    return _set_tensor(self, on_device(seen, self.get_device()))


def _strides(size: Sequence[int]) -> tuple[int, ...]:
    return torch.empty(size, device="meta").stride()


@body("aten::set_")
def _set(self: torch.Tensor) -> torch.Tensor:
    return _set_tensor(self, on_device(torch.empty(0, dtype=self.dtype), self.get_device()))


@body("aten::index.Tensor")
def _index_by(self: torch.Tensor, indices: Sequence[Any]) -> Any:
    """By masks, by the places that they have."""
    return _functional(aten.index.Tensor)(self, _places(indices, self.device))


@body("aten::index_put")
def _index_put(
    self: torch.Tensor, indices: Sequence[Any], values: torch.Tensor, accumulate: bool = False
) -> torch.Tensor:
    written: torch.Tensor = _functional(aten.index_put.default)(self, _places(indices, self.device), values, accumulate)
    return written


@body("aten::_index_put_impl_")
def _index_put_in_place(
    self: torch.Tensor, indices: Sequence[Any], values: torch.Tensor, accumulate: bool = False, unsafe: bool = False
) -> torch.Tensor:
    """As `index_put_`, which torch composes of it."""
    return _copy(self, _index_put(self, indices, values, accumulate))


def _places(indices: Sequence[Any], device: torch.device) -> list[Any]:
    """Indices as numbers, on the device; torch takes those of the CPU for any."""
    found: list[Any] = []
    for index in indices:
        if index is None:
            found.append(None)
        elif index.dtype in (torch.bool, torch.uint8):
            found += index.to(device).nonzero().unbind(1)
        else:
            found.append(index.to(device))
    return found


@body("aten::native_batch_norm")
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
    """Its running statistics are edited in place, of which its schema says nothing."""
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
    return lambda *args, **kwargs: computed(variant, args, kwargs)


BODIES["aten::_native_batch_norm_legit"] = _batch_norm


@body("aten::_batch_norm_with_update")
def _batch_norm_with_update(
    input: torch.Tensor, weight: Any, bias: Any, running_mean: Any, running_var: Any, momentum: float, eps: float
) -> Any:
    """With memory of no size for what only other devices keep for the gradient."""
    results = _batch_norm(input, weight, bias, running_mean, running_var, True, momentum, eps)
    return *results, torch.empty(0, dtype=torch.uint8, device=input.device)


# Operators that become one model, by what they are composed of

composed("aten::convolution_overrideable")(aten.convolution.default)


@composed("aten::convolution_backward_overrideable")
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


# Recurrent cells, which torch has whole for devices that are not the CPU


@composed("aten::_thnn_fused_lstm_cell")
def _lstm_cell(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    cx: torch.Tensor,
    input_bias: Any = None,
    hidden_bias: Any = None,
) -> Any:
    gates = _summed(input_gates, hidden_gates, input_bias, hidden_bias)
    i, f, c, o = gates.chunk(4, 1)
    i, f, c, o = i.sigmoid(), f.sigmoid(), c.tanh(), o.sigmoid()
    cy = f * cx + i * c
    return o * cy.tanh(), cy, torch.cat([i, f, c, o], 1)


@composed("aten::_thnn_fused_lstm_cell_backward_impl")
def _lstm_cell_backward(grad_hy: Any, grad_cy: Any, cx: Any, cy: Any, workspace: torch.Tensor, has_bias: bool) -> Any:
    i, f, c, o = workspace.chunk(4, 1)
    t = cy.tanh()
    grad = torch.zeros_like(cy) if grad_cy is None else grad_cy
    if grad_hy is not None:
        grad = grad + grad_hy * o * (1 - t * t)
    to_o = torch.zeros_like(o) if grad_hy is None else grad_hy * t * o * (1 - o)
    gates = torch.cat([grad * c * i * (1 - i), grad * cx * f * (1 - f), grad * i * (1 - c * c), to_o], 1)
    return gates, grad * f, gates.sum(0) if has_bias else None


@composed("aten::_thnn_fused_gru_cell")
def _gru_cell(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    hx: torch.Tensor,
    input_bias: Any = None,
    hidden_bias: Any = None,
) -> Any:
    ir, iz, in_ = _summed(input_gates, None, input_bias).chunk(3, 1)
    hr, hz, hn = _summed(hidden_gates, None, hidden_bias).chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    n = (in_ + r * hn).tanh()
    return n + z * (hx - n), torch.cat([r, z, n, hx, hn], 1)


@composed("aten::_thnn_fused_gru_cell_backward")
def _gru_cell_backward(grad_hy: torch.Tensor, workspace: torch.Tensor, has_bias: bool) -> Any:
    r, z, n, hx, hn = workspace.chunk(5, 1)
    to_n = grad_hy * (1 - z) * (1 - n * n)
    to_z = grad_hy * (hx - n) * z * (1 - z)
    to_r = to_n * hn * r * (1 - r)
    inputs, hiddens = torch.cat([to_r, to_z, to_n], 1), torch.cat([to_r, to_z, to_n * r], 1)
    biases = (inputs.sum(0), hiddens.sum(0)) if has_bias else (None, None)
    return inputs, hiddens, grad_hy * z, *biases


def _summed(first: torch.Tensor, *others: Any) -> torch.Tensor:
    for other in others:
        first = first if other is None else first + other
    return first
