"""What a sweep survives."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from . import sweep as sweep_module
from .check import Outcome
from .database import operators, samples
from .silent import silent
from .sweep import Results
from .ways import FALLBACK, STRICT
from .workers import Task, sweep

RIGHT = Outcome("add", "float32", passed=3).as_json()
CRASH = Outcome("sub", "float32", crashed=["sample 0: the process died"]).as_json()


def reloaded(path: Path, samples: int | None = None) -> list[dict[str, Any]]:
    results = Results(path, samples)
    results.load()
    return without_stamp(results.outcomes)


def test_a_sweep_on_the_device_goes_both_ways_and_loses_no_sample_when_its_process_dies() -> None:
    names, ways = ("add", "arange", "igamma"), (STRICT, FALLBACK)
    tasks = [Task(name, "float32", way, count=1) for name in names for way in ways]
    outcomes, killed = [], False
    for settled in sweep(tasks, seconds=600, processes=1):
        if isinstance(settled, Outcome):
            outcomes.append(settled)
        elif settled and not killed:
            killed = True
            _kill_children()
    assert killed
    assert [(o.operator, o.way, o.verdict) for o in outcomes] == [
        *(("add", STRICT, "passes"), ("add", FALLBACK, "passes")),
        *(("arange", STRICT, "passes"), ("arange", FALLBACK, "passes")),
        *(("igamma", STRICT, "in torch"), ("igamma", FALLBACK, "passes")),
    ]
    given = [len(samples(operators()[o.operator], torch.float32, 1)) for o in outcomes]
    assert [o.passed + o.empty + o.refused + o.rejected for o in outcomes] == given
    assert not any(o.crashed for o in outcomes)
    assert "aten::igamma.out cannot run on ort" in next(iter(outcomes[4].reasons))


def _kill_children() -> None:
    for child in multiprocessing.active_children():
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)


def saved(path: Path) -> None:
    results = Results(path, None)
    results.add(CRASH)
    results.add(RIGHT)
    results.save()


def without_stamp(outcomes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in o.items() if key not in ("date", "source")} for o in outcomes]


def test_results_are_json_with_a_line_for_each_operator(tmp_path: Path) -> None:
    saved(tmp_path / "results.json")
    text = (tmp_path / "results.json").read_text()
    outcomes = json.loads(text)["outcomes"]
    assert without_stamp(outcomes) == [RIGHT, CRASH]
    assert json.dumps(outcomes[0]) + "," in text.splitlines()


def test_a_resumed_sweep_keeps_what_is_done_and_tries_crashes_again(tmp_path: Path) -> None:
    saved(tmp_path / "results.json")
    assert reloaded(tmp_path / "results.json") == [RIGHT]


def test_results_that_were_cut_off_are_kept_as_far_as_they_go(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    saved(path)
    path.write_text(path.read_text().partition(', "crashed"')[0])
    assert reloaded(path) == [RIGHT]


def test_results_of_another_state_of_the_code_are_swept_again_and_kept_until_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_module, "source", lambda: "before")
    saved(tmp_path / "results.json")
    monkeypatch.setattr(sweep_module, "source", lambda: "after")
    assert reloaded(tmp_path / "results.json") == []
    results = Results(tmp_path / "new.json", None)
    results.load_earlier(tmp_path / "results.json")
    results.add({**RIGHT, "passed": 5})
    assert [(o["operator"], o["source"], o.get("passed")) for o in results.outcomes] == [
        ("sub", "before", None),
        ("add", "after", 5),
    ]


def test_a_sweep_begins_with_what_was_swept_longest_ago(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.json", None)
    results.outcomes = [
        {"operator": "add", "dtype": "float32", "date": "2026-01-02", "source": "before"},
        {"operator": "neg", "dtype": "float32", "date": "2026-01-01", "source": "before"},
    ]
    given = sweep_module._arguments(["--only", "add", "neg", "sub"])
    assert [task.operator for task in sweep_module._tasks(given, None, results)] == ["sub", "neg", "add"]


def test_results_of_another_kind_of_sweep_are_not_mixed_in(tmp_path: Path) -> None:
    saved(tmp_path / "results.json")
    assert reloaded(tmp_path / "results.json", samples=3) == []


def test_results_of_another_executor_are_not_mixed_in(tmp_path: Path) -> None:
    saved(tmp_path / "results.json")
    results = Results(tmp_path / "results.json", None, executor="python")
    results.load()
    assert results.outcomes == []


def test_a_sample_that_takes_too_much_processor_time_is_named_and_the_others_go_on() -> None:
    tasks = [Task("neg", "float32"), Task("add", "float32")]
    outcomes = [o for o in sweep(tasks, 0.0, 1, silent) if isinstance(o, Outcome)]
    assert [(o.operator, o.crashed) for o in outcomes] == [
        ("neg", ["sample 0: no answer within 0 seconds of processor time"]),
        ("add", ["sample 0: no answer within 0 seconds of processor time"]),
    ]
