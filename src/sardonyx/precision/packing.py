"""Weights in lower precision: packed when a session is opened, once for all sessions that read them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch

from sardonyx.native import linear
from sardonyx.precision.plan import Type
from sardonyx.precision.storage import Storage, contents_of


@dataclass(frozen=True)
class Packing:
    """Constants of a session that are computed from a weight when it is opened."""

    argument: int
    """The weight, as an argument of the region."""
    precision: Type
    transposed: bool
    names: Mapping[str, str]
    """The name of each constant in the model."""
    storage: Storage | None = None
    """How the weight is packed, if not as usual."""

    def pack(self, weight: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Return the constants by their names in the model."""
        weight = weight.detach()
        contents = contents_of(weight)
        key = (self.precision, self.storage, self.transposed, tuple(weight.shape), weight.dtype, contents)
        packed = {name: _packed.get((key, name)) for name in self.names}
        constants = {name: tensor for name, tensor in packed.items() if tensor is not None}
        if len(constants) < len(packed):
            matrix = weight.t() if self.transposed else weight
            constants = dict(self._packed(matrix, contents).constants)
            _packed.update({(key, name): tensor for name, tensor in constants.items()})
        return {self.names[name]: tensor for name, tensor in constants.items()}

    def _packed(self, matrix: torch.Tensor, contents: str) -> linear.PackedWeight:
        if self.storage is not None:
            return self.storage.pack(matrix, contents)
        return linear.PRECISIONS[self.precision].pack(matrix)


_packed: WeakValueDictionary[tuple[Hashable, str], torch.Tensor] = WeakValueDictionary()
"""Constants that a session holds, by weight."""
