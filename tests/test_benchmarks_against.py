"""Two builds compared: by workers that make times up, and in repositories made for the test."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
from benchmarks import against, turns
from benchmarks.against import SUITES, Compared, Settings, compare, conclusion, parsed, parser, source_of, table
from benchmarks.tables import Progress
from benchmarks.turns import Measured, Suite, environment

EARLIER = Path("earlier")
SUITE = Suite("made-up", "", ("model",), ("sardonyx",), ours=("sardonyx",))
SETTINGS = Settings(pairs=6, most=24, rounds=3)


@dataclass
class Machine:
    """What the made-up processes measure: `slowdown` times as much now, with noise between processes and rounds."""

    slowdown: float = 1.0
    noise: float = 0.0
    drift: float = 0.0
    fails: str | None = None
    numbers: random.Random = field(default_factory=lambda: random.Random(0))
    started: list[str] = field(default_factory=list)
    turns: list[str] = field(default_factory=list)

    def worker(self, *given: Any) -> Worker:
        return Worker(self, *given)


class Worker:
    """Stands in for a process that runs a model."""

    def __init__(
        self, machine: Machine, suite: Suite, model: str, engines: Sequence[str], timeout: float, source: Path | None
    ) -> None:
        self.build = "now" if source is None else "earlier"
        self.measured = [Measured(model, engine) for engine in engines]
        self._machine = machine
        self._seconds = math.exp(machine.numbers.gauss(0, machine.noise))
        self._seconds *= machine.slowdown if source is None else 1.0

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def prepare(self) -> None:
        self._machine.started.append(self.build)
        self.measured[0].failed = "it is\nbroken" if self._machine.fails == self.build else None

    def round(self, number: int) -> None:
        self._machine.turns.append(self.build)
        slowed = 1 + self._machine.drift * number
        self.measured[0].round_seconds.append(self._seconds * slowed * (1 + 0.001 * self._machine.numbers.random()))


@pytest.fixture
def comparing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Machine], Compared]:
    def made_up(machine: Machine) -> Compared:
        monkeypatch.setattr(against, "Worker", machine.worker)
        compared = Compared(SUITE, "model", "sardonyx")
        compare(compared, EARLIER, SETTINGS, Progress(0))
        return compared

    return made_up


Comparing = Callable[[Machine], Compared]


def test_of_equal_builds_none_is_reported_as_slower(comparing: Comparing) -> None:
    """Even where two processes of a build differ by a tenth, as often as not."""
    for noise in (0.01, 0.03, 0.1):
        machine = Machine(noise=noise)
        assert "slower" not in {comparing(machine).verdict for _ in range(100)}


def test_where_processes_differ_little_equal_builds_are_told_so_after_the_first_pairs(comparing: Comparing) -> None:
    compared = comparing(Machine(noise=0.005))
    assert compared.verdict == "not slower"
    assert len(compared.pairs) == SETTINGS.pairs


def test_a_slower_build_is_reported_after_the_most_pairs(comparing: Comparing) -> None:
    compared = comparing(Machine(slowdown=1.1, noise=0.03))
    assert compared.verdict == "slower"
    assert len(compared.pairs) == SETTINGS.most
    assert compared.ratio.low < 1 / 1.1 < compared.ratio.high


def test_three_percent_more_time_is_not_reported_and_less_time_neither(comparing: Comparing) -> None:
    assert comparing(Machine(slowdown=1.029)).verdict == "not slower"
    assert comparing(Machine(slowdown=1.032)).verdict == "slower"
    assert comparing(Machine(slowdown=0.5)).verdict == "not slower"


def test_what_noise_hides_is_undecided(comparing: Comparing) -> None:
    compared = comparing(Machine(slowdown=1.03, noise=0.05))
    assert compared.verdict == "undecided"
    assert len(compared.pairs) == SETTINGS.most


def test_what_slows_both_builds_for_a_while_does_not_count(comparing: Comparing) -> None:
    compared = comparing(Machine(drift=2.0))
    assert compared.ratio.middle == pytest.approx(1, abs=1e-3)


def test_the_builds_take_turns_and_each_begins_as_often(comparing: Comparing) -> None:
    machine = Machine()
    comparing(machine)
    assert machine.started == ["earlier", "now", "now", "earlier"] * (SETTINGS.pairs // 2)
    one, other = ["earlier", "now"], ["now", "earlier"]
    assert machine.turns == [*one, *other, *one, *other, *one, *other] * (SETTINGS.pairs // 2)


@pytest.mark.parametrize(("build", "told"), [("now", "failed now"), ("earlier", "failed in the earlier revision")])
def test_a_build_that_fails_is_named_and_not_measured_again(comparing: Comparing, build: str, told: str) -> None:
    compared = comparing(Machine(fails=build))
    assert compared.verdict == "failed"
    assert compared.failed == f"{told}: it is broken"
    assert len(compared.pairs) == 1
    assert "failed" in table([compared]).plain()


def test_what_is_shown_says_how_much_slower_and_what_could_not_be_told(comparing: Comparing) -> None:
    slow, fine = comparing(Machine(slowdown=1.25)), comparing(Machine())
    noisy, broken = comparing(Machine(slowdown=1.03, noise=0.05)), comparing(Machine(fails="now"))
    assert list(conclusion([slow, fine, noisy, broken], "v1")) == [
        "slower: made-up, model, sardonyx: 25.0%",
        "undecided: made-up, model, sardonyx: its times differ too much between processes",
        "made-up, model, sardonyx: failed now: it is broken",
        "against v1, by more than 3%: 1 slower, 1 not slower, 1 undecided, 1 failed",
    ]
    row = next(line for line in table([slow]).plain().splitlines() if line.startswith("made-up"))
    assert row.split()[-6:] == ["0.800", "0.800", "to", "0.800", "24", "slower"]


def test_everything_measured_can_be_written_as_json(comparing: Comparing) -> None:
    found = json.loads(json.dumps(comparing(Machine(slowdown=2.0)).as_dict()))
    assert found["verdict"] == "slower"
    assert found["ratio"]["middle"] == pytest.approx(0.5, abs=1e-3)
    assert len(found["pairs"][0]["earlier"]["round_seconds"]) == SETTINGS.rounds


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """The program, with made-up workers and revisions."""

    def run(machine: Machine, *words: str) -> int:
        monkeypatch.setattr(against, "Worker", machine.worker)
        monkeypatch.setattr(against, "source_of", lambda revision: EARLIER)
        monkeypatch.setattr(against, "check_sources", lambda earlier: None)
        monkeypatch.setattr(against, "note_if_busy", lambda: None)
        monkeypatch.setattr(sys, "argv", ["against", "v1", "--json", str(tmp_path / "found.json"), *words])
        return against.main()

    return run


def test_the_program_fails_if_a_model_is_slower_or_fails_now(program: Callable[..., int]) -> None:
    words = ("--suites", "inference", "--only", "llama")
    assert program(Machine(), *words) == 0
    assert program(Machine(slowdown=2.0), *words) == 1
    assert program(Machine(fails="now"), *words) == 1
    assert program(Machine(fails="earlier"), *words) == 0


def test_the_program_measures_the_models_of_the_suites_named(program: Callable[..., int], tmp_path: Path) -> None:
    program(Machine(), "--suites", "eager,export", "--only", "resnet")
    program(Machine(), "--suites", "eager,export", "--only", "relu")
    found = json.loads((tmp_path / "found.json").read_text())
    measured = [(one["suite"], one["model"], one["engine"]) for one in found["results"]]
    assert measured == [("eager", "relu 64×64", "native"), ("eager", "relu 64×64", "python")]
    program(Machine(), "--only", "inference, mlp")
    assert [one["model"] for one in json.loads((tmp_path / "found.json").read_text())["results"]] == ["mlp"]
    with pytest.raises(SystemExit, match="nothing that is measured has 'relu' in its name"):
        program(Machine(), "--suites", "export", "--only", "relu")


@pytest.mark.parametrize(
    "words", [["--suites", "nothing"], ["--pairs", "5"], ["--pairs", "12", "--most", "6"], ["--rounds", "0"]]
)
def test_what_cannot_be_measured_is_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(parser(), ["HEAD", *words])


@pytest.mark.parametrize("name", SUITES)
def test_every_suite_says_what_is_sardonyx_and_how_to_prepare_it(name: str) -> None:
    module = import_module(f"benchmarks.{name}")
    assert module.SUITE.name == name
    assert module.SUITE.ours
    assert set(module.SUITE.ours) <= set(module.SUITE.engines)
    assert callable(module.prepare)


# the package of a revision


def git(root: Path, *words: str) -> str:
    identity = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.org"]
    return output(["git", "-C", str(root), *identity, *words])


def output(words: list[str], source: Path | None = None) -> str:
    return subprocess.run(words, env=environment(source), check=True, capture_output=True, text=True).stdout.strip()


def commit(root: Path, marker: str) -> str:
    """A commit of a package that says which it is."""
    (root / "src" / "sardonyx").mkdir(parents=True, exist_ok=True)
    (root / "src" / "sardonyx" / "__init__.py").write_text(f"MARKER = {marker!r}\n")
    git(root, "add", "src")
    git(root, "commit", "--quiet", "--message", marker)
    return git(root, "rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("GIT_DIR", "GIT_INDEX_FILE", "GIT_WORK_TREE"):  # set in hooks, for the repository that has them
        monkeypatch.delenv(name, raising=False)
    git(tmp_path, "init", "--quiet")
    commit(tmp_path, "first")
    commit(tmp_path, "second")
    (tmp_path / "src" / "sardonyx" / "__init__.py").write_text("MARKER = 'not committed'\n")
    return tmp_path


@pytest.mark.parametrize(("revision", "marker"), [("HEAD~1", "first"), ("HEAD", "second")])
def test_a_process_imports_the_package_of_the_revision(repository: Path, revision: str, marker: str) -> None:
    code = "import sardonyx; print(sardonyx.MARKER)"
    assert output([sys.executable, "-c", code], source_of(revision, repository)) == marker
    assert "not committed" in (repository / "src" / "sardonyx" / "__init__.py").read_text()


def test_names_of_one_commit_share_a_folder(repository: Path) -> None:
    first = source_of("HEAD", repository)
    git(repository, "tag", "v1")
    assert source_of("v1", repository) == first
    assert list(first.parent.iterdir()) == [first]


def test_an_unknown_revision_is_refused_with_what_git_says(repository: Path) -> None:
    with pytest.raises(SystemExit, match=r"git rev-parse .*nonsense"):
        source_of("nonsense", repository)


def test_a_build_is_not_compared_with_itself(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where what is installed comes before the folder of the revision."""
    earlier = source_of("HEAD~1", repository)
    monkeypatch.setattr(against, "ROOT", repository)
    monkeypatch.setenv("PYTHONPATH", str(repository / "src"))
    against.check_sources(earlier)
    monkeypatch.setattr(against, "environment", lambda source: {**os.environ})
    with pytest.raises(SystemExit, match="imports"):
        against.check_sources(earlier)


def test_the_present_benchmarks_find_what_an_earlier_revision_had_elsewhere(tmp_path: Path) -> None:
    folder = tmp_path / "sardonyx" / "diagnose"
    folder.mkdir(parents=True)
    (tmp_path / "sardonyx" / "__init__.py").touch()
    (folder / "report.py").write_text("collecting = 'a report'")
    (folder / "verify.py").write_text("difference = 'a number'")
    code = "from benchmarks.internals import collecting, difference; print(collecting, difference)"
    assert output([sys.executable, "-c", code], tmp_path) == "a report a number"


def test_a_worker_has_the_package_of_its_source_and_empty_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device's core would be compiled in each process: its suite has the caches that there are."""
    python = tmp_path / "python"
    python.write_text("""#!/bin/sh\necho "{\\"error\\": \\"$PYTHONPATH $SARDONYX_CACHE_DIR\\"}"\n""")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("PYTHONPATH", "installed")
    monkeypatch.setenv("SARDONYX_CACHE_DIR", "mine")
    assert told_by_worker(SUITE, Path("earlier")).startswith(f"earlier{os.pathsep}installed /")
    assert told_by_worker(SUITE, None).startswith("installed /")
    assert told_by_worker(replace(SUITE, cold=False), None) == "installed mine"


def told_by_worker(suite: Suite, source: Path | None) -> str:
    with turns.Worker(suite, "model", ["sardonyx"], 60, source) as worker:
        worker.prepare()
    return str(worker.measured[0].failed)
