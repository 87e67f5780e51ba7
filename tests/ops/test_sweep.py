"""What a sweep survives."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from pathlib import Path

import torch

from .check import Outcome
from .database import operators, samples
from .silent import silent
from .sweep import Results
from .ways import FALLBACK, STRICT
from .workers import Task, sweep

RIGHT = Outcome("add", "float32", passed=3).as_json()
CRASH = Outcome("sub", "float32", crashed=["sample 0: the process died"]).as_json()


def reloaded(path: Path, samples: int | None = None) -> list[object]:
    results = Results(path, samples)
    results.load()
    return list(results.outcomes)


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
    results.outcomes = [CRASH, RIGHT]
    results.save()


def test_results_are_json_with_a_line_for_each_operator(tmp_path: Path) -> None:
    saved(tmp_path / "results.json")
    text = (tmp_path / "results.json").read_text()
    assert json.loads(text)["outcomes"] == [RIGHT, CRASH]
    assert json.dumps(RIGHT) + "," in text.splitlines()


def test_a_resumed_sweep_keeps_what_is_done_and_tries_crashes_again(tmp_path: Path) -> None:
    saved(tmp_path / "results.json")
    assert reloaded(tmp_path / "results.json") == [RIGHT]


def test_results_that_were_cut_off_are_kept_as_far_as_they_go(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    saved(path)
    path.write_text(path.read_text().partition(', "crashed"')[0])
    assert reloaded(path) == [RIGHT]


def test_results_of_another_kind_of_sweep_are_not_mixed_in(tmp_path: Path) -> None:
    saved(tmp_path / "results.json")
    assert reloaded(tmp_path / "results.json", samples=3) == []


def test_results_of_another_executor_are_not_mixed_in(tmp_path: Path) -> None:
    saved(tmp_path / "results.json")
    results = Results(tmp_path / "results.json", None, executor="python")
    results.load()
    assert results.outcomes == []


def test_a_sample_that_takes_too_long_is_named_and_the_others_go_on() -> None:
    tasks = [Task("neg", "float32"), Task("add", "float32")]
    outcomes = [o for o in sweep(tasks, 0.0, 1, silent) if isinstance(o, Outcome)]
    assert [(o.operator, o.crashed) for o in outcomes] == [
        ("neg", ["sample 0: no answer within 0 seconds"]),
        ("add", ["sample 0: no answer within 0 seconds"]),
    ]
