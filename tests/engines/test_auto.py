"""`auto`: the fastest engine that is right, measured once."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sardonyx
from sardonyx.engines import Availability, Engine, Job, Runner, auto, registry
from sardonyx.engines.auto import Auto, _Contest
from sardonyx.errors import EngineError, OptionError
from sardonyx.telemetry.report import Choice, collecting
from tests.clock import Clock

X = torch.linspace(-1, 1, 12).reshape(3, 4)


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SARDONYX_CACHE_DIR", str(tmp_path / "cache"))


Contender = Callable[..., Callable[[], tuple[str, Any]]]


@pytest.fixture
def contender(clock: Clock) -> Contender:
    """Makes a candidate by its name, the seconds that a call takes and its result."""

    def prepare(name: str, seconds: float = 0.01, result: float = 1.0) -> Callable[[], tuple[str, Any]]:
        def call() -> list[torch.Tensor]:
            clock.sleep(seconds)
            return [torch.tensor([result])]

        return lambda: (name, call)

    return prepare


def failing() -> Any:
    raise EngineError("it has no such operator")


def decided(expected: Any = None, **contenders: Any) -> tuple[Choice, str]:
    choice, winner = _Contest(contenders, expected, 1.0, auto._agree).decide()
    assert winner == choice.engine
    return choice, winner


def test_the_fastest_wins(contender: Contender) -> None:
    choice, _ = decided(slow=contender("slow", 0.02), fast=contender("fast", 0.001))
    assert choice.engine == "fast"
    assert choice.seconds == pytest.approx({"fast": 0.001, "slow": 0.02})
    assert list(choice.seconds) == ["fast", "slow"]


def test_a_tie_goes_to_the_first() -> None:
    times = {"first": 1.005, "second": 1.0}
    contest = _Contest({}, None, 1.0, auto._agree)
    contest._ready, contest._times = dict.fromkeys(times, ("", None)), times  # type: ignore[assignment]
    assert contest._winner() == "first"
    times["first"] = 1.02
    assert contest._winner() == "second"


def test_one_that_fails_is_passed_over_and_named(contender: Contender) -> None:
    choice, winner = decided(broken=failing, works=contender("works"))
    assert winner == "works"
    assert choice.discarded == {"broken": "it has no such operator"}


def test_one_whose_results_differ_is_discarded_with_a_warning(
    contender: Contender, caplog: pytest.LogCaptureFixture
) -> None:
    choice, winner = decided(right=contender("right"), wrong=contender("wrong", 0.001, result=2.0))
    assert winner == "right"
    assert choice.discarded == {"wrong": "its results differ"}
    assert "wrong is not chosen" in caplog.text


def test_torchs_results_decide_where_they_are_known(contender: Contender) -> None:
    choice, winner = decided(
        lambda: [torch.tensor([2.0])], first=contender("first", 0.001), second=contender("second", result=2.0)
    )
    assert winner == "second"
    assert choice.discarded == {"first": "its results differ"}


def test_where_all_differ_from_torch_the_first_is_used(contender: Contender, caplog: pytest.LogCaptureFixture) -> None:
    _, winner = decided(lambda: [torch.tensor([7.0])], first=contender("first"), second=contender("second", 0.001))
    assert winner == "first"
    assert "the results of all engines differ from torch's" in caplog.text


def test_where_none_works_the_error_names_all_reasons() -> None:
    with pytest.raises(EngineError, match=r"a: it has no such operator; b: it has no such operator"):
        decided(a=failing, b=failing)


def test_time_is_bounded(contender: Contender, clock: Clock) -> None:
    def slow_to_prepare() -> Any:
        clock.sleep(5.0)
        return contender("first")()

    contest = _Contest({"first": slow_to_prepare, "second": failing}, None, 1.0, auto._agree)
    choice, _ = contest.decide()
    assert choice.discarded == {"second": "time limit reached before it was tried"}
    assert not contest.complete


class Counting(Engine):
    """A stand-in that computes twice its input, some milliseconds long by a made-up clock, and counts its uses."""

    def __init__(self, name: str, seconds: float, clock: Clock) -> None:
        self.name, self.seconds, self.clock = name, seconds, clock
        self.loaded = self.closed = 0

    def probe(self) -> Availability:
        return Availability(self.name, "1")

    def load(self, job: Job, artifact: Path | None) -> Runner:
        self.loaded += 1
        return CountingRunner(self)


class CountingRunner(Runner):
    def __init__(self, engine: Counting) -> None:
        self.engine = engine

    def __call__(self, inputs: Sequence[torch.Tensor | int]) -> list[torch.Tensor]:
        self.engine.clock.sleep(self.engine.seconds)
        return [torch.as_tensor(inputs[0]) * 2]

    def close(self) -> None:
        self.engine.closed += 1


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> dict[str, Counting]:
    made = {name: Counting(name, seconds, clock) for name, seconds in (("tortoise", 0.01), ("hare", 0.001))}
    find = registry.find
    monkeypatch.setattr(auto, "find", lambda name: made.get(name) or find(name))
    return made


CHOICE = {"engines": ["tortoise", "hare"], "seconds": 1}


def doubled(**more: Any) -> sardonyx.Program:
    return sardonyx.export(lambda x: x * 2, (X,), engine="auto", engine_options={**CHOICE, **more})


class TestExported:
    def test_the_fastest_runs_and_the_others_are_closed(self, stand_ins: dict[str, Counting]) -> None:
        run = doubled()
        for _ in range(3):
            assert torch.equal(run(X), X * 2)
        assert [(e.loaded, e.closed) for e in stand_ins.values()] == [(1, 1), (1, 0)]

    def test_a_choice_is_remembered_on_disk(self, stand_ins: dict[str, Counting], tmp_path: Path) -> None:
        doubled()(X)
        doubled()(X)
        assert [engine.loaded for engine in stand_ins.values()] == [1, 2]
        (path,) = (tmp_path / "cache").rglob("choice.json")
        assert json.loads(path.read_text())["engine"] == "hare"

    def test_other_sizes_are_measured_anew(self, stand_ins: dict[str, Counting]) -> None:
        for x in (X, X[:2]):
            sardonyx.export(lambda x: x * 2, (x,), engine="auto", engine_options=CHOICE)(x)
        assert [engine.loaded for engine in stand_ins.values()] == [2, 2]

    def test_a_damaged_memory_is_measured_anew(self, stand_ins: dict[str, Counting], tmp_path: Path) -> None:
        doubled()(X)
        (path,) = (tmp_path / "cache").rglob("choice.json")
        path.chmod(0o600)
        path.write_text("{}")
        assert torch.equal(doubled()(X), X * 2)
        assert [engine.loaded for engine in stand_ins.values()] == [2, 2]

    def test_a_remembered_engine_that_fails_is_replaced(
        self, stand_ins: dict[str, Counting], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        doubled()(X)
        monkeypatch.setattr(stand_ins["hare"], "load", lambda *_: failing())
        assert torch.equal(doubled()(X), X * 2)
        assert "the cached choice, fails now" in caplog.text


def test_an_unknown_engine_among_the_candidates_is_an_error() -> None:
    with pytest.raises(OptionError, match="did you mean 'openvino'"):
        Auto().candidates(sardonyx.Options(engine_options={"engines": ["openvno"]}))


def test_an_unknown_setting_is_an_error() -> None:
    with pytest.raises(OptionError, match="second"):
        Auto().candidates(sardonyx.Options(engine_options={"second": 3}))


def test_a_candidate_has_the_options_under_its_name() -> None:
    options = sardonyx.Options(engine="auto", engine_options={"seconds": 3, "openvino": {"NUM_STREAMS": 2}})
    mine = Auto().options_for(registry.find("openvino"), options)
    assert (mine.engine, mine.engine_options) == ("openvino", {"NUM_STREAMS": 2})


class TestCompiled:
    """Behind torch.compile each candidate has a model of its own: other operators, another opset."""

    @pytest.fixture(autouse=True)
    def two_engines(self) -> None:
        if not registry.find("openvino").probe().installed:
            pytest.skip('pip install "sardonyx[openvino]"')

    def compiled(self, function: Any, **options: Any) -> Any:
        chosen = {"engine": "auto", "engine_options": {"engines": ["onnxruntime", "openvino"], "seconds": 600}}
        return torch.compile(function, backend="sardonyx", options={**chosen, "fallback": "error", **options})

    def test_the_choice_is_in_the_report(self) -> None:
        model = nn.Sequential(nn.Linear(4, 8), nn.GELU()).eval()
        with collecting() as report:
            torch.testing.assert_close(self.compiled(model)(X), model(X), rtol=1e-5, atol=1e-5)
        (region,) = report.graphs[0].regions
        assert region.choice is not None
        assert set(region.choice.seconds) == {"onnxruntime", "openvino"}
        assert f"engine: {region.choice.engine}, measured: " in str(report)
        assert region.nodes > 0

    def test_an_edited_weight_is_noticed(self) -> None:
        model = nn.Linear(4, 3).eval()
        run = self.compiled(model)
        for _ in range(4):
            torch.testing.assert_close(run(X), model(X), rtol=1e-5, atol=1e-5)
            model.weight.add_(1.0)

    def test_an_engine_that_lacks_an_operator_is_not_chosen(self) -> None:
        with collecting() as report:
            result = self.compiled(lambda x: (x * 3.0).double() + 1e-12)(X)
        assert torch.equal(result, (X * 3.0).double() + 1e-12)
        choice = report.graphs[0].regions[0].choice
        assert choice is not None
        assert choice.engine == "onnxruntime"
        assert "openvino" in choice.discarded

    def test_choosing_draws_no_random_numbers_of_the_users(self) -> None:
        def function(x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.dropout(x, 0.5)

        results = []
        for run in (self.compiled(function), self.compiled(function, engine="onnxruntime", engine_options=None)):
            torch._dynamo.reset()
            torch.manual_seed(3)
            results.append([run(X), run(X)])
        for ours, theirs in zip(*results, strict=True):
            assert torch.equal(ours, theirs)

    def test_training(self) -> None:
        model, twin = nn.Linear(4, 3), nn.Linear(4, 3)
        twin.load_state_dict(model.state_dict())
        with torch.enable_grad():
            self.compiled(model)(X).square().sum().backward()
            twin(X).square().sum().backward()
        assert model.weight.grad is not None
        torch.testing.assert_close(model.weight.grad, twin.weight.grad, rtol=1e-5, atol=1e-5)
