"""Buffers of keys and values that a session appends to in place.

A caller gets copy-on-write views of the first rows: reading shares the buffer's memory, and torch copies it before it
writes through a view. So views are independent tensors, as the results of torch.cat are, and rows that were handed out
never change. Rows behind those of a view are not part of it, so the session may write them there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C import _from_dlpack, _to_dlpack
from torch.utils.weak import WeakTensorKeyDictionary

from sardonyx import fork

ROWS = 2
"""The axis of rows in keys and values, which are (batch, heads, rows, size)."""
BLOCK = 256
"""Rows that a new buffer has room for; at least an eighth of those it starts with."""

_C: Any = torch._C
_lock = fork.Lock()
_buffers: Any = WeakTensorKeyDictionary()
"""The buffer of each live view; a buffer is freed with its last view."""


class CacheBuffer:
    """Memory with room for more rows than its views have."""

    memory: torch.Tensor
    """The whole buffer, for engines: not copied on write, as `_source` is once it has views."""

    def __init__(self, past: torch.Tensor, count: int) -> None:
        self._written = past.shape[ROWS] + count
        with torch.inference_mode(False), torch.no_grad():
            self._source = torch.empty(_with_room(past, self._written), dtype=past.dtype, device=past.device)
            self.memory = _from_dlpack(_to_dlpack(self._source))
            self.memory.narrow(ROWS, 0, past.shape[ROWS]).copy_(past)
        self._address, self._strides = self.memory.data_ptr(), self.memory.stride()
        self._other_sizes = (*past.shape[:ROWS], *past.shape[ROWS + 1 :])

    def view(self, rows: int) -> torch.Tensor:
        """Return the first rows, as a tensor of the caller's."""
        return self.adopt(self._source._lazy_clone().narrow(ROWS, 0, rows).detach())

    def adopt(self, alias: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the memory of a view, which is a view of the buffer as well from now on."""
        _buffers[alias] = self
        return alias

    def claim(self, past: torch.Tensor, count: int) -> bool:
        """Reserve the rows behind a view for one caller; False if they are taken, or the view was edited."""
        rows = past.shape[ROWS]
        with _lock:
            free = rows == self._written and rows + count <= self.memory.shape[ROWS] and self._is_unchanged(past)
            self._written += count if free else 0
        return free

    def _is_unchanged(self, view: torch.Tensor) -> bool:
        """Whether nobody wrote to a view, which gave it memory of its own, or changed what it is a view of."""
        batch, heads, _, *size = view.shape if view.dim() == len(self._strides) else (0, 0, 0)
        same = (batch, heads, *size) == self._other_sizes and view.stride() == self._strides
        return same and bool(_C._is_cow_tensor(view)) and address_of(view) == self._address


def address_of(x: torch.Tensor) -> int:
    """Return the address of a tensor's elements; `data_ptr` would copy memory that views share."""
    return int(_C._data_address(x))


def _with_room(past: torch.Tensor, rows: int) -> list[int]:
    shape = list(past.shape)
    shape[ROWS] = (rows // BLOCK + 1) * BLOCK + rows // (8 * BLOCK) * BLOCK
    return shape


def buffer_for(past: torch.Tensor, count: int) -> CacheBuffer:
    """Return a buffer with the rows of `past`, and `count` rows behind them that only the caller may write.

    That is the buffer of which it is a view, unless another caller continued it or it was edited; else a copy.
    """
    buffer = buffer_of(past)
    return buffer if buffer is not None and buffer.claim(past, count) else CacheBuffer(past, count)


def buffer_of(x: torch.Tensor) -> CacheBuffer | None:
    """Return the buffer that a tensor was handed out as a view of; it may have been edited since."""
    buffer: CacheBuffer | None = _buffers.get(x)
    return buffer
