"""Which rules run: the names that `options={"optimize": ...}` selects."""

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


def select_rules(chosen: Chosen) -> frozenset[str]:
    """Return the names of the rules that run.

    The option is a level, then names to add or to remove; names without a level select these alone.

    >>> sorted(select_rules("none+Silu, +join_casts"))
    ['JoinCasts', 'Silu']
    >>> "Silu" in select_rules("default-Silu")
    False
    >>> sorted(select_rules(["Silu", "JoinCasts"]))
    ['JoinCasts', 'Silu']
    """
    if isinstance(chosen, bool):
        chosen = "default" if chosen else "none"
    terms = _terms(chosen)
    names = rule_names()
    first_sign, first = terms[0] if terms else ("", "none")
    running = set(names) if first_sign or first == "default" else set()
    for index, (sign, name) in enumerate(terms):
        if name in _LEVELS:
            if index or sign:
                raise OptionError(f"invalid option optimize={chosen!r}", hint=f"put the level first: '{name}-Name'")
        elif sign == "-":
            running.discard(_resolve_name(name, names))
        else:
            running.add(_resolve_name(name, names))
    return frozenset(running)


@validates("optimize")
def check_rules(chosen: Chosen) -> None:
    """Raise if the option names an unknown rule; rules are loaded only if it names any."""
    if chosen not in (*_LEVELS, True, False):
        select_rules(chosen)


def rule_names() -> tuple[str, ...]:
    """Return every name that can be selected, as reports show them."""
    return (*PASSES, *dict.fromkeys(rule.name for rule in all_rules()))


def _terms(chosen: Chosen) -> list[tuple[str, str]]:
    """Return signs and names, in order."""
    terms = []
    for text in [chosen] if isinstance(chosen, str) else chosen:  # type: ignore[union-attr]  # bool is handled by callers
        position = 0
        while position < len(text):
            term = _TERM.match(text, position)
            if term is None:
                raise OptionError(
                    f"invalid option optimize={chosen!r}", hint="use 'default', 'none', or 'default-Name+Name'"
                )
            terms.append((term[1], term[2]))
            position = term.end()
    return terms


def _resolve_name(name: str, names: Sequence[str]) -> str:
    """Return the rule of this name, in CamelCase or snake_case."""
    folded = {_fold(known): known for known in names}
    if _fold(name) in folded:
        return folded[_fold(name)]
    near = difflib.get_close_matches(_fold(name), [*folded, *_LEVELS], n=1, cutoff=0.6)
    hint = f"did you mean {folded.get(near[0], near[0])!r}?" if near else "use 'default', 'none' or a rule's name"
    raise OptionError(f"unknown rule {name!r} in the option optimize", hint=hint)


def _fold(name: str) -> str:
    return name.replace("_", "").lower()
