"""The public names, and that importing the package does nothing else."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import sardonyx

ROOT = Path(__file__).resolve().parents[1]


def test_the_version_is_written_in_the_package_alone() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "sardonyx.__version__"}


def test_the_newest_dated_entry_of_the_changelog_is_this_version() -> None:
    headings = re.findall(r"^## \[(.+?)\](?: - (.+))?$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == ("Unreleased", "")
    assert headings[1][0] == sardonyx.__version__
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", date) for _, date in headings[1:])


def test_every_public_name_is_there_and_documented() -> None:
    for name in sardonyx.__all__:
        assert getattr(sardonyx, name).__doc__, name


def test_engines_tell_what_is_installed() -> None:
    known = {engine.name: engine for engine in sardonyx.engines()}
    assert known["onnxruntime"].installed
    assert known["reference"].version


def test_importing_loads_no_engine_and_touches_no_device() -> None:
    program = "import sys, sardonyx; print([m for m in ('onnxruntime', 'onnxscript') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_missing_onnxruntime_says_which_extra_to_install() -> None:
    program = """
import sys, torch
sys.modules["onnxruntime"] = None
try:
    torch.compile(torch.sin, backend="sardonyx")(torch.ones(3))
except Exception as error:
    print(error)
import sardonyx
print([engine.reason for engine in sardonyx.engines() if engine.name == "onnxruntime"])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert 'pip install "sardonyx[cpu]"' in done.stdout
    assert "needs the package onnxruntime" in done.stdout.splitlines()[-1]
