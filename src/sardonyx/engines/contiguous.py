"""Contiguity as engines need it: C order, no gaps, and no lazy negation."""

from __future__ import annotations

import torch


def is_contiguous(x: torch.Tensor) -> bool:
    """Whether memory holds the elements in C order; torch may negate lazily, as for a conjugate's imaginary part."""
    return x.is_contiguous() and not x.is_neg()


def contiguous(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a contiguous copy of it."""
    return x if is_contiguous(x) else x.resolve_neg().contiguous()
