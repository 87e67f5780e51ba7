"""What the project says of itself in several places is the same everywhere: versions, and the targets of make."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def loaded(path: Path) -> dict[Any, Any]:
    return dict(yaml.safe_load(path.read_text()))


def commands(workflow: dict[Any, Any]) -> list[str]:
    return [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]


def targets() -> set[str]:
    return set(re.findall(r"^([\w-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))


def pinned(package: str) -> str:
    (found,) = re.findall(rf"^{package}==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return str(found)


def oldest(package: str) -> str:
    listed = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["cpu"]]
    (found,) = [text.removeprefix(f"{package}>=") for text in listed if text.startswith(f"{package}>=")]
    return str(found)


def matrix() -> dict[str, list[str]]:
    return dict(loaded(ROOT / ".github" / "workflows" / "tests.yml")["jobs"]["test"]["strategy"]["matrix"])


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_runs_nothing_but_targets_of_make(path: Path) -> None:
    """So that whatever fails there can be run anywhere."""
    for command in commands(loaded(path)):
        program, *words = re.sub(r"\$\{\{.*?\}\}", "x", command).split()
        assert program == "make", command
        assert {word for word in words if "=" not in word} <= targets(), command


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_may_only_read_and_is_replaced_by_a_later_push(path: Path) -> None:
    workflow = loaded(path)
    assert workflow["permissions"] == {"contents": "read"}
    assert "github.ref" in workflow["concurrency"]["group"]
    assert all(job["timeout-minutes"] for job in workflow["jobs"].values())


def test_the_workflows_cover_lint_tests_wheels_and_documents() -> None:
    ran = {command.split()[1] for path in WORKFLOWS for command in commands(loaded(path))}
    assert ran == {"lint", "test", "wheel", "wheel-test", "docs"}


@pytest.mark.parametrize("package", ["torch", "onnxruntime"])
def test_the_matrix_has_the_oldest_version_allowed_and_the_pinned_one(package: str) -> None:
    first, last = matrix()[package]
    assert first.startswith(f"{oldest(package)}.")
    assert last == pinned(package)


def test_the_pythons_of_the_matrix_are_those_of_the_classifiers() -> None:
    minor = re.compile(r"Programming Language :: Python :: (3\.\d+)")
    assert matrix()["python"] == [found[1] for text in PROJECT["classifiers"] if (found := minor.fullmatch(text))]
    assert PROJECT["requires-python"] == f">={matrix()['python'][0]}"


def test_the_page_about_versions_has_those_of_the_project() -> None:
    text = (ROOT / "docs" / "versions.md").read_text()
    rows = {
        name: (first, last) for name, first, last in re.findall(r"^\| (\w+) \| ([\d.]+) \| ([\d.]+) \|$", text, re.M)
    }
    assert rows["Python"] == (matrix()["python"][0], matrix()["python"][-1])
    for package in ("torch", "onnxruntime"):
        assert rows[package] == (oldest(package), ".".join(pinned(package).split(".")[:2]))


def test_bug_reports_ask_for_a_program_and_what_the_doctor_says() -> None:
    for name in ("bug_report", "wrong_result"):
        form = loaded(ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml")
        required = {field["id"] for field in form["body"] if field.get("validations", {}).get("required")}
        assert {"repro", "doctor"} <= required


def test_every_target_that_is_no_file_is_declared_phony() -> None:
    (listed,) = re.findall(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(listed.split()) == targets()
