"""Engines are found by name: ours, those of other packages, and those registered in the process."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch

import sardonyx
from sardonyx.engines import Availability, Engine, Job, Runner, engines, find, register, registry
from sardonyx.errors import EngineError, MissingDependency, OptionError

MODULE = """
import torch
from sardonyx.engines import Availability, Engine, Runner

class Foreign(Engine):
    name = "foreign"
    def probe(self):
        return Availability(self.name, "7")
    def load(self, job, artifact):
        return Always()

class Always(Runner):
    def __call__(self, inputs):
        return [torch.full_like(inputs[0], 42.0)]

class Other:
    pass
"""
ENTRIES = """[sardonyx.engines]
foreign = foreign_engines:Foreign
onnxruntime = foreign_engines:Foreign
absent = no_such_module:Engine
wrong = foreign_engines:Other
"""


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package installed beside ours, as pip leaves it."""
    (tmp_path / "foreign_engines.py").write_text(MODULE)
    info = tmp_path / "foreign-7.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign\nVersion: 7\n")
    (info / "entry_points.txt").write_text(ENTRIES)
    monkeypatch.syspath_prepend(str(tmp_path))
    forget()
    yield
    sys.modules.pop("foreign_engines", None)
    forget()


def forget() -> None:
    registry._locations.cache_clear()
    registry._load.cache_clear()


@pytest.mark.usefixtures("distribution")
class TestEntryPoints:
    def test_an_engine_of_another_package_runs(self) -> None:
        run = torch.compile(torch.sin, backend="sardonyx", options={"engine": "foreign"})
        assert run(torch.ones(3)).tolist() == [42.0] * 3

    def test_it_is_listed_after_ours(self) -> None:
        assert [(e.name, e.version) for e in engines() if e.name == "foreign"] == [("foreign", "7")]
        assert next(e.name for e in sardonyx.engines()) == "onnxruntime"

    def test_it_may_not_take_the_name_of_ours(self) -> None:
        assert type(find("onnxruntime")).__name__ == "OnnxRuntime"

    def test_one_that_cannot_be_imported_is_listed_with_the_reason(self) -> None:
        (absent,) = (e for e in engines() if e.name == "absent")
        assert not absent.installed
        assert "no_such_module" in absent.reason
        with pytest.raises(EngineError, match="no_such_module"):
            find("absent")

    def test_one_that_is_no_engine_is_an_error(self) -> None:
        with pytest.raises(EngineError, match=r"not a sardonyx\.engines\.Engine"):
            find("wrong")


class Mine(Engine):
    name = "mine"

    def probe(self) -> Availability:
        return Availability(self.name, "1")

    def load(self, job: Job, artifact: Path | None) -> Runner:
        return Zeros()


class Zeros(Runner):
    def __call__(self, inputs: Sequence[torch.Tensor | int]) -> list[torch.Tensor]:
        return [torch.zeros_like(torch.as_tensor(inputs[0]))]


@pytest.fixture
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})


@pytest.mark.usefixtures("nothing_registered")
class TestRegister:
    def test_an_engine_registered_in_the_process_runs(self) -> None:
        register(Mine())
        assert "mine" in [engine.name for engine in engines()]
        run = torch.compile(torch.sin, backend="sardonyx", options={"engine": "mine"})
        assert run(torch.ones(3)).tolist() == [0.0] * 3

    def test_it_may_not_take_the_name_of_ours(self) -> None:
        engine = Mine()
        engine.name = "openvino"
        with pytest.raises(OptionError, match="openvino"):
            register(engine)


def test_an_unknown_name_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(OptionError, match="did you mean 'openvino'"):
        find("open_vino")


@pytest.mark.parametrize("name", ["openvino", "iree"])
def test_an_engine_that_is_not_installed_is_an_error_with_a_hint(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(sys.modules[type(find(name)).__module__], "version", missing)
    doors = (
        lambda x: torch.compile(torch.sin, backend="sardonyx", options={"engine": name})(x),
        lambda x: sardonyx.compile(torch.nn.ReLU(), engine=name)(x),
        lambda x: sardonyx.export(torch.nn.ReLU(), (x,), engine=name)(x),
    )
    for run in doors:
        with pytest.raises(MissingDependency, match=rf'(?s)needs the package {name}.*pip install "sardonyx\[{name}\]"'):
            run(torch.ones(3))


def test_onnxruntime_refuses_settings_that_it_does_not_have() -> None:
    run = torch.compile(torch.sin, backend="sardonyx", options={"engine_options": {"nope": 1}})
    with pytest.raises(OptionError, match="session_options and providers"):
        run(torch.ones(3))
