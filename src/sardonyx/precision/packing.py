"""Weights in lower precision: packed when a session is opened, once for all sessions that read them."""

from __future__ import annotations

from collections.abc import Container, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol
from weakref import WeakValueDictionary

import torch

from sardonyx.native import linear
from sardonyx.precision.plan import Type
from sardonyx.precision.storage import WeightStorage, contents_of
from sardonyx.precision.weights import WeightForm

BIAS = "bias"
"""The constant that a folded batch norm adds to those of a packed weight."""


class Packer(Protocol):
    """How weights become constants; hashable."""

    def constants(self, weights: Sequence[torch.Tensor], contents: str) -> Mapping[str, torch.Tensor]:
        """Return the constants of a layer's weights, the first of which has contents of this digest."""


@dataclass(frozen=True)
class MatrixPacker:
    """Packs a matrix as our operators read it."""

    precision: Type
    form: WeightForm
    storage: WeightStorage | None = None
    """How the weight is packed, if not as usual."""

    def constants(self, weights: Sequence[torch.Tensor], contents: str) -> Mapping[str, torch.Tensor]:
        """Return the packed weight, and the bias if it is folded as well."""
        matrix, bias = self.form.fold(weights)
        packed = self._packed(matrix, contents).constants
        return packed if bias is None else {**packed, BIAS: bias}

    def _packed(self, matrix: torch.Tensor, contents: str) -> linear.PackedWeight:
        if self.storage is not None:
            return self.storage.pack(matrix, contents)
        return linear.PRECISIONS[self.precision].pack(matrix)


CODES, SCALES = "int8", "scales"
"""The constants of a quantized weight."""


@dataclass(frozen=True)
class Quantizer:
    """Rounds a weight to int8, with a scale for each index of the axis of results."""

    axis: int

    def constants(self, weights: Sequence[torch.Tensor], contents: str) -> Mapping[str, torch.Tensor]:
        """Return the codes, in the shape of the weight, and the scales."""
        (weight,) = weights
        codes, scales = linear.quantize_int8(weight.movedim(self.axis, 0).flatten(1).t())
        moved = codes.t().reshape(weight.movedim(self.axis, 0).shape)
        return {CODES: moved.movedim(0, self.axis).contiguous(), SCALES: scales}


@dataclass(frozen=True)
class Packing:
    """Constants of a session that are computed from a layer's weights when it is opened."""

    arguments: Sequence[int]
    """The weights, as arguments of the region."""
    packer: Packer
    names: Mapping[str, str]
    """The name of each constant in the model."""

    def used_in(self, model: Container[str]) -> Packing:
        """Return the packing of those constants whose names a model has."""
        return replace(self, names={name: used for name, used in self.names.items() if used in model})

    def pack(self, args: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return the constants by their names in the model, from all arguments of the region."""
        weights = [args[argument].detach() for argument in self.arguments]
        digests = [contents_of(weight) for weight in weights]
        key = self._key(weights, digests)
        packed = {name: _packed.get((key, name)) for name in self.names}
        constants = {name: tensor for name, tensor in packed.items() if tensor is not None}
        if len(constants) < len(packed):
            computed = self.packer.constants(weights, digests[0])
            constants = {name: computed[name] for name in self.names}
            _packed.update({(key, name): tensor for name, tensor in constants.items()})
        return {self.names[name]: tensor for name, tensor in constants.items()}

    def _key(self, weights: Sequence[torch.Tensor], digests: Sequence[str]) -> Hashable:
        """Return a key of the weights' contents."""
        contents = tuple((tuple(x.shape), x.dtype, digest) for x, digest in zip(weights, digests, strict=True))
        return (self.packer, contents)


_packed: WeakValueDictionary[tuple[Hashable, str], torch.Tensor] = WeakValueDictionary()
"""Constants that a session holds, by weight."""
