"""`sardonyx compare --generate`: the first token that differs, with the logits of both there."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from rich.console import RenderableType

from sardonyx.cli._generation import Generator
from sardonyx.cli._messages import print_result, show_status, table
from sardonyx.diagnose.comparison import RunConfig
from sardonyx.diagnose.generation import Divergence, Generation, GenerationComparison, compare_generations
from sardonyx.errors import OptionError
from sardonyx.options import Options


def compare(generator: Generator, ways: Sequence[str], as_json: bool) -> bool:
    """Generate in two ways and print where they part; return whether they do."""
    if ways and len(ways) != 2:
        raise OptionError("--generate compares two ways", hint="use --way twice, or not at all")
    configs = list(map(RunConfig.of, ways)) or [RunConfig.of("torch"), RunConfig("sardonyx", Options.of())]
    expected, found = (_generate(generator, config, as_json) for config in configs)
    comparison = compare_generations((str(configs[0]), str(configs[1])), expected, found)
    print_result({"model": generator.name, **generator.sizes, **comparison.as_dict()}, as_json, *_parts(comparison))
    return comparison.differs


def _generate(generator: Generator, config: RunConfig, as_json: bool) -> Generation:
    with show_status(f"{config}: generating", as_json) as say:
        module = _module(generator, config)
        return generator.generate(module, lambda text: say(f"{config}: {text}"), keep_logits=True)


def _module(generator: Generator, config: RunConfig) -> Any:
    if config.options is not None:
        return generator.compiled(config.options)
    return generator.module if config.dtype is None else copy.deepcopy(generator.module).to(config.dtype)


def _parts(comparison: GenerationComparison) -> list[RenderableType]:
    parts: list[RenderableType] = [str(comparison)]
    for x in comparison.divergences:
        parts += ["", f"largest logits of row {x.row} at token {x.position}", _logits(x, comparison.names)]
    return parts


def _logits(x: Divergence, names: tuple[str, str]) -> RenderableType:
    chosen = {x.expected: names[0], x.found: names[1]}
    rows = [(token, *(f"{y:.6g}" for y in logits), chosen.get(token, "")) for token, *logits in x.top]
    headings = ["token", *names, "chosen by"]
    return table(headings, rows, right=headings[:3])
