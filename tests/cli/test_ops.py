"""`sardonyx ops` and `sardonyx engines`: what is covered, and what runs it."""

from __future__ import annotations

import sardonyx
from sardonyx.translate import table

from .calling import assert_snapshot, run, told


def test_every_translation_of_ours_is_listed() -> None:
    found = told("ops")
    assert {name for name, how in found["operators"].items() if how == "own"} == table.names()
    assert sum(found["counts"].values()) == len(found["operators"])


def test_nothing_of_the_core_is_missing() -> None:
    assert told("ops", "--missing")["operators"] == {}


def test_a_pattern_chooses() -> None:
    assert_snapshot("ops", told("ops", "aten::conv?d")["counts"])
    assert set(told("ops", "aten::conv?d")["operators"]) == {"aten::conv1d", "aten::conv2d", "aten::conv3d"}
    assert "no operator matches" in run("ops", "nothing_of_this_name").stdout


def test_what_stays_in_torch_is_told_as_missing() -> None:
    found = told("ops", "--all", "--missing")["operators"]
    assert "aten::quantized_max_pool3d" in found
    assert set(found.values()) == {"missing"}


def test_engines_are_listed_with_their_reasons() -> None:
    found = told("engines")
    assert_snapshot("engines", found[:2])
    assert [x["name"] for x in found] == [x.name for x in sardonyx.engines()]
    lines = run("engines").stdout.splitlines()
    assert [line.split()[0] for line in lines[1:]] == [x["name"] for x in found]
