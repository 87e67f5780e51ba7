"""Correct traced strides that differ from those of eager's kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias

import torch
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import map_aggregate

from sardonyx.capture.views import layout_of

_aten = torch.ops.aten
Rule: TypeAlias = Callable[..., Any]


def _elementwise(traced: torch.Tensor, x: torch.Tensor, y: Any, **_: Any) -> torch.Tensor:
    """Strides of an elementwise operator over the same operands whose meta kernel agrees with eager."""
    reference = _aten.eq.Tensor(x, y) if isinstance(y, torch.Tensor) else _aten.eq.Scalar(x, y)
    return traced.new_empty_strided(traced.shape, reference.stride())


def _unary(traced: torch.Tensor, x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Strides of an elementwise operator of one tensor."""
    return traced.new_empty_strided(traced.shape, _aten.abs.default(x).stride())


def _contiguous(traced: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Strides of a kernel whose result is always contiguous."""
    return traced.new_empty(traced.shape)


def _contiguous_on_cpu(traced: Sequence[torch.Tensor], *_: Any) -> Sequence[torch.Tensor]:
    """Strides of a kernel that reads a contiguous copy on the CPU."""
    return [x.new_empty(x.shape) if x.device.type == "cpu" else x for x in traced]


def _contiguous_or_channels_last_on_cpu(traced: Sequence[torch.Tensor], x: torch.Tensor, *_: Any) -> Sequence[Any]:
    """Strides of a kernel whose first result has a memory format of torch on the CPU."""
    if x.device.type != "cpu" or suggest_memory_format(x) != torch.contiguous_format:
        return traced
    return [x.new_empty(x.shape, dtype=traced[0].dtype), *traced[1:]]


_ELEMENTWISE = (
    *(_aten.logical_and.default, _aten.logical_or.default, _aten.logical_xor.default),
    *(_aten.floor_divide.default, _aten.div.Tensor_mode, _aten.copysign.Tensor),
)
"""Operators that torch traces by a decomposition that broadcasts or copies an operand first."""
_UNARY = (
    *(_aten.clamp.default, _aten.clamp_min.default, _aten.clamp_max.default, _aten.hardtanh.default),
    *(_aten.elu.default, _aten.gelu.default, _aten.hardsigmoid.default, _aten.hardswish.default),
)
"""Likewise; the strides of axes of one element differ, and pooling chooses a memory format by them."""
_BATCH_NORMS = (
    *(_aten.native_batch_norm.default, _aten._native_batch_norm_legit.no_stats),
    *(_aten._native_batch_norm_legit_functional.default, _aten._native_batch_norm_legit_no_training.default),
)
_RULES: Mapping[Any, Rule] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys(_UNARY, _unary),
    **dict.fromkeys(_BATCH_NORMS, _contiguous_or_channels_last_on_cpu),
    _aten.log_sigmoid_forward.default: _contiguous_on_cpu,
    **dict.fromkeys((_aten.isin.Tensor_Tensor, _aten.isin.Tensor_Scalar), _contiguous),
}
"""Functions of the traced result and the operands that return a result with eager's strides."""


def correct_strides(graph: torch.fx.Graph) -> None:
    """Give nodes the strides of eager's kernels, and propagate them to the nodes that read them."""
    if not any(node.target in _RULES for node in graph.nodes):
        return
    try:
        corrected = _corrected_values(graph)
    except RuntimeError:  # a view that was traced with the other strides and is impossible with these
        return
    for node, val in corrected.items():
        node.meta = {**node.meta, "val": val}


def _corrected_values(graph: torch.fx.Graph) -> dict[torch.fx.Node, Any]:
    """Return the nodes whose strides change, with their new values."""
    corrected: dict[torch.fx.Node, Any] = {}

    def val_of(item: Any) -> Any:
        return corrected.get(item, item.meta.get("val")) if isinstance(item, torch.fx.Node) else item

    for node in graph.nodes:
        stale = any(source in corrected for source in node.all_input_nodes)
        if node.op != "call_function" or not (stale or node.target in _RULES):
            continue
        old, args, kwargs = node.meta.get("val"), map_aggregate(node.args, val_of), map_aggregate(node.kwargs, val_of)
        with _fake_mode(old):
            new = node.target(*args, **kwargs) if stale else old
            if node.target in _RULES:
                new = _RULES[node.target](new, *args, **kwargs)
        if _strides(new) != _strides(old):
            corrected[node] = new
    return corrected


def _fake_mode(val: Any) -> Any:
    fake = next((x for x in (val if isinstance(val, (tuple, list)) else [val]) if isinstance(x, FakeTensor)), None)
    return fake.fake_mode if fake is not None else nullcontext()


def _strides(val: Any) -> Any:
    if isinstance(val, (tuple, list)):
        return [_strides(item) for item in val]
    return (val.stride(), val.storage_offset()) if isinstance(val, torch.Tensor) else None


DECOMPOSED = frozenset(
    (
        *(_aten.xlogy.Tensor, _aten.special_xlog1py.default, _aten.heaviside.default),
        *(_aten.logaddexp.default, _aten.logaddexp2.default),
    )
)
"""Elementwise operators whose decompositions give other strides than eager."""


def with_eager_layout(decomposition: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap a decomposition so that its result has the memory order of eager."""

    def decomposed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        result, order = decomposition(x, y), layout_of(_aten.eq.Tensor(x, y))
        if order == layout_of(result):
            return result
        axes = order or tuple(range(result.dim()))
        return result.permute(axes).contiguous().permute([axes.index(axis) for axis in range(result.dim())])

    return decomposed


def _index_fill(x: torch.Tensor, dim: int, index: torch.Tensor, value: Any) -> Any:
    """Fill with the axes in the memory order of a clone: torch traces a contiguous result.

    In that order its result is contiguous, so that the operator stays.
    """
    axes = layout_of(_aten.clone.default(x))
    if axes is None:
        return NotImplemented
    filled = torch.index_fill(x.permute(axes), axes.index(dim % x.dim()), index, value)
    return filled.permute([axes.index(axis) for axis in range(x.dim())])


def _pow_of_number(base: Any, exponent: torch.Tensor) -> Any:
    """Raise to contiguous exponents: eager's result is contiguous, and decompositions that read it depend on that."""
    return NotImplemented if layout_of(exponent) is None else _aten.pow.Scalar(base, exponent.contiguous())


DECOMPOSITIONS: Mapping[Any, Rule] = {
    **dict.fromkeys((_aten.index_fill.int_Scalar, _aten.index_fill.int_Tensor), _index_fill),
    _aten.pow.Scalar: _pow_of_number,
}
"""Operators that torch traces with other strides than eager's, in terms of themselves."""
