"""Weights in lower precision: packed when a session is opened, once for all sessions that read them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch

from sardonyx.native import linear
from sardonyx.precision.plan import Type
from sardonyx.precision.storage import Storage, contents_of
from sardonyx.precision.weights import WeightForm

BIAS = "bias"
"""The constant that a folded batch norm adds to those of a packed weight."""


@dataclass(frozen=True)
class Packing:
    """Constants of a session that are computed from a layer's weights when it is opened."""

    arguments: Sequence[int]
    """The weights, as arguments of the region."""
    precision: Type
    form: WeightForm
    names: Mapping[str, str]
    """The name of each constant in the model."""
    storage: Storage | None = None
    """How the weight is packed, if not as usual."""

    def pack(self, args: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return the constants by their names in the model, from all arguments of the region."""
        weights = [args[argument].detach() for argument in self.arguments]
        digests = [contents_of(weight) for weight in weights]
        key = self._key(weights, digests)
        packed = {name: _packed.get((key, name)) for name in self.names}
        constants = {name: tensor for name, tensor in packed.items() if tensor is not None}
        if len(constants) < len(packed):
            matrix, bias = self.form.fold(weights)
            constants = dict(self._packed(matrix, digests[0]).constants)
            if bias is not None:
                constants[BIAS] = bias
            _packed.update({(key, name): tensor for name, tensor in constants.items()})
        return {self.names[name]: tensor for name, tensor in constants.items()}

    def _packed(self, matrix: torch.Tensor, contents: str) -> linear.PackedWeight:
        if self.storage is not None:
            return self.storage.pack(matrix, contents)
        return linear.PRECISIONS[self.precision].pack(matrix)

    def _key(self, weights: Sequence[torch.Tensor], digests: Sequence[str]) -> Hashable:
        """Return a key of the weights' contents."""
        contents = tuple((tuple(x.shape), x.dtype, digest) for x, digest in zip(weights, digests, strict=True))
        return (self.precision, self.storage, self.form, contents)


_packed: WeakValueDictionary[tuple[Hashable, str], torch.Tensor] = WeakValueDictionary()
"""Constants that a session holds, by weight."""
