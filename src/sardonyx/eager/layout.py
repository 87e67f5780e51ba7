"""How a tensor lies in memory, as far as a model can take it without a copy: permuted, or repeated along some axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

_MOST_AXES = 8


@dataclass(frozen=True)
class Layout:
    """A tensor as a view of one whose elements lie in order."""

    order: tuple[int, ...] = ()
    """Which axis of the tensor is next in memory; nothing where they lie as they are."""
    repeated: tuple[int, ...] = ()
    """Axes along which the same memory is seen again."""

    def base(self, tensor: torch.Tensor) -> torch.Tensor:
        """What lies in order under a tensor of this layout."""
        if not self.order:
            return tensor
        for axis in self.repeated:
            tensor = tensor.narrow(axis, 0, 1)
        return tensor.permute(self.order)

    def seen(self, base: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """The tensor over its base; of its sizes, those of repeated axes are used."""
        if not self.order:
            return base
        tensor = base.permute([self.order.index(axis) for axis in range(len(self.order))])
        if not self.repeated:
            return tensor
        return tensor.expand([sizes[axis] if axis in self.repeated else -1 for axis in range(len(self.order))])

    def numbers(self) -> tuple[int, int]:
        """As the core writes it: four bits for each axis, and a bit for each that is repeated."""
        order = sum(axis << 4 * place for place, axis in enumerate(self.order))
        return order, sum(1 << axis for axis in self.repeated)


IN_ORDER = Layout()


def layout_of(tensor: Any) -> Layout | None:
    """The layout of a tensor; None where it has to be copied to be in order.

    >>> layout_of(torch.zeros(2, 3).t())
    Layout(order=(1, 0), repeated=())
    >>> layout_of(torch.zeros(3).expand(2, 3)).repeated, layout_of(torch.zeros(4)[::2])
    ((0,), None)
    """
    if tensor.is_contiguous() or not tensor.numel():
        return IN_ORDER
    sizes, strides = tensor.shape, tensor.stride()
    if len(sizes) > _MOST_AXES:
        return None
    repeated = tuple(i for i, (size, stride) in enumerate(zip(sizes, strides, strict=True)) if size != 1 and not stride)
    thin = [i for i, (size, stride) in enumerate(zip(sizes, strides, strict=True)) if size == 1 or not stride]
    rest = sorted((i for i in range(len(sizes)) if i not in thin), key=lambda i: -strides[i])
    expected = 1
    for axis in reversed(rest):
        if strides[axis] != expected:
            return None
        expected *= sizes[axis]
    return Layout((*thin, *rest), repeated)
