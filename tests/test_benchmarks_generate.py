"""The benchmark of generating: what it tells of engines, in which Python each runs, and what its processes answer."""

from __future__ import annotations

import argparse
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks import generate, generate_turns, generate_worker
from benchmarks.generate import parser, places_of, table
from benchmarks.generate_engines import ENGINES, ON_REQUEST, USUAL, Engine, Generated
from benchmarks.generate_models import MODELS, is_encoder_decoder, prompt
from benchmarks.generate_models import USUAL as USUAL_MODELS
from benchmarks.generate_turns import Case, Contender, Measured, Places, compare_with_eager
from benchmarks.processes import Answers

CASE = Case("tiny", 16, 2, 3)


def measured(engine: str, rate: float, **more: Any) -> Measured:
    times = {"cold_seconds": 2.0, "prefill_seconds": [0.01], "decode_rates": [rate, rate, 9e9], "peak_mb": 812.3}
    return Measured(CASE, engine, **{**times, **more})


def rows(*results: Measured) -> dict[str, list[str]]:
    """What the table has of each engine, by name."""
    start = f"{CASE}  "
    lines = [line.removeprefix(start) for line in table(results).plain().splitlines() if line.startswith(start)]
    return {line.split()[0]: line.split()[1:] for line in lines}


def test_a_row_has_medians_the_ratio_to_eager_the_start_and_the_memory() -> None:
    found = rows(measured("eager", 20.0), measured("sardonyx", 50.0, cached_seconds=0.5, same_as_eager=3))
    assert found["eager"] == ["20.0", "1.00", "10.0", "2.00", "812"]
    assert found["sardonyx"] == ["50.0", "2.50", "10.0", "2.00", "0.50", "812", "3", "of", "3"]


def test_an_engine_that_fails_is_a_row_that_says_so_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    failed = Measured(CASE, "genai", failed="NotImplementedError: the model is not supported")
    assert rows(measured("eager", 20.0), failed)["genai"] == ["failed"]
    generate.show([failed])
    assert "failed: genai on tiny 16×2: NotImplementedError" in capsys.readouterr().out


def test_tokens_are_compared_with_eagers_up_to_the_first_that_differs_in_any_row() -> None:
    eager = measured("eager", 1.0, tokens=[[1, 2, 3], [4, 5, 6]])
    ours = measured("sardonyx", 1.0, tokens=[[1, 2, 3], [4, 7, 6]])
    other = Measured(Case("tiny", 99, 2, 3), "sardonyx", tokens=[[1, 2, 3]])
    compare_with_eager([eager, ours, other])
    assert [m.same_as_eager for m in (eager, ours, other)] == [3, 1, None]


def test_json_has_the_case_and_the_medians() -> None:
    told = measured("eager", 20.0, tokens=[[1, 2, 3]]).as_dict()
    assert {
        "model": "tiny",
        "prompt": 16,
        "batch": 2,
        "tokens": 3,
        "decode": 20.0,
        "prefill": 0.01,
    }.items() <= told.items()
    assert json.loads(json.dumps(told)) == told


def test_names_and_numbers_are_chosen_on_the_command_line() -> None:
    given = parser().parse_args(["--models", "tiny,t5", "--engines", "eager", "--prompts", "8,16", "--batches", "3"])
    assert (given.models, given.engines, given.prompts, given.batches) == (["tiny", "t5"], ["eager"], [8, 16], [3])
    with pytest.raises(SystemExit):
        parser().parse_args(["--models", "bert"])


def test_models_and_engines_measured_without_a_request_are_known() -> None:
    assert set(USUAL_MODELS) <= set(MODELS)
    assert {*USUAL, *ON_REQUEST} == set(ENGINES)
    assert {engine.peer for engine in ENGINES.values()} == {"", "optimum", "genai"}


def test_a_peer_runs_in_the_python_that_has_its_packages(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.touch()
    given = argparse.Namespace(folder=tmp_path, timeout=9.0, optimum=tmp_path / "absent", genai=python)
    places = places_of(given)
    assert places.python("genai-int4") == str(python)
    assert {places.python(name) for name in ("optimum", "eager", "sardonyx")} == {sys.executable}


# Processes


def places(tmp_path: Path, script: str, timeout: float = 60.0) -> Places:
    """Where every engine's Python is a script of the shell."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    return Places(tmp_path, lambda engine: str(python), timeout)


_ANSWERS = """
echo '{"load": 1.0, "seconds": [0.5, 0.7, 0.9], "tokens": [[1, 2, 3]], "peak_mb": 100.0}'
while read what; do case $what in
round) echo '{"seconds": [0.25, 0.5, 0.75], "tokens": [[1, 2, 3]]}';;
*) echo '{"peak_mb": 120.0, "details": {"builds": []}, "versions": {}}';;
esac; done
"""


def test_a_contender_measures_start_rounds_memory_and_a_second_process(tmp_path: Path) -> None:
    with Contender(places(tmp_path, _ANSWERS), CASE, "sardonyx") as contender:
        contender.prepare()
        contender.round()
        contender.finish()
    m = contender.measured
    assert m.failed is None
    assert (m.load_seconds, m.cold_seconds, m.first_generation_seconds, m.tokens) == (1.0, 1.5, 0.9, [[1, 2, 3]])
    assert (m.prefill, m.decode) == (0.25, 2 * 2 / 0.5)
    assert (m.peak_mb, m.cached_seconds, m.cached_peak_mb) == (120.0, 1.5, 100.0)


def test_only_engines_with_a_disk_cache_have_a_second_process(tmp_path: Path) -> None:
    with Contender(places(tmp_path, _ANSWERS), CASE, "eager") as contender:
        contender.prepare()
        contender.finish()
    assert (contender.measured.peak_mb, contender.measured.cached_seconds) == (120.0, None)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("""echo '{"error": "ValueError: no such model"}'""", "ValueError: no such model"),
        ("echo out of memory >&2; exit 3", "the process ended with 3"),
    ],
)
def test_a_process_that_fails_is_told_and_asked_nothing_more(tmp_path: Path, script: str, said: str) -> None:
    with Contender(places(tmp_path, script), CASE, "eager") as contender:
        contender.prepare()
        contender.round()
        contender.finish()
    assert said in str(contender.measured.failed)
    assert contender.measured.decode is None


def test_an_export_that_fails_is_told_with_its_last_line(tmp_path: Path) -> None:
    with Contender(places(tmp_path, "echo one >&2; echo cannot import genai >&2; exit 1"), CASE, "genai") as contender:
        contender.prepare()
    assert contender.measured.failed == "the export failed: cannot import genai"


def test_an_export_is_written_once(tmp_path: Path) -> None:
    folder = tmp_path / "tiny-genai"
    folder.mkdir()
    where = places(tmp_path, """echo '{"seconds": 4.5}'""")
    assert generate_turns.export(where, "tiny", "genai") == 4.5
    assert generate_turns.export(places(tmp_path, "exit 1"), "tiny", "genai") == 4.5
    assert generate_turns.export(where, "tiny", "sardonyx") is None


class _Counting:
    def generate(self, prompt: Any, tokens: int) -> Generated:
        return Generated([[int(row[0])] * tokens for row in prompt], [0.1 * (i + 1) for i in range(tokens)])

    def details(self) -> dict[str, Any]:
        return {"builds": 3}


def test_a_worker_generates_once_unasked_and_then_each_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 50}')
    answers = io.StringIO()
    monkeypatch.setattr(generate_worker, "ENGINES", {"mine": Engine(lambda folder, exported: _Counting())})
    monkeypatch.setattr(Answers, "on_stdout", lambda: Answers(answers))
    monkeypatch.setattr(sys, "stdin", io.StringIO("round\nend\n"))
    generate_worker.main("mine", str(tmp_path), "", "5", "2", "3")
    first, again, end = map(json.loads, answers.getvalue().splitlines())
    words = prompt(tmp_path, 5, 2)[:, 0].tolist()
    assert first["tokens"] == again["tokens"] == [[word] * 3 for word in words]
    assert (first["load"] >= 0, end["details"], end["peak_mb"] > 0) == (True, {"builds": 3}, True)


def test_a_prompt_is_the_same_each_time_and_has_no_special_token(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 5, "is_encoder_decoder": true}')
    ids = prompt(tmp_path, 200, 2)
    assert (ids.shape, ids.min(), ids.max()) == ((2, 200), 3, 4)
    assert (ids == prompt(tmp_path, 200, 2)).all()
    assert is_encoder_decoder(tmp_path)
