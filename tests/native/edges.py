"""Kernels at the edges of each dtype: `python -m tests.native.edges` compares all elementwise operators and reductions.

Operators of one kind are compiled together, so that they become kernels; see `tests.ops.edges` for the numbers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.testing._internal.opinfo.core import ReductionOpInfo

from sardonyx.errors import SardonyxError
from tests.ops.check import difference, nearer_to_truth, run_eager, truth_of
from tests.ops.database import operators, over_tensors
from tests.ops.edges import edge_samples, is_elementwise

DTYPES = "float32 float64 float16 bfloat16 int64 int32 int16 int8 uint8 bool"
_TOGETHER = 12
"""Operators in a graph."""


@dataclass
class Case:
    """One operator on its edges."""

    name: str
    function: Callable[..., Any]
    tensors: list[torch.Tensor]
    expected: Any


def cases(dtype: torch.dtype) -> Iterator[Case]:
    """Each operator that eager runs at the edges of a dtype, and that draws no random numbers."""
    for name, op in operators().items():
        if not is_elementwise(op) and not isinstance(op, ReductionOpInfo):
            continue
        for sample in edge_samples(op, dtype):
            arguments = (sample.input, tuple(sample.args), dict(sample.kwargs))
            tensors = [x for x in (sample.input, *sample.args) if isinstance(x, torch.Tensor)]
            try:
                function = over_tensors(op, arguments)
                expected, is_random = run_eager(function, tensors)
            except Exception:
                continue  # torch has it not
            if not is_random:
                yield Case(name, function, tensors, expected)


def wrong(group: Sequence[Case]) -> list[str]:
    """What differs from eager in a group that is compiled with kernels of its own, each operator named."""
    tensors = [x for case in group for x in case.tensors]
    counts = [len(case.tensors) for case in group]
    functions = [case.function for case in group]

    def together(*args: torch.Tensor) -> list[Any]:
        left = iter(args)
        return [
            function(*(next(left) for _ in range(count))) for function, count in zip(functions, counts, strict=True)
        ]

    torch._dynamo.reset()
    try:
        results = torch.compile(together, backend="sardonyx", options={"native": True, "fallback": "quiet"})(*tensors)
    except (SardonyxError, torch._dynamo.exc.TorchDynamoException) as error:
        if len(group) == 1:
            return [f"{group[0].name}: {type(error).__name__}: {str(error)[:300]}"]
        return [problem for case in group for problem in wrong([case])]
    return [
        f"{case.name}: {problem}"
        for case, result in zip(group, results, strict=True)
        for problem in [difference(case.expected, result)]
        if problem and not nearer_to_truth(truth_of(case.name, case.function), case.tensors, case.expected, result)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.native.edges", description=__doc__)
    parser.add_argument("--dtypes", nargs="*", default=DTYPES.split(), choices=DTYPES.split(), metavar="DTYPE")
    given = parser.parse_args(arguments)
    problems = []
    for name in given.dtypes:
        found = list(cases(getattr(torch, name)))
        groups = [found[at : at + _TOGETHER] for at in range(0, len(found), _TOGETHER)]
        off = [f"{name}: {problem}" for group in groups for problem in wrong(group)]
        print("\n".join([*off, f"{name}: {len(found)} cases, {len(off)} wrong"]), flush=True)
        problems += off
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
