"""A least-recently-used mapping."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

V = TypeVar("V")


class LRU(Generic[V]):
    """A mapping of at most `size` entries, which evicts the least recently used, and calls `on_evict` with it.

    >>> lru = LRU[str](2)
    >>> lru.put(1, "a"); lru.put(2, "b"); _ = lru.get(1); lru.put(3, "c")
    >>> lru.get(2) is None, lru.get(1)
    (True, 'a')
    """

    def __init__(self, size: int, on_evict: Callable[[V], object] | None = None) -> None:
        self._size, self._on_evict = size, on_evict
        self._entries: OrderedDict[Hashable, V] = OrderedDict()

    def get(self, key: Hashable) -> V | None:
        """Return an entry and mark it as used; None if there is none."""
        if key in self._entries:
            self._entries.move_to_end(key)
        return self._entries.get(key)

    def put(self, key: Hashable, value: V) -> None:
        """Add an entry, and evict the least recently used beyond the size."""
        self._entries[key] = value
        self._entries.move_to_end(key)
        while len(self._entries) > self._size:
            self._evict()

    def _evict(self) -> None:
        _, value = self._entries.popitem(last=False)
        if self._on_evict is not None:
            self._on_evict(value)

    def items(self) -> list[tuple[Hashable, V]]:
        """Return all entries, most recently used first."""
        return list(reversed(self._entries.items()))

    def clear(self) -> None:
        """Remove all entries."""
        while self._entries:
            self._evict()

    def __len__(self) -> int:
        return len(self._entries)
