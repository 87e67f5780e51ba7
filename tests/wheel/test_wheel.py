"""What the trial of a wheel takes for granted, without installing one."""

from __future__ import annotations

import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.wheel.__main__ import ROOT, _Results
from tests.wheel.contents import differences, package_files, wheel_files
from tests.wheel.environment import clean_variables
from tests.wheel.matrix import PYTHONS, Interpreters, cuda_packages, interpreters, torch_versions
from tests.wheel.programs import programs


def test_a_header_that_is_no_package_data_is_found_missing(tmp_path: Path) -> None:
    wheel = tmp_path / "package-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("package/__init__.py", "")
        archive.writestr("package-1.0.dist-info/METADATA", "")
    for name in ("package/__init__.py", "package/kernel.h", "package/__pycache__/x.pyc", "package.egg-info/PKG-INFO"):
        file = tmp_path / "src" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    found = differences(package_files(tmp_path / "src"), wheel_files(wheel))
    assert found == ["package/kernel.h is missing"]


def test_the_package_data_covers_every_file_that_is_no_module() -> None:
    """What setuptools will match, without a build."""
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["sardonyx"]
    package = ROOT / "src" / "sardonyx"
    covered = {path.relative_to(package.parent).as_posix() for pattern in patterns for path in package.glob(pattern)}
    assert {name for name in package_files(ROOT / "src") if not name.endswith(".py")} == covered


def test_the_oldest_and_the_newest_python_are_tried_and_the_absent_ones_named() -> None:
    assert interpreters(lambda name: None).absent == PYTHONS
    assert interpreters(lambda name: name).chosen == {"3.11": "python3.11", "3.14": "python3.14"}
    alone = interpreters({"python3.11": "/usr/bin/python3.11"}.get)
    assert alone == Interpreters({"3.11": "/usr/bin/python3.11"}, PYTHONS[1:])


def test_the_torch_versions_are_those_that_the_project_declares() -> None:
    found = torch_versions((ROOT / "pyproject.toml").read_text(), (ROOT / "constraints.txt").read_text())
    assert len(found) == 2
    assert f"torch=={found[1]}" in (ROOT / "constraints.txt").read_text()


@pytest.mark.parametrize("name", ["nvidia-nccl-cu13==2.28.9", "cuda-toolkit[cublas]==13.0.2", "cuda-bindings<14"])
def test_a_build_for_cuda_is_told_by_what_it_requires(name: str) -> None:
    assert cuda_packages(["filelock", name, "triton==3.6.0"]) == [name.split("=")[0].split("[")[0].split("<")[0]]
    assert cuda_packages(None) == []


def test_nothing_of_the_checkout_reaches_an_environment(tmp_path: Path) -> None:
    variables = {"PYTHONPATH": "src", "SARDONYX_EAGER": "python", "VIRTUAL_ENV": ".venv", "HOME": "/home/me"}
    found = clean_variables(variables, tmp_path)
    assert set(found) == {"HOME", "PIP_CACHE_DIR", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR"}
    assert found["PIP_CACHE_DIR"] == "/home/me/.cache/pip"


def test_every_program_of_the_documents_is_the_one_meant() -> None:
    source = {program.name: program.source for program in programs(ROOT)}
    assert 'backend="sardonyx"' in source["the first example of README.md"]
    (operator,) = [text for name, text in source.items() if name.startswith("a custom operator")]
    assert "cpp=" in operator
    assert "register_custom_ops_library" in operator
    for name, text in source.items():
        compile(text, name, "exec")


@pytest.mark.parametrize(
    ("results", "require_torch", "code"),
    [
        (_Results(passed=["a"], skipped=["b"]), False, 0),
        (_Results(passed=["a"], skipped=["b"]), True, 1),
        (_Results(passed=["a"], absent=["b"]), True, 0),
        (_Results(skipped=["b"]), False, 1),
        (_Results(passed=["a"], failed=["b"]), False, 1),
    ],
)
def test_a_run_that_shows_nothing_is_a_failure(results: _Results, require_torch: bool, code: int) -> None:
    assert results.exit_code(require_torch) == code
