"""How fast each engine runs each model: `python -m benchmarks.inference`."""

from __future__ import annotations

import time
from importlib.util import find_spec

import torch

from benchmarks.engines import ENGINES, USUAL
from benchmarks.internals import collecting, difference
from benchmarks.models import MODELS, build
from benchmarks.turns import Prepared, Suite, parsed, parser, take_turns

SUITE = Suite("inference", __doc__, tuple(MODELS), tuple(ENGINES), ours=("sardonyx",))


def prepare(model: str, engine: str) -> Prepared:
    """The model in the engine, called once; its result is compared with eager's."""
    torch.set_grad_enabled(False)
    module, args = build(model)
    expected = module(*args)
    started = time.perf_counter()
    with collecting() as report:
        call = ENGINES[engine](module, args)
        result = call()
    first = time.perf_counter() - started
    graphs = len(report.graphs) if engine == "sardonyx" else None
    return Prepared(call, first, difference(result, expected), graphs)


def main() -> None:
    """Measure what the command line asks for."""
    usual = [name for name in USUAL if name != "openvino" or find_spec("openvino")]
    take_turns(SUITE, parsed(SUITE, parser(SUITE, usual)))


if __name__ == "__main__":
    main()
