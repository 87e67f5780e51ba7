"""The command line, one file per command: `cli/cache.py` is `sardonyx cache`. To add a command, add a file."""

from __future__ import annotations

import io
import os
import sys


def main() -> None:
    """The program `sardonyx`."""
    _reopen_closed_streams()
    try:
        from sardonyx.cli._program import program
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package not in ("click", "rich"):
            raise
        sys.stderr.write(f'error: the command line needs the package {package}\n  next: pip install "sardonyx[cli]"\n')
        sys.exit(4)
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted\n")
        sys.exit(130)
    program()


def _reopen_closed_streams() -> None:
    """Redirect closed standard streams (`>&-`) to the null device; else the next opened file would take their place."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, io.StringIO())
