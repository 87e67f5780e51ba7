"""`sardonyx bench --generate`: time to the first token, tokens a second, bytes of the cache and peak memory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from rich.filesize import decimal

from sardonyx.cli._generation import Generator
from sardonyx.cli._memory import peak_bytes, reset_peak
from sardonyx.cli._messages import print_result, progress_bar, show_status, table
from sardonyx.doors.module import CompiledModule
from sardonyx.options import Options
from sardonyx.telemetry.report import Report
from sardonyx.telemetry.text import duration

EAGER, OURS = "eager", "sardonyx"


@dataclass
class Contender:
    """A form of the model, and what its generations took."""

    name: str
    module: Any
    tokens: torch.Tensor
    """Of the first generation, which compiles."""
    cold: float
    """Seconds to the first token of the first generation."""
    first: float
    """Seconds of the first generation."""
    peak: int | None
    """The peak of the process's memory in the first generation."""
    cache: int
    """Bytes of the cache of keys and values after the last token."""
    warm: list[float] = field(default_factory=list)
    """Seconds to the first token, in each round."""
    rates: list[float] = field(default_factory=list)
    """Tokens a second of decoding, in each round."""
    differs_at: int | None = None
    """The position of the first token that is not eager's, in any row."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "name": self.name,
            "first_token_cold": self.cold,
            "first_token": median(self.warm),
            "first_generation": self.first,
            "tokens_per_second": median(self.rates),
            "cache_bytes": self.cache,
            "peak_bytes": self.peak,
            "differs_at": self.differs_at,
            "rounds": {"first_token": self.warm, "tokens_per_second": self.rates},
        }


def bench(generator: Generator, options: Options, rounds: int, as_json: bool) -> bool:
    """Measure eager and sardonyx in turns, and print it; return whether tokens in float32 differ."""
    with _empty_cache(options) as cold:
        compiled = generator.compiled(cold)
        modules = {EAGER: generator.module, OURS: compiled}
        contenders = [_prepare(generator, name, module, as_json) for name, module in modules.items()]
        for number in progress_bar(range(rounds), "measuring", as_json):
            _round(generator, contenders, number)
    eager, ours = contenders
    ours.differs_at = _first_difference(eager.tokens, ours.tokens)
    result = {
        "model": generator.name,
        "engine": options.engine,
        "precision": options.precision,
        "threads": torch.get_num_threads(),
        **generator.sizes,
        "sessions": compiled.cache_info().built,
        "contenders": [x.as_dict() for x in contenders],
    }
    print_result(result, as_json, _table(contenders), *_remarks(result, compiled))
    return ours.differs_at is not None and options.precision == "float32"


@contextmanager
def _empty_cache(options: Options) -> Iterator[Options]:
    """Return the options with an empty disk cache, so that the first generation is one without earlier results."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        yield Options.of(options, cache_dir=folder)


def _prepare(generator: Generator, name: str, module: Any, as_json: bool) -> Contender:
    """Return a contender after its first generation, which compiles."""
    with show_status(f"{name}: first generation", as_json) as say:
        reset_peak()
        first = generator.generate(module, lambda text: say(f"{name}: first generation, {text}"))
        return Contender(name, module, first.tokens, first.first_token, first.total, peak_bytes(), first.cache_bytes)


def _round(generator: Generator, contenders: Sequence[Contender], number: int) -> None:
    """Generate once by each contender; each round starts with another one."""
    start = number % len(contenders)
    for contender in (*contenders[start:], *contenders[:start]):
        found = generator.generate(contender.module, _quiet)
        contender.warm.append(found.first_token)
        contender.rates.append(found.tokens_per_second)


def _quiet(text: str) -> None:
    """Tell nothing: times are taken."""


def _first_difference(expected: torch.Tensor, found: torch.Tensor) -> int | None:
    different = (expected != found).any(0).nonzero()
    return int(different[0]) if len(different) else None


def _table(contenders: Sequence[Contender]) -> Any:
    eager = median(contenders[0].rates)
    rows = []
    for x in contenders:
        times = (duration(x.cold), duration(median(x.warm)), duration(x.first))
        rate = median(x.rates)
        peak = "" if x.peak is None else decimal(x.peak)
        rows.append((x.name, *times, f"{rate:.1f}", f"{rate / eager:.2f}", decimal(x.cache), peak))
    headings = ["", "first token, cold", "warm", "first call", "tokens/s", "× eager", "cache", "peak memory"]
    return table(headings, rows, right=headings[1:])


def _remarks(result: dict[str, Any], compiled: CompiledModule) -> Iterator[str]:
    position = result["contenders"][-1]["differs_at"]
    size = f"batch {result['batch']}, prompt {result['prompt']}, {result['new_tokens']} new tokens"
    told = "equal to eager's" if position is None else f"equal to eager's until token {position}"
    yield ""
    yield f"{size}: {told}"
    if position is not None:
        yield f"  next: sardonyx compare {result['model']} --generate, with the same sizes"
    yield f"{result['sessions']} sessions were built in the first call of {OURS}"
    yield from _fallbacks(compiled.report)


def _fallbacks(report: Report) -> Iterator[str]:
    """Return what ran in torch, and the precision that was chosen."""
    for fallback in report.fallbacks:
        yield f"in torch: {fallback}"
    if report.precision is not None:
        yield str(report.precision).splitlines()[0]
