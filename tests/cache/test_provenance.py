"""Whose code is whose: a package's by its version, or the user's own."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest
import torch

from sardonyx.cache import provenance
from sardonyx.cache.provenance import OURS, PYTHON, monkeypatches, origin_of_file, origin_of_module


def test_a_package_is_known_by_its_version() -> None:
    known = f"torch {metadata.version('torch')}"
    assert origin_of_file(torch.nn.functional.__file__) == known
    assert origin_of_module("torch._C._nn") == known
    assert origin_of_module("functorch") in (known, None)


def test_python_and_this_package_are_known() -> None:
    assert origin_of_file(json.__file__) == origin_of_module("math") == PYTHON
    assert origin_of_file("<frozen abc>") == PYTHON
    assert origin_of_file(provenance.__file__) == OURS


def test_any_other_file_is_the_users_own() -> None:
    assert origin_of_file(__file__) is None
    assert origin_of_module(__name__) is None
    assert origin_of_module("__main__") is None
    assert origin_of_module("nowhere") is None


@pytest.mark.parametrize(
    ("direct", "origin"),
    [
        (None, "mine 1.0"),
        ({"url": "file:///home/me/mine", "dir_info": {"editable": True}}, None),
        ({"url": "file:///home/me/mine", "dir_info": {}}, None),
        ({"url": "u", "vcs_info": {"commit_id": "abc"}}, 'mine 1.0 {"url": "u", "vcs_info": {"commit_id": "abc"}}'),
    ],
)
def test_what_was_installed_from_a_folder_is_the_users_own(tmp_path: Path, direct: object, origin: str | None) -> None:
    (tmp_path / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    if direct:
        (tmp_path / "direct_url.json").write_text(json.dumps(direct))
    assert provenance._origin(metadata.PathDistribution(tmp_path)) == origin


def test_a_package_by_another_name_is_found_by_its_files(tmp_path: Path) -> None:
    (tmp_path / "RECORD").write_text("other/__init__.py,,\nsingle.py,,\n")
    distribution = metadata.PathDistribution(tmp_path)
    found = [provenance._provides(distribution, name) for name in ("other", "single", "oth", "py")]
    assert found == [True, True, False, False]


def test_a_thing_leads_back_if_its_name_leads_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert provenance.is_importable_by_name(torch.nn.functional.softmax)
    assert provenance.is_importable_by_name(torch.nn.Linear.forward)
    forward = torch.nn.Linear.forward
    monkeypatch.setattr(torch.nn.Linear, "forward", torch.nn.ReLU.forward)
    assert not provenance.is_importable_by_name(forward)


def test_nothing_intrudes_by_itself() -> None:
    assert [what for _, what in monkeypatches(["torch"]) if what is None] == []


def test_what_another_package_puts_into_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional, "softmax", pytest.importorskip)
    found = dict(monkeypatches(["torch"]))
    assert str(found["torch.nn.functional.softmax"]).startswith(f"pytest {metadata.version('pytest')} ")
