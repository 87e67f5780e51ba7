"""The node tests of onnx, through kernels: every case of every operator that has a lowering."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tests.native.node_tests import Case
from tests.native.running import Together, difference, run, session_of

REFUSED = {}
"""What cannot be lowered, and why."""
WITHOUT_CASES: set[tuple[str, str]] = set()


def _results(chosen: Iterable[Case]) -> tuple[dict[str, str], list[str]]:
    """Why cases are refused, and what is wrong with the others."""
    together, refused, taken = Together(), {}, []
    for case in chosen:
        why = together.add(case.name, case.model)
        if why is None:
            taken.append(case)
        else:
            refused[case.name] = why
    together.build(quickly=True)
    return refused, [f"{case.name}: {wrong}" for case in taken if (wrong := _wrong(together, case)) is not None]


def _wrong(together: Together, case: Case) -> str | None:
    """How a result differs from what is expected, or, where that is rounded, from onnxruntime's."""
    found = together.run(case.name, case.feeds)
    for index, (a, b) in enumerate(zip(found, case.expected, strict=True)):
        differs = difference(a, np.asarray(b))
        if differs is not None and difference(a, run(session_of(case.model), case.feeds)[index]) is not None:
            return differs
    return None
