"""What a session was built from, and whether it still holds: weights as they were, scalars as they were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

_SAMPLES = 16


class Snapshot:
    """Remembers tensors well enough to notice an edit.

    Object, address and torch's version counter tell of every assignment, in-place operation and `load_state_dict`.
    Writes that bypass the counter, as through `.data` or numpy, are noticed by a few elements of each tensor, so long
    as they touch one of those.
    """

    def __init__(self, indices: Sequence[int], args: Sequence[Any]) -> None:
        self._indices = list(indices)
        self.tensors = [args[i] for i in self._indices]
        self._versions = [_version(t) for t in self.tensors]
        self._addresses = [t.data_ptr() for t in self.tensors]
        self._samples = _samples(self.tensors)
        self._sampled = [torch.cat(group) for group in self._samples]

    def holds(self, args: Sequence[Any]) -> bool:
        """Whether the call's arguments are the tensors the session was built from, unedited."""
        for index, tensor, version, address in zip(
            self._indices, self.tensors, self._versions, self._addresses, strict=True
        ):
            given = args[index]
            if given is not tensor or given.data_ptr() != address or _version(given) != version:
                return False
        return all(map(_same, self._samples, self._sampled))

    def identity(self) -> tuple[tuple[int, int, int], ...]:
        """What tells these tensors in this state from any other while they are alive."""
        return tuple(zip(map(id, self.tensors), self._addresses, self._versions, strict=True))

    def same_contents(self, other: Snapshot) -> bool:
        """Whether the sampled elements agree with those of a snapshot of the same tensors."""
        return all(map(torch.equal, self._sampled, other._sampled))


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _same(group: list[torch.Tensor], before: torch.Tensor) -> bool:
    return torch.equal(torch.cat(group), before)


def _samples(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """A few elements of each tensor, as views, by dtype. On an accelerator reading them would wait for the device."""
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.device.type == "cpu" and tensor.numel() and tensor.is_contiguous():
            flat = tensor.detach().view(-1)
            step = max(1, flat.numel() // _SAMPLES)
            groups.setdefault(tensor.dtype, []).append(flat[::step][: _SAMPLES + 1].view(_bits(tensor.dtype)))
    return list(groups.values())


def _bits(dtype: torch.dtype) -> torch.dtype:
    """An integer dtype of the same width, in which NaN equals itself."""
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(dtype.itemsize, dtype)


class Numbers:
    """Numbers, handed over as tensors without dimensions, that a session holds as constants."""

    def __init__(self, indices: Sequence[int], args: Sequence[Any]) -> None:
        self.values: Mapping[int, float] = {i: args[i].item() for i in indices}

    def changed(self, args: Sequence[Any]) -> list[int]:
        """Which of them are different now."""
        return [i for i, value in self.values.items() if args[i].item() != value]
