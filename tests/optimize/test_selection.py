"""`optimize` chooses rules: a level, then names to add or leave out; or names alone."""

from __future__ import annotations

import pytest
import torch

from sardonyx import OptionError, Options
from sardonyx.optimize.selection import rule_names, select_rules
from sardonyx.telemetry.report import collecting

ALL = frozenset(rule_names())


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        ("default", ALL),
        (True, ALL),
        ("none", frozenset()),
        (False, frozenset()),
        ([], frozenset()),
        ("default-RotaryEmbedding", ALL - {"RotaryEmbedding"}),
        ("default-Silu-JoinCasts", ALL - {"Silu", "JoinCasts"}),
        ("default, -Silu, -join_casts", ALL - {"Silu", "JoinCasts"}),
        ("-Silu", ALL - {"Silu"}),
        ("none+Silu", {"Silu"}),
        ("none + Silu + drop_cast - silu", {"DropCast"}),
        ("Silu", {"Silu"}),
        (["Silu", "drop_cast"], {"Silu", "DropCast"}),
        (("default", "-FoldConstant", "-ShareCommon"), ALL - {"FoldConstant", "ShareCommon"}),
    ],
)
def test_what_is_chosen(chosen: str | bool | list[str], names: frozenset[str]) -> None:
    assert select_rules(chosen) == names


@pytest.mark.parametrize(
    ("chosen", "hint"),
    [
        ("default-RotaryEmbeding", "did you mean 'RotaryEmbedding'"),
        ("defualt", "did you mean 'default'"),
        ("default-XYZZY", "a rule's name"),
        (["Silu", "none"], "put the level first"),
        ("default!", "'default-Name"),
    ],
)
def test_what_cannot_be_chosen_is_explained(chosen: str | list[str], hint: str) -> None:
    with pytest.raises(OptionError, match=hint):
        Options.of({"optimize": chosen})


def test_the_choice_is_part_of_what_identifies_an_artifact() -> None:
    assert Options(optimize="default-Silu").artifact_key() != Options().artifact_key()


def test_the_environment_can_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SARDONYX_OPTIMIZE", "default-Silu")
    assert "Silu" not in select_rules(Options.of().optimize)


@pytest.mark.parametrize(("chosen", "hits"), [("default", 1), ("default-Silu", 0), (["Silu"], 1), ("none", 0)])
def test_a_compiled_model_is_rewritten_by_what_is_chosen(chosen: str | list[str], hits: int) -> None:
    torch._dynamo.reset()
    x = torch.randn(5)
    with collecting() as report, torch.no_grad():
        options = {"optimize": chosen, "fallback": "error"}
        result = torch.compile(torch.nn.functional.silu, backend="sardonyx", options=options)(x)
    torch.testing.assert_close(result, torch.nn.functional.silu(x))
    assert report.rules["Silu"] == hits
