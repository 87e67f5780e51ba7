"""What an engine compiled is found by other processes, for the same model, weights, options and engine only."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from sardonyx.cache import machine
from sardonyx.engines import Availability, Engine, Job, Runner, artifacts
from sardonyx.errors import EngineError
from sardonyx.options import Options

from .processes import Arrivals, children, exit_codes


class Scaling(Runner):
    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    def __call__(self, inputs: Sequence[torch.Tensor | int]) -> list[torch.Tensor]:
        return [self._weight * inputs[0]]


class Compiler(Engine):
    """Its artifact is the model's only weight; each compilation leaves a mark."""

    name = "compiler"

    def __init__(self, marks: Path, identity: str | None = "1.0") -> None:
        self._marks, self._identity = marks, identity
        self.refusals = 0
        """How many loads to refuse."""
        self.arrivals: Arrivals | None = None
        """Processes to wait for while compiling."""

    def probe(self) -> Availability:
        return Availability(self.name, "1.0")

    def identity(self, options: Options) -> str | None:
        return self._identity

    def compile(self, job: Job, folder: Path) -> None:
        with self._marks.open("a") as file:
            file.write("compiled\n")
        if self.arrivals is not None:
            self.arrivals.wait()
        (folder / "weight").write_text(str(job.weights["w"].item()))

    def load(self, job: Job, artifact: Path | None) -> Runner:
        if self.refusals:
            self.refusals -= 1
            raise EngineError("refused")
        return Scaling(torch.tensor(float((artifact / "weight").read_text())) if artifact else job.weights["w"])

    @property
    def compilations(self) -> int:
        return len(self._marks.read_text().splitlines()) if self._marks.exists() else 0


@pytest.fixture
def engine(tmp_path: Path) -> Compiler:
    return Compiler(tmp_path / "marks")


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(
        model=b"a * w",
        weights={"w": torch.tensor(2.0)},
        inputs=("a",),
        outputs=("b",),
        output_types=(torch.float32,),
        output_shapes=((),),
        fixed=frozenset(),
        device=torch.device("cpu"),
        options=Options(cache_dir=str(tmp_path / "cache")),
    )


def result(engine: Engine, job: Job) -> float:
    return float(artifacts.load(engine, job)([torch.tensor(10.0)])[0])


def test_a_model_is_compiled_once(engine: Compiler, job: Job) -> None:
    assert [result(engine, job), result(engine, job)] == [20.0, 20.0]
    assert engine.compilations == 1


def test_another_weight_is_another_artifact(engine: Compiler, job: Job) -> None:
    assert result(engine, job) == 20.0
    assert result(engine, dataclasses.replace(job, weights={"w": torch.tensor(3.0)})) == 30.0


def test_a_weight_edited_in_place_is_another_artifact(engine: Compiler, job: Job) -> None:
    assert result(engine, job) == 20.0
    job.weights["w"].data.fill_(3.0)
    assert result(engine, job) == 30.0


@pytest.mark.parametrize(
    "change",
    [
        {"model": b"a + w"},
        {"fixed": frozenset({0})},
        {"device": torch.device("cuda", 0)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_decides_is_in_the_key(engine: Compiler, job: Job, change: dict[str, object]) -> None:
    result(engine, job)
    result(engine, dataclasses.replace(job, **change))
    assert engine.compilations == 2


@pytest.mark.parametrize("change", [{"compile_options": "-O3"}, {"engine_options": {"flags": ["-x"]}}])
def test_options_of_the_compiler_are_in_the_key(engine: Compiler, job: Job, change: dict[str, object]) -> None:
    result(engine, job)
    result(engine, dataclasses.replace(job, options=Options.of(job.options, **change)))
    assert engine.compilations == 2


def test_options_that_change_no_artifact_are_not_in_the_key(engine: Compiler, job: Job) -> None:
    result(engine, job)
    result(engine, dataclasses.replace(job, options=Options.of(job.options, fallback="error", cache_size=7)))
    assert engine.compilations == 1


def test_another_version_of_the_engine_compiles_anew(tmp_path: Path, job: Job) -> None:
    for identity in ("1.0", "1.1", "1.0"):
        result(Compiler(tmp_path / "marks", identity), job)
    assert Compiler(tmp_path / "marks").compilations == 2


@pytest.mark.parametrize("what", ["cpu", "versions", "own_code"])
def test_another_processor_or_package_compiles_anew(
    engine: Compiler, job: Job, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    result(engine, job)
    monkeypatch.setattr(machine, what, lambda: {"torch": "another"})
    result(engine, job)
    assert engine.compilations == 2


def test_an_engine_that_writes_nothing_needs_no_digest(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashlib, "sha256", None)
    engine = Compiler(tmp_path / "marks", identity=None)
    assert result(engine, job) == 20.0
    assert engine.compilations == 0
    assert not (tmp_path / "cache").exists()


def test_without_a_cache_each_load_compiles(engine: Compiler, job: Job, tmp_path: Path) -> None:
    job = dataclasses.replace(job, options=Options(cache_dir=""))
    assert [result(engine, job), result(engine, job)] == [20.0, 20.0]
    assert engine.compilations == 2


def test_an_artifact_that_does_not_load_is_made_once_more(
    engine: Compiler, job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    result(engine, job)
    engine.refusals = 1
    with caplog.at_level(logging.WARNING, "sardonyx.cache"):
        assert result(engine, job) == 20.0
    assert engine.compilations == 2
    assert [message for message in caplog.messages if "compiling again: refused" in message] == caplog.messages
    assert result(engine, job) == 20.0
    assert engine.compilations == 2


def test_an_artifact_that_never_loads_is_the_users_error(engine: Compiler, job: Job) -> None:
    result(engine, job)
    engine.refusals = 2
    with pytest.raises(EngineError, match="refused"):
        artifacts.load(engine, job)
    assert engine.compilations == 2


def test_an_artifact_that_does_not_load_right_away_is_not_kept(engine: Compiler, job: Job) -> None:
    engine.refusals = 1
    with pytest.raises(EngineError, match="refused"):
        artifacts.load(engine, job)
    assert engine.compilations == 1
    assert result(engine, job) == 20.0
    assert engine.compilations == 2


def test_of_eight_processes_one_compiles(engine: Compiler, job: Job) -> None:
    engine.arrivals = arrivals = Arrivals(8)

    def work(index: int) -> None:
        arrivals.arrive()
        assert result(engine, job) == 20.0

    assert exit_codes(children(8, work)) == [0] * 8
    assert engine.compilations == 1


def test_a_changed_source_file_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").mkdir()
    source = tmp_path / "a.py"
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "cache" / "machine.py"))
    seen = set()
    for text in ("x = 1", "x = 2", "x = 1"):
        source.write_text(text)
        seen.add(machine.own_code.__wrapped__())
    assert len(seen) == 2


def test_the_processor_is_told_by_what_it_can_do() -> None:
    assert machine.cpu() == machine.cpu.__wrapped__()
    assert len(machine.cpu().split()) == 2
