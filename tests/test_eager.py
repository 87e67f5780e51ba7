"""The device's tests, by each executor in a process of its own: a registered device stays for the life of a process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TESTS = {
    "native": ["tests/eager", "tests/onnx_ops", "src/sardonyx/eager"],
    "python": ["tests/eager"],
}


@pytest.mark.parametrize("executor", TESTS)
def test_the_device(executor: str, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    separate = ["-p", "no:cacheprovider", "-p", "no:xdist", "--basetemp", str(tmp_path / "tests"), "--color", "no"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *separate, "--maxfail", "25", "--durations", "3", *TESTS[executor]],
        env={**variables, "SARDONYX_EAGER": executor},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.fail(f"SARDONYX_EAGER={executor} pytest {' '.join(TESTS[executor])}\n{done.stdout}", pytrace=False)
    record_property(f"executor {executor}", done.stdout.splitlines()[-1])
