"""A document's blocks, run one after the other: here, or by `python -m tests.docs.running` in a process of its own."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


def printed(path: Path, code: Sequence[tuple[str, int]]) -> list[str]:
    """What each block prints, given as its text and the number of lines above it."""
    namespace: dict[str, Any] = {"__name__": "document"}
    return [_printed(path, text, line, namespace) for text, line in code]


def _printed(path: Path, text: str, line: int, namespace: dict[str, Any]) -> str:
    """Run a block as if the document were its source file, so that an error shows its line."""
    compiled = compile("\n" * line + text, str(path), "exec")
    with contextlib.redirect_stdout(io.StringIO()) as out, torch.enable_grad():  # as a reader's program has them
        exec(compiled, namespace)
    return out.getvalue()


if __name__ == "__main__":
    given = json.load(sys.stdin)
    os.chdir(sys.argv[2])
    print(json.dumps(printed(Path(sys.argv[1]), given)))
