"""The node tests of onnx, through kernels: every case of every operator that has a lowering."""

from __future__ import annotations

from collections import Counter

import onnx
import pytest

from sardonyx.native.lower import TABLE
from tests.native.node_tests import DOCUMENT, OTHERS, cases, compare, document, retyped, symbolic
from tests.native.test_contrib import CASES as CONTRIB

_OF_EACH = 2
"""Cases of an operator that are compiled here."""


def test_some_cases_of_each_operator_give_what_is_expected() -> None:
    """Every other one with a symbol for each size; `python -m tests.native.node_tests` runs all of them both ways."""
    count: Counter[str] = Counter()
    chosen = []
    for case in cases():
        count[case.operator] += 1
        if count[case.operator] <= _OF_EACH:
            chosen.append(case if count[case.operator] % 2 else symbolic(case))
    assert compare(chosen, quickly=True) == []


@pytest.mark.parametrize("name", OTHERS)
def test_a_case_of_each_operator_is_right_with_other_real_numbers(name: str) -> None:
    first = {case.operator: case for case in reversed(cases()) if retyped(case, name) is not None}
    chosen = [made for case in first.values() if (made := retyped(case, name)) is not None]
    assert len(chosen) > 50
    assert compare(chosen, quickly=True) == []


def test_the_document_says_what_becomes_a_kernel_and_why_the_rest_does_not() -> None:
    written = DOCUMENT.read_text()
    if f"with onnx {onnx.__version__};" not in written:
        pytest.skip(f"docs/native-operators.md is not of onnx {onnx.__version__}")
    assert document() == written, "run python -m tests.native.node_tests --write"


def test_every_operator_has_a_case() -> None:
    tested = {(case.node.domain, case.operator) for case in cases()}
    elsewhere = {(domain, op) for op, domain, *_ in CONTRIB.values()}
    assert TABLE.keys() <= tested | elsewhere
