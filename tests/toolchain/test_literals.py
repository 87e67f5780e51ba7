"""Text that others choose stays text in generated C++."""

from __future__ import annotations

import re

import pytest

from sardonyx.toolchain.literals import comment, identifier, quoted

from .hostile import HOSTILE


@pytest.mark.parametrize("kind", HOSTILE)
def test_literals_of_any_text_stay_on_their_line(kind: str) -> None:
    text = HOSTILE[kind]
    assert re.fullmatch(r"// [^\n\r\\]*", comment(text))
    assert len(comment(text).splitlines()) == 1
    assert re.fullmatch(r'"(?:[^"\\?\n]|\\[0-7]{3})*"', quoted(text), re.ASCII)
    assert re.fullmatch(r"n_\w*", identifier(text), re.ASCII)


def test_identifiers_of_different_names_differ() -> None:
    names = [*HOSTILE.values(), "a", "a_", "a_5f_", "A", "ä", "n" * 100, "n" * 101, ""]
    assert len({identifier(name) for name in names}) == len(names)
    assert max(map(len, map(identifier, names))) <= 80
