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
    is_scaled: bool = False
    """Whether its columns are scaled, by constants that come last."""
    has_bias: bool = False
    """Whether a bias that is scaled, too, follows the weight."""
    epsilon: float | None = None
    """That of a batch norm, whose scale, shift, mean and variance come last; None for a row of factors."""

    @property
    def leaves_bias(self) -> bool:
        """Whether a bias is folded as well, or a shift becomes one."""
        return self.has_bias or self.epsilon is not None

    def matrix(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a weight as depth × columns."""
        if self.convolves:
            return conv_weight(weight.unsqueeze(2) if weight.dim() == 3 else weight)
        return weight.t() if self.transposed else weight

    def fold(self, constants: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the matrix of a layer's constants, and the bias if it is folded as well."""
        weight, *rest = constants
        if not self.is_scaled:
            return self.matrix(weight), None
        bias = rest.pop(0).double() if self.has_bias else torch.zeros((), dtype=torch.float64)
        factor, shift = self._scale([x.double() for x in rest])
        folded = self.matrix(weight) * factor.to(weight.dtype)
        return folded, (bias * factor + shift).to(weight.dtype) if self.leaves_bias else None

    def _scale(self, constants: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what results are multiplied by, and what is added to them."""
        if self.epsilon is None:
            (factor,) = constants
            return factor, torch.zeros_like(factor)
        scale, shift, mean, variance = constants
        factor = scale / (variance + self.epsilon).sqrt()
        return factor, shift - mean * factor
