"""A small map that forgets what was used longest ago."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

V = TypeVar("V")


class LRU(Generic[V]):
    """At most `size` entries.

    >>> kept = LRU[str](2)
    >>> kept.put(1, "a"); kept.put(2, "b"); _ = kept.get(1); kept.put(3, "c")
    >>> kept.get(2) is None, kept.get(1)
    (True, 'a')
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._entries: OrderedDict[Hashable, V] = OrderedDict()

    def get(self, key: Hashable) -> V | None:
        """The entry, which counts as used; None if there is none."""
        if key in self._entries:
            self._entries.move_to_end(key)
        return self._entries.get(key)

    def put(self, key: Hashable, value: V) -> None:
        """Add an entry, and drop the least recently used beyond the size."""
        self._entries[key] = value
        self._entries.move_to_end(key)
        while len(self._entries) > self._size:
            self._entries.popitem(last=False)

    def items(self) -> list[tuple[Hashable, V]]:
        """Every entry, most recently used first."""
        return list(reversed(self._entries.items()))

    def clear(self) -> None:
        """Drop everything."""
        self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)
