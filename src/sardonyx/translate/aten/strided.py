"""Views by sizes and strides. ONNX has no memory, so the elements of the tensor are indexed instead."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import torch

from sardonyx.errors import Unsupported
from sardonyx.sizes import Dim
from sardonyx.translate.aten.indexing import element_count, flat, positions
from sardonyx.translate.builder import Builder
from sardonyx.translate.table import aten

Value = ir.Value
Dims = Sequence[Dim]


@aten("as_strided", "as_strided_copy")
def as_strided(g: Builder, x: Value, size: Dims, stride: Dims, storage_offset: Dim | None = None) -> Value:
    offset = _offset(g, storage_offset)
    if _is_static(g, size, stride, offset):
        elements = _elements(g, size, stride, offset)
        if elements.size == element_count(g.dims(x)) and np.array_equal(elements.reshape(-1), np.arange(elements.size)):
            return g.reshape(x, size)
        return g.Gather(flat(g, x), g.constant(elements), axis=0)
    memory = _memory(g, x)
    if _is_dense(size, stride) and offset == 0 and element_count(size) == element_count(g.dims(x)):
        return g.reshape(memory, size)
    return g.shaped(g.Gather(memory, _memory_offsets(g, size, stride, offset), axis=0), size)


@aten("as_strided_scatter")
def as_strided_scatter(
    g: Builder, x: Value, src: Value, size: Dims, stride: Dims, storage_offset: Dim | None = None
) -> Value:
    offset = _offset(g, storage_offset)
    if not _is_static(g, size, stride, offset):
        raise Unsupported("writing with symbolic sizes or strides, which may overlap")
    elements = _elements(g, size, stride, offset).reshape(-1)
    if len(np.unique(elements)) < len(elements) or torch._debug_has_internal_overlap(_operand_metadata(g)):
        raise Unsupported("writing more than once to the same element")
    placed = g.ScatterElements(flat(g, x), g.constant(elements), flat(g, g.cast(src, g.dtype(x))), axis=0)
    return g.reshape(placed, g.dims(x))


def _operand_metadata(g: Builder) -> torch.Tensor:
    """Return the first operand's metadata with known sizes, without memory."""
    viewed = g.operand(0)
    return torch.empty_strided(
        tuple(map(int, viewed.shape)), tuple(map(int, viewed.stride())), dtype=viewed.dtype, device="meta"
    )


def _offset(g: Builder, storage_offset: Dim | None) -> Dim:
    """Return where the view begins, counted from the first operand's first element."""
    start = g.dim(g.operand(0).storage_offset())
    return 0 if storage_offset is None else storage_offset - start


def _is_static(g: Builder, size: Dims, stride: Dims, offset: Dim) -> bool:
    viewed = g.operand(0)
    known = (*size, *stride, offset, *map(g.dim, viewed.shape), *map(g.dim, viewed.stride()))
    return all(isinstance(value, int) for value in known)


def _element_offsets(size: Sequence[int], stride: Sequence[int], offset: int = 0) -> np.ndarray:
    """Return the memory offset of each element of a strided tensor."""
    offsets = np.full(tuple(map(int, size)), offset, dtype=np.int64)
    for axis, step in enumerate(stride):
        offsets += np.arange(int(size[axis])).reshape([-1 if i == axis else 1 for i in range(len(size))]) * int(step)
    return offsets


def _elements(g: Builder, size: Dims, stride: Dims, offset: Dim) -> np.ndarray:
    """Return the element of the first operand at each position of the view, counted in the order of its axes."""
    viewed = g.operand(0)
    stored = _element_offsets(viewed.shape, viewed.stride()).reshape(-1)
    target = _element_offsets([int(n) for n in size], [int(n) for n in stride], int(offset))
    if not target.size:
        return target
    element = np.full(int(stored.max(initial=0)) + 1, -1, dtype=np.int64)
    element[stored] = np.arange(stored.size)
    if not stored.size or target.min() < 0 or target.max() >= element.size or element[target].min() < 0:
        raise Unsupported("strides that reach beyond the tensor")
    result: np.ndarray = element[target]
    return result


def _memory(g: Builder, x: Value) -> Value:
    """Return the first operand's elements in memory order."""
    viewed = g.operand(0)
    size, stride = [g.dim(n) for n in viewed.shape], [g.dim(n) for n in viewed.stride()]
    hints = [_hint(step) for step in viewed.stride()]
    order = sorted(range(len(size)), key=lambda axis: -hints[axis])
    if not _is_dense([size[axis] for axis in order], [stride[axis] for axis in order]):
        raise Unsupported("symbolic strides into memory that is not dense")
    return flat(g, g.transpose(x, order))


def _hint(number: int | torch.SymInt) -> int:
    return number if isinstance(number, int) else int(number.node.hint if number.node.has_hint() else 2)


def _is_dense(size: Dims, stride: Dims) -> bool:
    """Whether the elements are contiguous in memory."""
    return all(n == 1 or stride[axis] == element_count(size[axis + 1 :]) for axis, n in enumerate(size))


def _memory_offsets(g: Builder, size: Dims, stride: Dims, offset: Dim) -> Value:
    """Return the memory offset of each element of the view, computed from its sizes and strides."""
    if offset != 0 and not (isinstance(offset, int) and offset > 0):
        raise Unsupported("a symbolic offset")
    offsets = g.scalar(offset, torch.int64)
    for axis, (count, step) in enumerate(zip(size, stride, strict=True)):
        steps = g.Mul(positions(g, count), g.scalar(step, torch.int64))
        offsets = g.Add(offsets, g.reshape(steps, [count if i == axis else 1 for i in range(len(size))]))
    return g.shaped(offsets, size)
