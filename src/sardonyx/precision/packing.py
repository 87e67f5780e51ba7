"""Weights in lower precision: packed when a session is opened, once for all sessions that read them."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch

from sardonyx.native import linear
from sardonyx.precision.plan import Type


@dataclass(frozen=True)
class Packing:
    """Constants of a session that are computed from a weight when it is opened."""

    argument: int
    """The weight, as an argument of the region."""
    precision: Type
    transposed: bool
    names: Mapping[str, str]
    """The name of each constant in the model."""

    def pack(self, weight: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Return the constants by their names in the model."""
        weight = weight.detach()
        key = self._key(weight)
        packed = {name: _packed.get((key, name)) for name in self.names}
        constants = {name: tensor for name, tensor in packed.items() if tensor is not None}
        if len(constants) < len(packed):
            matrix = weight.t() if self.transposed else weight
            constants = dict(linear.PRECISIONS[self.precision].pack(matrix).constants)
            _packed.update({(key, name): tensor for name, tensor in constants.items()})
        return {self.names[name]: tensor for name, tensor in constants.items()}

    def _key(self, weight: torch.Tensor) -> Hashable:
        """Return a key of the weight's contents: the version counter does not show edits through `.data`."""
        contents = hashlib.sha256(weight.contiguous().view(-1).view(torch.uint8).numpy().data).digest()
        return (self.precision, self.transposed, tuple(weight.shape), weight.dtype, contents)


_packed: WeakValueDictionary[tuple[Hashable, str], torch.Tensor] = WeakValueDictionary()
"""Constants that a session holds, by weight."""
