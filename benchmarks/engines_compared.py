"""How fast sardonyx is with each of its engines, and what `auto` chooses: `python -m benchmarks.engines_compared`."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

import sardonyx
from benchmarks.engines import ENGINES, Call, compiled
from benchmarks.models import Case, build
from benchmarks.tables import Table
from benchmarks.turns import Measured, Prepared, Suite, parsed, parser, take_turns
from sardonyx.diagnose.report import collecting
from sardonyx.diagnose.verify import difference

_OTHERS = ("eager", "inductor")
_OURS = ("onnxruntime", "openvino", "iree", "onnx-mlir", "auto")
_MODELS = ("mlp", "bert-base", "resnet50", "llama-decode")

SUITE = Suite("engines_compared", __doc__, _MODELS, (*_OTHERS, *_OURS))


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
    """For each model the best engine, and how `auto` stands to it, to eager and to inductor, by their fastest rounds:
    what else runs on the machine only adds, and engines within a few percent of each other are to be told apart.
    """
    made = Table("auto", ["model", "best engine", "auto ÷ best", "eager ÷ auto", "inductor ÷ auto"], text_columns=2)
    for model in dict.fromkeys(m.model for m in results):
        seconds = {m.engine: min(m.round_seconds) for m in results if m.model == model and m.seconds is not None}
        engines = {name: seconds[name] for name in _OURS[:-1] if name in seconds}
        auto = seconds.get("auto")
        if auto is None or not engines:
            made.add(model, "", "", "", "")
            continue
        best = min(engines, key=engines.__getitem__)
        others = [f"{seconds[name] / auto:.2f}" if name in seconds else "" for name in _OTHERS]
        made.add(model, best, f"{auto / engines[best]:.2f}", *others)
    return made


def main() -> None:
    """Measure what the command line asks for: by default the engines that are installed."""
    installed = [engine.name for engine in sardonyx.engines() if engine.installed and engine.name in _OURS]
    standing(take_turns(SUITE, parsed(SUITE, parser(SUITE, [*_OTHERS, *installed])))).show()


if __name__ == "__main__":
    main()
