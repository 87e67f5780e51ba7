"""Snapshots of the weights and numbers that a session was built from, to detect changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

import numpy as np
import torch

EDITS_BEFORE_THAW = 2
"""Weights that are edited more often than this become inputs."""
_SAMPLES = 16
_address = torch.Tensor.data_ptr
_bytes = np.ndarray.tobytes


class Snapshot:
    """Detects edits of tensors.

    Object identity, address and torch's version counter show every assignment, in-place operation and
    `load_state_dict`. Writes that bypass the counter, as through `.data` or numpy, are detected if they touch one of a
    few sampled elements of each tensor.
    """

    def __init__(self, indices: Sequence[int], args: Sequence[Any]) -> None:
        self._indices = list(indices)
        self._tensors = [args[i] for i in self._indices]
        self._addresses = list(map(_address, self._tensors))
        self._counted = [i for i in self._indices if not args[i].is_inference()]
        self._versions = [args[i]._version for i in self._counted]
        self._samples = [_sample(t) for t in self._tensors if _is_readable(t)]
        self._sampled = list(map(_bytes, self._samples))

    def matches(self, args: Sequence[Any]) -> bool:
        """Whether the arguments of a call are the same tensors, unedited."""
        tensors = [args[i] for i in self._indices]
        return (
            all(map(is_, tensors, self._tensors))
            and list(map(_address, tensors)) == self._addresses
            and [args[i]._version for i in self._counted] == self._versions
            and list(map(_bytes, self._samples)) == self._sampled
        )

    def identity(self) -> tuple[tuple[int, ...], ...]:
        """Return a key of these tensors in this state, unique while they are alive."""
        return tuple(map(id, self._tensors)), tuple(self._addresses), tuple(self._versions)

    def same_contents(self, other: Snapshot) -> bool:
        """Whether the sampled elements equal those of another snapshot of the same tensors."""
        return self._sampled == other._sampled


def _is_readable(tensor: torch.Tensor) -> bool:
    """Whether elements can be read cheaply: on an accelerator reading waits for the device."""
    return tensor.device.type == "cpu" and tensor.numel() > 0


def _sample(tensor: torch.Tensor) -> np.ndarray:
    """Return a view of a few elements spread over the tensor; if its memory has gaps, over one of its rows."""
    flat = _flat_elements(tensor.detach())
    step = max(1, flat.numel() // _SAMPLES)
    return flat[::step].view(_BITS[tensor.element_size()]).numpy()


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _flat_elements(tensor: torch.Tensor) -> torch.Tensor:
    """Return all elements in memory order if the memory has no gaps, else the elements of one row."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if span == tensor.numel():
        return tensor.as_strided((span,), (1,))
    while tensor.dim() > 1:
        tensor = tensor.select(0, tensor.shape[0] // 2)
    return tensor


class NumberSnapshot:
    """Numbers, passed as 0-d tensors, that a session has as constants."""

    def __init__(self, indices: Sequence[int], args: Sequence[Any]) -> None:
        self.values: Mapping[int, float] = {i: args[i].item() for i in indices}

    def changed(self, args: Sequence[Any]) -> list[int]:
        """Return the indices of the numbers that changed."""
        return [i for i, value in self.values.items() if args[i].item() != value]
