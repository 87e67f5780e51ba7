"""The command line, one file a command: `cli/cache.py` is `sardonyx cache`. To add a command is to add a file."""

from __future__ import annotations

import sys


def main() -> None:
    """The program `sardonyx`."""
    try:
        from sardonyx.cli._program import program
    except ModuleNotFoundError as error:
        if error.name not in ("click", "rich"):
            raise
        sys.stderr.write(
            f'error: the command line needs the package {error.name}\n  next: pip install "sardonyx[cli]"\n'
        )
        sys.exit(4)
    program()
