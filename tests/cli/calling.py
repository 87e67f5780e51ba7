"""The program called in this process, and what it tells compared with a snapshot."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
from click.testing import CliRunner, Result

from sardonyx.cli._program import program

ROOT = Path(__file__).resolve().parents[2]
BERT, RESNET = (f"{ROOT}/examples/models.py:{name}" for name in ("bert", "resnet50"))

_SNAPSHOTS = Path(__file__).parent / "snapshots"
_UNSETTLED = frozenset({"bytes", "weight_bytes", "weights_by_dtype", "producer", "version", "reason", "rules"})
_UNSETTLED |= {"operators", "nodes", "nodes_before", "nodes_after", "weights", "largest", "threads", "dominates"}
"""What differs from machine to machine or from one version of a package, or of our rules, to the next."""


def run(*words: object) -> Result:
    return CliRunner().invoke(program, [str(word) for word in words])


def told(*words: object, exit_code: int = 0) -> Any:
    """What a command tells programs."""
    done = run(*words, "--json")
    assert done.exit_code == exit_code, done.output
    return json.loads(done.stdout)


def assert_snapshot(name: str, found: Any) -> None:
    """The same keys, and the same values where they are settled. A snapshot that is not there is written."""
    path = _SNAPSHOTS / f"{name}.json"
    seen = json.dumps(settled(found), indent=1, ensure_ascii=False) + "\n"
    if not path.exists():
        path.write_text(seen)
        raise AssertionError(f"{path.name} is written: look at it, and run the test again")
    assert json.loads(seen) == json.loads(path.read_text())


def settled(value: Any, key: str = "") -> Any:
    """The value with its type in the place of what differs from run to run: times, rounding, sizes of files, paths."""
    if key in _UNSETTLED or isinstance(value, float):
        return type(value).__name__
    if isinstance(value, Mapping):
        return {name: settled(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        every = [settled(inner) for inner in value]
        return every[:1] if every[1:] and all(x == every[0] for x in every) else every
    return f"…/{Path(value).name}" if isinstance(value, str) and value.startswith("/") else value


def commands(group: click.Group = program, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    """Every command of the program by its full name."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


EVERY = dict(commands())
