"""`sardonyx doctor`: what is wrong, and how to mend it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath
from types import SimpleNamespace

import pytest

from sardonyx.cli import doctor
from sardonyx.cli.doctor import Finding
from sardonyx.engines import Availability
from sardonyx.errors import EngineError, MissingDependency

from .calling import assert_snapshot, run, told


def test_this_machine_is_well() -> None:
    found = told("doctor")
    assert_snapshot("doctor", {"keys": sorted(found), "parts": sorted({x["part"] for x in found["findings"]})})
    assert not found["broken"]
    assert ("trial", "a small model") in {(x["part"], x["what"]) for x in found["findings"]}
    assert {"provider", "engine", "compiler", "memory"} <= {x["part"] for x in found["findings"]}


@pytest.mark.parametrize(("breaks", "code"), [(True, 1), (False, 0)])
def test_a_problem_is_told_with_its_fix(monkeypatch: pytest.MonkeyPatch, breaks: bool, code: int) -> None:
    def check() -> Iterator[Finding]:
        yield Finding("package", "torch", "too old", "pip install torch", breaks)

    monkeypatch.setattr(doctor, "CHECKS", [check])
    done = run("doctor")
    assert done.exit_code == code
    assert "torch: too old\n  next: pip install torch" in done.stdout


def test_wheels_that_overwrite_each_other_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def package(name: str, *files: str) -> SimpleNamespace:
        return SimpleNamespace(metadata={"Name": name}, files=[PurePosixPath(file) for file in files])

    installed = [
        package("onnxruntime", "onnxruntime/__init__.py", "onnxruntime/capi/__init__.py"),
        package("onnxruntime-gpu", "onnxruntime/__init__.py"),
        package("onnx", "onnx/__init__.py"),
        package("nvidia-cublas", "nvidia/cublas/__init__.py"),
        package("nvidia-cudnn", "nvidia/cudnn/__init__.py"),
    ]
    monkeypatch.setattr(doctor, "distributions", lambda: installed)
    (clash,) = doctor.conflicts()
    assert (clash.what, clash.breaks) == ("onnxruntime", True)
    assert clash.fix.startswith("pip uninstall onnxruntime onnxruntime-gpu")


def test_without_the_default_engine_nothing_works(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = [Availability("onnxruntime", None, "not there"), Availability("iree", None, "not there")]
    monkeypatch.setattr(doctor, "engines", lambda: missing)
    assert [(x.what, x.breaks, bool(x.fix)) for x in doctor.all_engines()] == [
        ("onnxruntime", True, True),
        ("iree", False, False),
    ]


def test_what_is_missing_is_not_told_to_be_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = [Availability("iree", None, "not there"), Availability("reference", "1.0", "")]
    monkeypatch.setattr(doctor, "engines", lambda: missing)
    monkeypatch.setattr(doctor, "_installed", lambda name: False)
    monkeypatch.setattr(doctor, "_python", lambda *_: SimpleNamespace(returncode=1, stdout="", stderr="no module"))
    monkeypatch.setenv("SARDONYX_CACHE_DIR", "")
    monkeypatch.setattr(doctor, "CHECKS", [doctor.extras, doctor.all_engines, doctor.providers, doctor.compilers])
    lines = run("doctor").stdout.splitlines()
    told = [line for line in lines if "not there" in line or "not installed" in line or "unknown:" in line]
    assert told
    assert [line for line in told if line.startswith("ok")] == []
    assert any(line.startswith("ok") and "reference" in line for line in lines)


def test_a_version_that_is_too_old_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version", lambda name: "0.0.1")
    found = {x.what: x for x in doctor.packages()}
    assert found["torch"].breaks
    assert found["torch"].fix.startswith("pip install --upgrade 'torch>=")


def test_a_provider_that_does_not_load_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(program: str, *arguments: str) -> SimpleNamespace:
        if not arguments:
            return SimpleNamespace(returncode=0, stdout='["CUDAExecutionProvider", "CPUExecutionProvider"]', stderr="")
        return SimpleNamespace(returncode=int("CUDA" in arguments[0]), stdout="", stderr="libcublas.so: not found")

    monkeypatch.setattr(doctor, "_python", answer)
    cuda, cpu = doctor.providers()
    assert (cuda.says, bool(cuda.fix), cuda.breaks) == ("does not load: libcublas.so: not found", True, False)
    assert (cpu.says, cpu.fix) == ("loads", "")


def test_without_a_compiler_there_are_no_native_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise MissingDependency("there is no C++ compiler", hint="install g++")

    monkeypatch.setattr(doctor.compiler, "find", fail)
    found = next(doctor.compilers())
    assert (found.says, found.fix, found.breaks) == (
        "there is no C++ compiler: no native kernels",
        "install g++",
        False,
    )


def test_a_model_that_fails_on_the_default_way_is_grave(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise EngineError("onnxruntime refused the model", hint="install another")

    monkeypatch.setattr(doctor, "export", fail)
    (found,) = doctor.trial()
    assert (found.says, found.fix, found.breaks) == ("onnxruntime refused the model", "install another", True)
