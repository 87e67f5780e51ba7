"""What a session was built from, and whether it still holds: weights as they were, scalars as they were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

import numpy as np
import torch

EDITS_BEFORE_THAW = 2
"""Weights edited more often than this are no constants: they become inputs."""
_SAMPLES = 16
_address = torch.Tensor.data_ptr
_bytes = np.ndarray.tobytes


class Snapshot:
    """Remembers tensors well enough to notice an edit.

    Object, address and torch's version counter tell of every assignment, in-place operation and `load_state_dict`.
    Writes that bypass the counter, as through `.data` or numpy, are noticed by a few elements of each tensor, so long
    as they touch one of those.
    """

    def __init__(self, indices: Sequence[int], args: Sequence[Any]) -> None:
        self._indices = list(indices)
        self._tensors = [args[i] for i in self._indices]
        self._addresses = list(map(_address, self._tensors))
        self._counted = [i for i in self._indices if not args[i].is_inference()]
        self._versions = [args[i]._version for i in self._counted]
        self._samples = [_sample(t) for t in self._tensors if _is_readable(t)]
        self._sampled = list(map(_bytes, self._samples))

    def holds(self, args: Sequence[Any]) -> bool:
        """Whether the call's arguments are the tensors the session was built from, unedited."""
        given = [args[i] for i in self._indices]
        return (
            all(map(is_, given, self._tensors))
            and list(map(_address, given)) == self._addresses
            and [args[i]._version for i in self._counted] == self._versions
            and list(map(_bytes, self._samples)) == self._sampled
        )

    def identity(self) -> tuple[tuple[int, ...], ...]:
        """What tells these tensors in this state from any other while they are alive."""
        return tuple(map(id, self._tensors)), tuple(self._addresses), tuple(self._versions)

    def same_contents(self, other: Snapshot) -> bool:
        """Whether the sampled elements agree with those of a snapshot of the same tensors."""
        return self._sampled == other._sampled


def _is_readable(tensor: torch.Tensor) -> bool:
    """Whether elements can be looked at for nothing: on an accelerator that would wait for the device."""
    return tensor.device.type == "cpu" and tensor.numel() > 0


def _sample(tensor: torch.Tensor) -> np.ndarray:
    """A few elements from all over the tensor, as a view of its memory; of one with gaps, some from a row."""
    flat = _flat_elements(tensor.detach())
    step = max(1, flat.numel() // _SAMPLES)
    return flat[::step].view(_BITS[tensor.element_size()]).numpy()


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _flat_elements(tensor: torch.Tensor) -> torch.Tensor:
    """All elements of the tensor in the order of memory, where they lie without gaps; else those of one row."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if span == tensor.numel():
        return tensor.as_strided((span,), (1,))
    while tensor.dim() > 1:
        tensor = tensor.select(0, tensor.shape[0] // 2)
    return tensor


class NumberSnapshot:
    """Numbers, handed over as tensors without dimensions, that a session holds as constants."""

    def __init__(self, indices: Sequence[int], args: Sequence[Any]) -> None:
        self.values: Mapping[int, float] = {i: args[i].item() for i in indices}

    def changed(self, args: Sequence[Any]) -> list[int]:
        """Which of them are different now."""
        return [i for i, value in self.values.items() if args[i].item() != value]
