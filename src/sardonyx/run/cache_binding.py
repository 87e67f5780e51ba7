"""Keys and values that a session appends to in place: bind them to buffers, and return views of those."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from sardonyx.capture.cache_buffers import ROWS, CacheBuffer, buffer_for
from sardonyx.engines.engine import Runner
from sardonyx.errors import EngineError

_NEW_ROWS = 1


@dataclass(frozen=True)
class CacheBinding:
    """Which inputs and outputs of a model are keys and values that grow by a row at each call."""

    pasts: tuple[int, ...]
    """Inputs that are buffers with the rows of earlier calls."""
    presents: tuple[int, ...]
    """For each the output that is the same buffer."""
    lengths: tuple[int, ...]
    """For each the input that has its number of rows; these inputs come last, and no argument of a call is one."""

    @cached_property
    def _first_past(self) -> list[int]:
        """For each length the first past that has it, in the order of inputs."""
        return [self.pasts[self.lengths.index(length)] for length in sorted(set(self.lengths))]

    def claim(self, feeds: list[Any]) -> list[CacheBuffer]:
        """Replace pasts among the inputs by buffers with room for a row, and append the lengths."""
        feeds += [feeds[past].shape[ROWS] for past in self._first_past]
        for past, length in zip(self.pasts, self.lengths, strict=True):
            if feeds[past].shape[ROWS] != feeds[length]:
                raise EngineError(f"keys or values have {feeds[past].shape[ROWS]} rows, others have {feeds[length]}")
        buffers = [buffer_for(feeds[past], _NEW_ROWS) for past in self.pasts]
        for past, buffer in zip(self.pasts, buffers, strict=True):
            feeds[past] = buffer.memory
        return buffers

    def run(self, runner: Runner, feeds: list[Any]) -> list[torch.Tensor]:
        """Run once; return the outputs, with views of the buffers for keys and values."""
        buffers = self.claim(feeds)
        memory = {present: buffer.memory for present, buffer in zip(self.presents, buffers, strict=True)}
        outputs = runner.append(feeds, memory)
        for present, length, buffer in zip(self.presents, self.lengths, buffers, strict=True):
            outputs[present] = buffer.view(feeds[length] + _NEW_ROWS)
        return outputs
