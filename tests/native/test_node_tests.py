"""The node tests of onnx, through kernels: every case of every operator that has a lowering."""

from __future__ import annotations

from collections import Counter, defaultdict

from sardonyx.native.lower import TABLE
from tests.native.node_tests import cases, compare, symbolic
from tests.native.refused import REFUSED, REFUSED_WITH_SYMBOLS
from tests.native.running import Together
from tests.native.test_contrib import CASES as CONTRIB

_OF_EACH = 2
"""Cases of an operator that are compiled here."""


def test_some_cases_of_each_operator_give_what_is_expected() -> None:
    """Every other one with a symbol for each size; `python -m tests.native.node_tests` runs all of them both ways."""
    count: Counter[str] = Counter()
    chosen = []
    for case in cases():
        count[case.node.op_type] += 1
        if count[case.node.op_type] <= _OF_EACH:
            chosen.append(case if count[case.node.op_type] % 2 else symbolic(case))
    assert compare(chosen, quickly=True) == []


def _refused(*, with_symbols: bool) -> dict[str, set[str]]:
    """By reason, the cases that are no kernels."""
    together, refused = Together(), defaultdict(set)
    for case in cases():
        why = together.add(case.name, (symbolic(case) if with_symbols else case).model)
        if why is not None:
            refused[why].add(case.name.removeprefix("test_"))
    return dict(refused)


def test_what_is_refused_says_why() -> None:
    assert _refused(with_symbols=False) == REFUSED


def test_what_is_refused_with_symbols_says_why() -> None:
    assert {why: len(names) for why, names in _refused(with_symbols=True).items()} == REFUSED_WITH_SYMBOLS


def test_every_operator_has_a_case() -> None:
    tested = {(case.node.domain, case.node.op_type) for case in cases()}
    elsewhere = {(domain, op) for op, domain, *_ in CONTRIB.values()}
    assert TABLE.keys() <= tested | elsewhere
