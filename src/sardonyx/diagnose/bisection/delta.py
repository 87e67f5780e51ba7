"""Delta debugging."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def minimal_subset(items: Sequence[T], fails: Callable[[list[T]], bool]) -> list[T]:
    """Return a 1-minimal failing subset; empty if no subset fails.

    `fails` is called with nonempty subsets, in the order of the items.

    >>> minimal_subset(range(100), lambda part: {17, 60} <= set(part))
    [17, 60]
    """
    left, parts = list(items), 2
    while len(left) > 1:
        size = -(-len(left) // parts)
        pieces = [left[at : at + size] for at in range(0, len(left), size)]
        rests = [left[:at] + left[at + size :] for at in range(0, len(left), size)] if len(pieces) > 2 else []
        fewer = next((part for part in (*pieces, *rests) if len(part) < len(left) and fails(part)), None)
        if fewer is not None:
            left, parts = fewer, 2
        elif size == 1:
            break
        else:
            parts = min(2 * parts, len(left))
    return left if left and fails(left) else []
