"""The benchmark of lower precision: what it tells of engines, and in which Python each runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import precision, turns, worker
from benchmarks.models import mlp
from benchmarks.precision import MODELS, SUITE, prepare, relative_error, remarks, table, with_peers
from benchmarks.precision_engines import ENGINES, ON_REQUEST, PEERS, USUAL
from benchmarks.precision_guard import Guarded
from benchmarks.precision_guard import table as table_of_guard
from benchmarks.precision_table import cells, layers, markdown, results_of, speed
from benchmarks.processes import Answers
from benchmarks.turns import Measured, Prepared
from torch import nn

from sardonyx.telemetry.report import GraphReport, LayerPrecision, PrecisionChoice, RegionReport, Report


def measured(engine: str, seconds: float, **more: Any) -> Measured:
    return Measured("model", engine, 2.0, 0.01, [seconds] * 3, **more)


def rows(*results: Measured) -> dict[str, str]:
    """What the table has of each engine, by name."""
    lines = table("precision", results).plain().splitlines()
    return {line.split()[1]: line for line in lines if line.startswith("model ")}


def test_a_row_has_the_time_the_ratio_to_eager_and_the_error() -> None:
    found = rows(measured("eager", 0.1), measured("sardonyx-bf16", 0.025, details={"resident_mb": 812.3}))
    assert found["sardonyx-bf16"].split() == ["model", "sardonyx-bf16", "25.0", "4.00", "1.0e-02", "2", "812"]
    assert found["eager"].split()[2:4] == ["100", "1.00"]


def test_a_row_has_layers_by_type() -> None:
    found = rows(measured("sardonyx-int8", 0.1, details={"layers": {"int8": 72, "bf16": 1}}))
    assert "72 int8, 1 bf16" in found["sardonyx-int8"]


def test_an_engine_that_fails_is_a_row_that_says_so() -> None:
    found = rows(measured("eager", 0.1), Measured("model", "openvino-int8", failed="No module named 'nncf'"))
    assert found["openvino-int8"].split() == ["model", "openvino-int8", "failed"]


def test_why_a_model_runs_in_float32_is_told() -> None:
    kept = measured("sardonyx-auto", 0.1, details={"remark": "the model runs in float32: no layer is faster"})
    assert list(remarks([measured("eager", 0.1), kept])) == [
        "sardonyx-auto on model: the model runs in float32: no layer is faster"
    ]


def test_layers_are_counted_from_the_report() -> None:
    kinds = {"a": "int8", "b": "int8", "c": "bf16"}
    layers = tuple(LayerPrecision(name, kind, 0.01, 1.0, 2.0) for name, kind in kinds.items())
    region = RegionReport(precision=PrecisionChoice("int8", 0.1, 0.05, layers, 1.0, 2.0, remark="why"))
    report = Report([GraphReport("inference", 1, [region, RegionReport()])])
    assert precision._choices(report) == {"layers": {"int8": 2, "bf16": 1}, "drop": 0.05, "remark": "why"}
    assert precision._choices(Report([GraphReport("inference", 1, [RegionReport()])])) == {}


def test_the_error_is_relative_to_the_norm() -> None:
    assert relative_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)
    assert relative_error(torch.tensor([3.0, 4.0], dtype=torch.bfloat16), torch.tensor([3.0, 4.0])) == 0.0


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "MODELS", {"tiny": lambda: mlp((16, 32, 16), 8)})


@pytest.mark.usefixtures("tiny")
def test_a_prepared_engine_tells_its_error_against_eager_float32() -> None:
    exact, rounded = prepare("tiny", "eager"), prepare("tiny", "eager-bf16")
    assert exact.error_vs_eager == 0.0
    assert 1e-3 < rounded.error_vs_eager < 2e-2
    assert rounded.call().dtype == torch.bfloat16
    assert rounded.details["versions"] == {}


@pytest.mark.usefixtures("tiny")
def test_ours_is_compiled_by_sardonyx() -> None:
    ours = prepare("tiny", "sardonyx")
    assert ours.error_vs_eager < 1e-6
    assert ours.graphs == 1


# Processes


def answers(prepare: Callable[[], Prepared]) -> dict[str, Any]:
    told = StringIO()
    worker._ready(prepare, Answers(told))
    answer: dict[str, Any] = json.loads(told.getvalue())
    return answer


def test_details_travel_from_the_process_of_an_engine() -> None:
    prepared = Prepared(lambda: None, 1.0, 0.0, None, {"layers": {"int8": 3}})
    assert answers(lambda: prepared)["details"] == {"layers": {"int8": 3}}


@pytest.mark.usefixtures("tiny")
def test_an_option_that_is_refused_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(model: nn.Module, args: Any) -> Any:
        raise ValueError("precision is 'int3'")

    monkeypatch.setattr(precision, "ENGINES", {"ours": refused})
    assert answers(partial(prepare, "tiny", "ours"))["error"] == "ValueError: precision is 'int3'"


def test_a_peer_runs_in_the_python_that_has_its_packages(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("""#!/bin/sh\necho '{"error": "I am the peers'"'"'"}'\n""")
    python.chmod(0o755)
    with turns.Worker(with_peers(SUITE, python), "bert-base", ["openvino-int8"], 60) as peer:
        peer.prepare()
    assert peer.measured[0].failed == "I am the peers'"


def test_without_that_python_peers_are_looked_for_in_this_one(tmp_path: Path) -> None:
    assert set(with_peers(SUITE, tmp_path / "absent").pythons.values()) == {sys.executable}
    assert not {"eager", "sardonyx", "onnxruntime-int8", "inductor-bf16"} & set(with_peers(SUITE, tmp_path).pythons)


def test_the_engines_that_need_peers_or_a_request_are_engines() -> None:
    assert {*PEERS, *USUAL, *ON_REQUEST} <= set(ENGINES)
    assert not set(USUAL) & set(ON_REQUEST)
    assert SUITE.models == tuple(MODELS)


# What is published


def written(engine: str, seconds: float | None, **more: Any) -> dict[str, Any]:
    return Measured("bert-base", engine, 1.0, 0.012, [] if seconds is None else [seconds], **more).as_dict()


def test_ratios_are_to_eager_in_the_same_file() -> None:
    slow, fast = (
        results_of({"results": [written("eager", seconds), written(engine, 0.1)]})
        for engine, seconds in (("sardonyx-bf16", 0.4), ("sardonyx-int8", 0.2))
    )
    shown = cells([*slow, *fast], speed)
    assert shown["bert-base", "sardonyx-bf16"] == "4.00 (1.2e-2)"
    assert shown["bert-base", "sardonyx-int8"] == "2.00 (1.2e-2)"
    assert shown["bert-base", "eager"] == "200 ms"


def test_tables_have_what_failed_what_was_not_measured_and_layers_by_type() -> None:
    results = results_of(
        {
            "results": [
                written("torchao-int8", None, failed="it is not installed"),
                written("sardonyx-int8", 0.1, details={"layers": {"int8": 70, "bf16": 3}}),
            ]
        }
    )
    results += results_of({"results": [{**written("sardonyx-int8", 0.1), "model": "resnet50"}]})
    table = markdown(cells(results, speed)).splitlines()
    assert table[0] == "| | torchao-int8 | sardonyx-int8 |"
    assert table[2:] == ["| bert-base | failed | (1.2e-2) |", "| resnet50 | – | (1.2e-2) |"]
    assert markdown(cells(results, layers)).splitlines()[2:] == ["| bert-base | 70 int8, 3 bf16 |"]


# The guard


@pytest.mark.parametrize(
    ("seconds", "error", "holds"), [(0.9, 0.01, True), (1.04, 0.0, True), (1.06, 0.0, False), (0.5, 0.011, False)]
)
def test_the_promise_holds_if_it_is_neither_slower_nor_past_the_bound(
    seconds: float, error: float, holds: bool
) -> None:
    found = Guarded("model", 1.0, seconds, error, 0.01, {"int8": 3}, [], [], "")
    assert found.holds is holds
    assert ("yes" if holds else "NO") in table_of_guard([found]).plain()
