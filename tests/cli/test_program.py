"""The program: exit codes, errors, help, and what all commands have in common."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner
from torch._dynamo.exc import BackendCompilerFailed

from sardonyx import errors
from sardonyx.cli import engines as a_command
from sardonyx.cli._messages import print_result
from sardonyx.cli._program import program
from sardonyx.engines import Availability

from .calling import EVERY, run


@pytest.mark.parametrize("name", EVERY)
def test_every_command_prints_json_and_shows_an_example(name: str) -> None:
    options = [option for parameter in EVERY[name].params for option in parameter.opts]
    assert "--json" in options
    assert f"sardonyx {name}" in (EVERY[name].epilog or "")
    assert (EVERY[name].help or "").split("\n")[0].endswith(".")


def test_the_help_tells_the_exit_codes() -> None:
    assert "4  a package or a program is missing" in run("--help").stdout


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (errors.SardonyxError("it broke", hint="do this"), 3, "error: it broke\n  next: do this\n"),
        (errors.VerificationError("it differs"), 1, "error: it differs\n"),
        (errors.MissingDependency("it lacks", hint="pip install it"), 4, "error: it lacks\n  next: pip install it\n"),
        (RuntimeError("one\ntwo"), 1, "error: RuntimeError: one\n  next: sardonyx --debug … shows where\n"),
        (RuntimeError("by accident"), 1, "error: RuntimeError: by accident\n  next: sardonyx --debug … shows where\n"),
        (
            OSError(28, "No space left on device", "out.npz"),
            1,
            "error: out.npz: No space left on device\n  next: check that path, its folder, and the free disk space\n",
        ),
        (KeyboardInterrupt(), 130, "\ninterrupted\n"),
    ],
)
def test_an_error_is_a_line_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, said: str
) -> None:
    def fail() -> list[Any]:
        raise error

    monkeypatch.setattr(a_command, "engines", fail)
    done = run("engines")
    assert (done.exit_code, done.stderr, done.stdout) == (code, said, "")


def test_an_error_that_torch_has_packed_is_told_as_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> list[Any]:
        raise BackendCompilerFailed(fail, errors.MissingDependency("it lacks", hint="pip install it"), None)

    monkeypatch.setattr(a_command, "engines", fail)
    done = run("engines")
    assert (done.exit_code, done.stderr) == (4, "error: it lacks\n  next: pip install it\n")


def test_ctrl_c_that_became_another_error_is_told_as_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> list[Any]:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise errors.MissingDependency("a package cannot be loaded") from error

    monkeypatch.setattr(a_command, "engines", fail)
    done = run("engines")
    assert (done.exit_code, done.stderr) == (130, "\ninterrupted\n")


def test_debug_shows_the_traceback_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(a_command, "engines", lambda: 1 / 0)
    done = run("--debug", "engines")
    assert done.exit_code == 1
    assert "Traceback" in done.stderr
    assert "error: ZeroDivisionError: division by zero" in done.stderr
    assert "Traceback" not in run("engines").stderr


def test_wrong_use_is_told_by_click() -> None:
    assert run("run").exit_code == 2
    assert run("engine").exit_code == 2
    assert "No such command 'engine'" in run("engine").stderr


def test_a_closed_pipe_is_quiet() -> None:
    words = f"{sys.executable} -m sardonyx ops --all | head -1"
    done = subprocess.run(words, shell=True, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["operator", "translation"]
    assert done.stderr == ""


_WHERE_STREAMS_LEAD = """
import os, sys
from sardonyx.cli import main
told = int(sys.argv.pop())
try:
    main()
finally:
    os.write(told, " ".join(os.readlink(f"/proc/self/fd/{x}") for x in range(3)).encode())
"""


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs a system that lists open files")
def test_streams_that_are_closed_are_not_taken_for_files(tmp_path: Path) -> None:
    with (tmp_path / "told").open("wb") as file:
        words = [sys.executable, "-c", _WHERE_STREAMS_LEAD, "engines", "--json", str(file.fileno())]
        line = ["bash", "-c", 'exec "$@" <&- >&- 2>&-', "-", *words]
        done = subprocess.run(line, pass_fds=[file.fileno()], check=False)
    assert (tmp_path / "told").read_text() == "/dev/null /dev/null /dev/null"
    assert done.returncode == 0


@pytest.mark.parametrize(("words", "sign"), [((), "?"), (("--json",), "\\u2014")])
def test_a_terminal_without_unicode_is_told_all_the_same(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], sign: str
) -> None:
    monkeypatch.setattr(a_command, "engines", lambda: [Availability("mine", None, "not there \u2014 yet")])
    done = CliRunner(charset="ascii").invoke(program, ["engines", *words])
    assert done.exit_code == 0, done.output
    assert f"not there {sign} yet" in done.stdout


def test_json_has_no_numbers_that_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    print_result({"errors": (0.5, float("inf"), float("nan"))}, True)
    assert json.loads(capsys.readouterr().out) == {"errors": [0.5, "inf", "nan"]}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_what_the_shell_evaluates(shell: str) -> None:
    done = run("completion", shell)
    assert done.exit_code == 0, done.output
    assert f"_SARDONYX_COMPLETE={shell}_complete" in done.stdout


def test_the_shell_is_told_the_commands() -> None:
    found = ShellComplete(program, {}, "sardonyx", "_SARDONYX_COMPLETE").get_completions([], "comp")
    assert {"compile", "completion"} <= {item.value for item in found}
