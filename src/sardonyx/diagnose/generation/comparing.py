"""Where two greedy generations of one prompt part, and by how much their logits differ there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from sardonyx.diagnose.generation.generating import Generation
from sardonyx.telemetry.verify import close, difference

_TOP = 3
"""Tokens of the largest logits that are shown of each generation."""
_SHOWN_BEFORE, _SHOWN_AFTER = 8, 3


@dataclass(frozen=True)
class Divergence:
    """The first token of a row that differs, with the logits that chose it.

    Both saw the same tokens before, so that the logits can be compared.
    """

    row: int
    position: int
    expected: int
    found: int
    top: tuple[tuple[int, float, float], ...]
    """The tokens that either ranks first, with their logits in both."""
    margin: float
    """By how much the expected logits prefer their token to the other."""
    error: float
    """The largest difference of the logits at this position, relative to their magnitude."""
    by_rounding: bool
    """Whether these logits differ by no more than results in their dtype may, so that the two tokens were a tie."""


@dataclass(frozen=True)
class GenerationComparison:
    """Two generations, token by token."""

    names: tuple[str, str]
    """The expected one, and the other."""
    expected: list[list[int]]
    found: list[list[int]]
    divergences: list[Divergence]
    """The first difference of each row that has one."""
    error: float
    """The largest difference of logits after equal tokens, relative to their magnitude."""

    @property
    def differs(self) -> bool:
        """Whether any token differs."""
        return bool(self.divergences)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {**asdict(self), "differs": self.differs}

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        expected, found = self.names
        rows, tokens = len(self.expected), len(self.expected[0])
        size = f"{tokens} tokens" if rows == 1 else f"{rows} rows of {tokens} tokens"
        equal = f"{len(self.divergences)} of {rows} rows differ" if self.differs else "all tokens equal"
        yield f"{found} against {expected}: {size}, {equal}; logits differ by {self.error:.2e} of their magnitude"
        for x in self.divergences:
            yield f"row {x.row}: token {x.position} is {x.found}, not {x.expected}; {_cause(x, expected)}"
            width = max(map(len, self.names))
            for name, tokens_of in zip(self.names, (self.expected[x.row], self.found[x.row]), strict=True):
                yield f"  {name.ljust(width)}  {_around(tokens_of, x.position)}"


def _cause(x: Divergence, expected: str) -> str:
    reason = "rounding decides" if x.by_rounding else "more than rounding"
    return f"in {expected} they are {x.margin:.2e} apart; logits differ by {x.error:.2e} of their magnitude: {reason}"


def _around(tokens: Sequence[int], position: int) -> str:
    """Return the tokens around a position, which is in brackets.

    >>> _around(range(20), 10)
    '… 2 3 4 5 6 7 8 9 [10] 11 12 13 …'
    """
    start, stop = max(0, position - _SHOWN_BEFORE), min(len(tokens), position + 1 + _SHOWN_AFTER)
    shown = [f"[{tokens[i]}]" if i == position else str(tokens[i]) for i in range(start, stop)]
    return " ".join(["…"] * (start > 0) + shown + ["…"] * (stop < len(tokens)))


def compare_generations(names: tuple[str, str], expected: Generation, found: Generation) -> GenerationComparison:
    """Compare the tokens of two generations of the same prompt, which keep their logits."""
    rows = [_divergence(row, expected, found) for row in range(len(expected.tokens))]
    divergences = [x for x in rows if x is not None]
    lengths = [len(expected.logits) if x is None else x.position + 1 for x in rows]
    error = max(
        difference(*_in_one_dtype(found.logits[i][row], expected.logits[i][row]))
        for row, length in enumerate(lengths)
        for i in range(length)
    )
    return GenerationComparison(names, expected.tokens.tolist(), found.tokens.tolist(), divergences, error)


def _divergence(row: int, expected: Generation, found: Generation) -> Divergence | None:
    different = (expected.tokens[row] != found.tokens[row]).nonzero()
    if not len(different):
        return None
    position = int(different[0])
    token, other = int(expected.tokens[row, position]), int(found.tokens[row, position])
    ours, theirs = _in_one_dtype(found.logits[position][row], expected.logits[position][row])
    error, by_rounding = difference(ours, theirs), close(ours, theirs)
    top = _top(theirs, ours, token, other)
    return Divergence(row, position, token, other, top, float(theirs[token] - theirs[other]), error, by_rounding)


def _in_one_dtype(*logits: torch.Tensor) -> list[torch.Tensor]:
    """Return logits on the CPU, in the less precise of their dtypes."""
    dtype = max((x.dtype for x in logits), key=lambda dtype: torch.finfo(dtype).eps)
    return [x.to("cpu", dtype) for x in logits]


def _top(theirs: torch.Tensor, ours: torch.Tensor, *chosen: int) -> tuple[tuple[int, float, float], ...]:
    """Return the chosen tokens and those of the largest logits in either, by the expected logits."""
    count = min(_TOP, len(theirs))
    tokens = {*chosen, *theirs.topk(count).indices.tolist(), *ours.topk(count).indices.tolist()}
    ordered = sorted(tokens, key=lambda token: -float(theirs[token]))
    return tuple((token, float(theirs[token]), float(ours[token])) for token in ordered)
