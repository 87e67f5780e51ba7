"""How fast sardonyx is with each of its engines, and what `auto` chooses: `python -m benchmarks.engines_compared`.

The engines of sardonyx share a process, so that `auto` differs from the engine it chose by nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import torch

import sardonyx
from benchmarks.engines import ENGINES, Call, compiled
from benchmarks.models import Case, build
from benchmarks.tables import Table
from benchmarks.turns import Measured, Prepared, Suite, parsed, parser, take_turns
from sardonyx.telemetry.report import collecting
from sardonyx.telemetry.verify import difference

_OTHERS = ("eager", "inductor")
_OURS = ("onnxruntime", "openvino", "iree", "onnx-mlir", "auto")
_MODELS = ("mlp", "bert-base", "resnet50", "llama-decode")

SUITE = Suite("engines_compared", __doc__, _MODELS, (*_OTHERS, *_OURS), together=_OURS)


def prepare(model: str, engine: str) -> Prepared:
    """The model in the engine, called once; its result is compared with eager's."""
    torch.set_grad_enabled(False)
    case = build(model)
    expected = case[0](*case[1])
    started = time.perf_counter()
    with collecting() as report:
        call = _call(engine, case)
        result = call()
    first = time.perf_counter() - started
    return Prepared(call, first, difference(result, expected), len(report.graphs) if engine in _OURS else None)


def _call(engine: str, case: Case) -> Call:
    """A call without arguments; nothing is found compiled, and nothing kept."""
    if engine in _OTHERS:
        return ENGINES[engine](*case)
    return compiled(*case, backend="sardonyx", options={"engine": engine, "fallback": "error", "cache_dir": ""})


def standing(results: Sequence[Measured]) -> Table:
    """For each model the engine with the least median, and how `auto` stands to it, to eager and to inductor."""
    made = Table("auto", ["model", "best engine", "auto ÷ best", "eager ÷ auto", "inductor ÷ auto"], text_columns=2)
    for model in dict.fromkeys(m.model for m in results):
        ran = {m.engine: m for m in results if m.model == model and m.seconds is not None}
        engines = [ran[name] for name in _OURS[:-1] if name in ran]
        if "auto" not in ran or not engines:
            made.add(model, "", "", "", "")
            continue
        auto, best = ran["auto"], min(engines, key=lambda m: m.seconds or 0)
        others = [f"{_paired(ran[name], auto):.2f}" if name in ran else "" for name in _OTHERS]
        made.add(model, best.engine, f"{_paired(auto, best):.2f}", *others)
    return made


def _paired(one: Measured, other: Measured) -> float:
    """How many times as long one takes: the median over the rounds, each with what was measured beside it."""
    return median(a / b for a, b in zip(one.round_seconds, other.round_seconds, strict=True))


def main() -> None:
    """Measure what the command line asks for: by default the engines that are installed."""
    installed = [engine.name for engine in sardonyx.engines() if engine.installed and engine.name in _OURS]
    standing(take_turns(SUITE, parsed(SUITE, parser(SUITE, [*_OTHERS, *installed])))).show()


if __name__ == "__main__":
    main()
