"""How the constants of a layer become a matrix of depth × columns, and a bias."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sardonyx.native.linear import conv_weight


@dataclass(frozen=True)
class WeightForm:
    """The order of a layer's weight, and what is folded into it."""

    transposed: bool = False
    """Whether the weight has a row for each output."""
    convolves: bool = False
    has_bias: bool = False
    """Whether a bias follows the weight among the constants of a layer with a norm; others keep their bias."""
    epsilon: float | None = None
    """That of a batch norm, whose scale, shift, mean and variance come last; None if there is none."""

    def matrix(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a weight as depth × columns."""
        if self.convolves:
            return conv_weight(weight.unsqueeze(2) if weight.dim() == 3 else weight)
        return weight.t() if self.transposed else weight

    def fold(self, constants: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the matrix of a layer's constants, and the bias that a batch norm leaves."""
        weight, *rest = constants
        if self.epsilon is None:
            return self.matrix(weight), None
        bias = rest.pop(0).double() if self.has_bias else 0.0
        scale, shift, mean, variance = (x.double() for x in rest)
        factor = scale / (variance + self.epsilon).sqrt()
        folded = self.matrix(weight) * factor.to(weight.dtype)
        return folded, ((bias - mean) * factor + shift).to(weight.dtype)
