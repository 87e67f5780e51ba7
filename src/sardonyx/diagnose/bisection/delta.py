"""Delta debugging: of many things, the few without which something no longer happens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def minimal_subset(items: Sequence[T], happens: Callable[[list[T]], bool]) -> list[T]:
    """A part of the items with which it happens, while with no part of that one fewer it does; none if it never does.

    `happens` is asked about parts in the order of the items, and not about the empty one.

    >>> smallest(range(100), lambda part: {17, 60} <= set(part))
    [17, 60]
    """
    left, parts = list(items), 2
    while len(left) > 1:
        size = -(-len(left) // parts)
        pieces = [left[at : at + size] for at in range(0, len(left), size)]
        rests = [left[:at] + left[at + size :] for at in range(0, len(left), size)] if len(pieces) > 2 else []
        fewer = next((part for part in (*pieces, *rests) if len(part) < len(left) and happens(part)), None)
        if fewer is not None:
            left, parts = fewer, 2
        elif size == 1:
            break
        else:
            parts = min(2 * parts, len(left))
    return left if left and happens(left) else []
