"""The node tests of onnx, through kernels: a case of every operator; `make native-checks` runs all of them."""

from __future__ import annotations

from itertools import cycle

import onnx
import pytest

from sardonyx.native.lower import TABLE
from tests.native.contrib_cases import CASES as CONTRIB
from tests.native.contrib_cases import MICROSOFT
from tests.native.node_tests import DOCUMENT, OTHERS, cases, compare, document, retyped, symbolic
from tests.native.transformer_cases import CASES as TRANSFORMERS


def test_a_case_of_each_operator_gives_what_is_expected() -> None:
    """Every other one with a symbol for each size."""
    first = {case.operator: case for case in reversed(cases())}
    chosen = [symbolic(case) if i % 2 else case for i, case in enumerate(first.values())]
    assert compare(chosen, quickly=True) == []


def test_a_case_of_each_operator_is_right_with_other_real_numbers() -> None:
    """One operator with float64, the next with float16, the next with bfloat16."""
    last = {case.operator: case for case in cases() if retyped(case, "float16") is not None}
    chosen = [retyped(case, name) for case, name in zip(last.values(), cycle(OTHERS))]
    assert len(chosen) > 50
    assert compare([case for case in chosen if case is not None], quickly=True) == []


def test_the_document_says_what_becomes_a_kernel_and_why_the_rest_does_not() -> None:
    written = DOCUMENT.read_text()
    if f"with onnx {onnx.__version__};" not in written:
        pytest.skip(f"docs/native-operators.md is not of onnx {onnx.__version__}")
    assert document() == written, "run python -m tests.native.node_tests --write"


def test_every_operator_has_a_case() -> None:
    tested = {(case.node.domain, case.operator) for case in cases()}
    elsewhere = {(domain, op) for op, domain, *_ in CONTRIB.values()}
    elsewhere |= {(MICROSOFT, op) for op, *_ in TRANSFORMERS.values()}
    elsewhere |= {("com.ms.internal.nhwc", "BatchNormalization")}  # tests/native/test_contrib.py
    assert TABLE.keys() <= tested | elsewhere
