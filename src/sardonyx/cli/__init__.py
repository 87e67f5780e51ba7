"""The command line, one file a command: `cli/cache.py` is `sardonyx cache`. To add a command is to add a file."""

from __future__ import annotations

import io
import os
import sys


def main() -> None:
    """The program `sardonyx`."""
    _open_what_is_closed()
    try:
        from sardonyx.cli._program import program
    except ModuleNotFoundError as error:
        lacking = str(error.name).partition(".")[0]
        if lacking not in ("click", "rich"):
            raise
        sys.stderr.write(f'error: the command line needs the package {lacking}\n  next: pip install "sardonyx[cli]"\n')
        sys.exit(4)
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted\n")
        sys.exit(130)
    program()


def _open_what_is_closed() -> None:
    """Standard streams that a shell has closed, as by `>&-`, lead to nowhere; else a file would be opened as one."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, io.StringIO())
