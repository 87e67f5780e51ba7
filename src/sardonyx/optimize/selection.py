"""Which rules run: what `options={"optimize": ...}` says, as a set of names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import TypeAlias

from sardonyx.errors import OptionError
from sardonyx.optimize.optimizer import PASSES, all_rules
from sardonyx.options import validates

Chosen: TypeAlias = "str | bool | Sequence[str]"

_LEVELS = ("default", "none")
_TERM = re.compile(r"\s*([+-]?)\s*(\w+)\s*,?")


def selected(chosen: Chosen) -> frozenset[str]:
    """The names of the rules that run.

    A level, then names to add or to leave out; names alone mean these and no others.

    >>> sorted(selected("none+Silu, +join_casts"))
    ['JoinCasts', 'Silu']
    >>> "Silu" in selected("default-Silu")
    False
    >>> sorted(selected(["Silu", "JoinCasts"]))
    ['JoinCasts', 'Silu']
    """
    if isinstance(chosen, bool):
        chosen = "default" if chosen else "none"
    terms = _terms(chosen)
    names = names_of_rules()
    first_sign, first = terms[0] if terms else ("", "none")
    running = set(names) if first_sign or first == "default" else set()
    for index, (sign, name) in enumerate(terms):
        if name in _LEVELS:
            if index or sign:
                raise OptionError(f"optimize is {chosen!r}", hint=f"a level stands first and alone: '{name}-Name'")
        elif sign == "-":
            running.discard(_known(name, names))
        else:
            running.add(_known(name, names))
    return frozenset(running)


@validates("optimize")
def check_rules(chosen: Chosen) -> None:
    """Raise if an unknown rule is named; the rules need not be loaded where none is."""
    if chosen not in (*_LEVELS, True, False):
        selected(chosen)


def names_of_rules() -> tuple[str, ...]:
    """Every name that can be chosen, as reports show them."""
    return (*PASSES, *dict.fromkeys(rule.name for rule in all_rules()))


def _terms(chosen: Chosen) -> list[tuple[str, str]]:
    """Signs and names, in order."""
    terms = []
    for text in [chosen] if isinstance(chosen, str) else chosen:  # type: ignore[union-attr]  # no bool comes here
        at = 0
        while at < len(text):
            term = _TERM.match(text, at)
            if term is None:
                raise OptionError(f"optimize is {chosen!r}", hint="use 'default', 'none', or 'default-Name+Name'")
            terms.append((term[1], term[2]))
            at = term.end()
    return terms


def _known(name: str, names: Sequence[str]) -> str:
    """The rule that is meant, written as its name or as its function is."""
    folded = {_fold(known): known for known in names}
    if _fold(name) in folded:
        return folded[_fold(name)]
    near = difflib.get_close_matches(_fold(name), [*folded, *_LEVELS], n=1, cutoff=0.6)
    hint = f"did you mean {folded.get(near[0], near[0])!r}?" if near else "use 'default', 'none' or a rule's name"
    raise OptionError(f"optimize names the unknown rule {name!r}", hint=hint)


def _fold(name: str) -> str:
    return name.replace("_", "").lower()
