"""`sardonyx op`: a project written, built, tested and packed from the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from sardonyx.cli._program import program
from sardonyx.customop import registry


def run(*words: str) -> Result:
    return CliRunner().invoke(program, ["op", *words])


def told(*words: str) -> object:
    done = run(*words, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("work") / "tilt_shift"
    done = run("new", "TiltShift", "--domain", "cli", "--folder", str(folder))
    assert done.exit_code == 0, done.output
    return folder


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    before = registry.declared()
    yield
    for op in registry.declared():
        if op not in before:
            op.close()


def test_new_lists_what_it_wrote(project: Path) -> None:
    done = run("new", "Other", "--folder", str(project.parent / "other"))
    assert done.output.splitlines()[0] == str(project.parent / "other" / "pyproject.toml")
    assert (project.parent / "other" / "other" / "kernel.cpp").is_file()


def test_new_overwrites_nothing(project: Path) -> None:
    done = run("new", "TiltShift", "--folder", str(project))
    assert done.exit_code == 3
    assert done.output.startswith(f"error: {project} exists already\n  next: ")


def test_build_says_what_it_built(project: Path) -> None:
    lines = run("build", str(project)).output.splitlines()
    assert lines[0] == "cli::TiltShift  float32; float64; float16; bfloat16"
    assert Path(lines[1].split()[0]).is_file()


def test_build_for_programs(project: Path) -> None:
    (built,) = told("build", str(project))
    assert built["operator"] == "cli::TiltShift"
    assert built["bytes"] == Path(built["library"]).stat().st_size


def test_the_path_is_the_folder_one_is_in(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    assert run("build").output.startswith("cli::TiltShift")


def test_a_compile_error_is_shown_at_its_line(project: Path, tmp_path: Path) -> None:
    run("new", "Broken", "--folder", str(tmp_path / "broken"))
    kernel = tmp_path / "broken" / "broken" / "kernel.cpp"
    lines = kernel.read_text().splitlines()
    lines.insert(3, "  undeclared_thing();")
    kernel.write_text("\n".join(lines))
    done = run("build", str(tmp_path / "broken"))
    assert done.exit_code == 3
    assert f"{kernel}:4:3: error: " in done.output
    assert "Traceback" not in done.output


def test_test_prints_a_table_and_succeeds(project: Path) -> None:
    done = run("test", str(project))
    assert done.exit_code == 0, done.output
    lines = [line.split() for line in done.output.splitlines()]
    assert lines[0] == ["cli::TiltShift"]
    assert ["reference", "1", "bfloat16", "passed", "equal"] in lines
    assert ["gradcheck", "1", "float64", "passed", "1", "tensor"] in lines
    assert lines[-1] == ["22", "passed"]


def test_test_fails_where_a_check_fails(tmp_path: Path) -> None:
    (tmp_path / "off_by_one.py").write_text(
        "import sardonyx\n"
        'sardonyx.custom_op("cli::Off(Tensor x) -> Tensor", python=lambda x: x + 1, dtypes=["int64"])\n'
        "def reference(x): return x\n"
    )
    done = run("test", str(tmp_path / "off_by_one.py"), "--json")
    assert done.exit_code == 1
    failed = [outcome for outcome in json.loads(done.stdout) if outcome["result"] == "failed"]
    assert [(outcome["check"], outcome["types"]) for outcome in failed] == [("reference", "int64")]
    assert run("test", str(tmp_path / "off_by_one.py")).output.splitlines()[-1] == "5 passed, 1 failed"


def test_pack_writes_a_folder_and_a_wheel(project: Path, tmp_path: Path) -> None:
    written = told("pack", str(project), "--output", str(tmp_path), "--wheel")
    assert written["folder"] == str(tmp_path / "tilt_shift_ort")
    assert Path(written["wheel"]).name.startswith("tilt_shift_ort-0.1.0-py3-none-")
    assert sorted(path.name for path in Path(written["folder"]).iterdir()) == [
        "README.md",
        "__init__.py",
        "manifest.json",
        "operators.so",
    ]


def test_the_tests_of_a_new_project_pass(project: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=project,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert "7 passed" in done.stdout, done.stdout


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1\n", "declares no operators\n  next: it must call sardonyx.custom_op when imported"),
        ("import nowhere_to_be_found\n", "cannot be imported: ModuleNotFoundError: No module named"),
        ("def (:\n", "cannot be imported: SyntaxError"),
        ("\nraise SystemExit(3)\n", "cannot be imported: SystemExit: 3\n  at:   "),
    ],
)
@pytest.mark.parametrize("word", ["build", "test"])
def test_a_module_that_cannot_be_used_is_an_error_without_a_traceback(
    word: str, text: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "unusable_module.py").write_text(text)
    done = run(word, str(tmp_path / "unusable_module.py"))
    assert done.exit_code == 3
    assert said in done.output
    assert "Traceback" not in done.output


@pytest.mark.parametrize("word", ["build", "test"])
def test_a_place_that_is_not_there_is_an_error(word: str, tmp_path: Path) -> None:
    done = run(word, str(tmp_path / "none"))
    assert done.exit_code == 3
    assert done.output.startswith(f"error: there is no {tmp_path / 'none'}\n  next: ")
    assert "error: there is no such_module.of_mine\n" in run(word, "such_module.of_mine").output
    assert "error: there is no missing.py\n" in run(word, "missing.py").output


def test_pack_writes_to_no_file(project: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    done = run("pack", str(project), "--output", str(tmp_path / "taken"))
    assert (done.exit_code, "taken is a file, but a folder is written" in done.output) == (3, True)


def test_pack_needs_an_output(project: Path) -> None:
    done = run("pack", str(project))
    assert done.exit_code == 2
    assert "--output" in done.output


def test_help_shows_how_the_commands_follow_each_other() -> None:
    for word in ("op new GroupNorm", "op build", "op test", "op pack --output dist --wheel"):
        assert f"sardonyx {word}" in run("--help").output
    for word in ("new", "build", "test", "pack"):
        assert f"sardonyx op {word}" in run(word, "--help").output
