"""Memory as engines read it: the elements in order, without gaps."""

from __future__ import annotations

import torch


def is_contiguous(x: torch.Tensor) -> bool:
    """Whether memory holds the elements in order; those of a conjugate's imaginary part have the other sign there."""
    return x.is_contiguous() and not x.is_neg()


def contiguous(x: torch.Tensor) -> torch.Tensor:
    """The tensor, or a contiguous copy of it."""
    return x if is_contiguous(x) else x.resolve_neg().contiguous()
