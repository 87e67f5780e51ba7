"""Memory layouts that a model can take without a copy: contiguous, permuted, or expanded along some axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

_MAX_RANK = 8


@dataclass(frozen=True)
class Layout:
    """A tensor as a permuted and expanded view of a contiguous one."""

    permutation: tuple[int, ...] = ()
    """Axes of the tensor, outermost in memory first; empty if the tensor is contiguous."""
    expanded: tuple[int, ...] = ()
    """Axes of stride 0."""

    def base(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the contiguous tensor under a tensor of this layout."""
        if not self.permutation:
            return tensor
        for axis in self.expanded:
            tensor = tensor.narrow(axis, 0, 1)
        return tensor.permute(self.permutation)

    def view(self, base: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Return the tensor as a view of its base; `sizes` gives the sizes of expanded axes."""
        if not self.permutation:
            return base
        tensor = base.permute([self.permutation.index(axis) for axis in range(len(self.permutation))])
        if not self.expanded:
            return tensor
        return tensor.expand([sizes[axis] if axis in self.expanded else -1 for axis in range(len(self.permutation))])

    def encode(self) -> tuple[int, int]:
        """Return it as the core encodes it: four bits per axis, and one bit per expanded axis."""
        permutation = sum(axis << 4 * place for place, axis in enumerate(self.permutation))
        return permutation, sum(1 << axis for axis in self.expanded)


CONTIGUOUS = Layout()


def layout_of(tensor: Any) -> Layout | None:
    """Return the layout of a tensor, or None if it needs a copy.

    >>> layout_of(torch.zeros(2, 3).t())
    Layout(permutation=(1, 0), expanded=())
    >>> layout_of(torch.zeros(3).expand(2, 3)).expanded, layout_of(torch.zeros(4)[::2])
    ((0,), None)
    """
    if tensor.is_contiguous() or not tensor.numel():
        return CONTIGUOUS
    sizes, strides = tensor.shape, tensor.stride()
    if len(sizes) > _MAX_RANK:
        return None
    expanded = tuple(i for i, (size, stride) in enumerate(zip(sizes, strides, strict=True)) if size != 1 and not stride)
    thin = [i for i, (size, stride) in enumerate(zip(sizes, strides, strict=True)) if size == 1 or not stride]
    rest = sorted((i for i in range(len(sizes)) if i not in thin), key=lambda i: -strides[i])
    expected = 1
    for axis in reversed(rest):
        if strides[axis] != expected:
            return None
        expected *= sizes[axis]
    return Layout((*thin, *rest), expanded)
