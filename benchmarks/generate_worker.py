"""One engine with one model, in a process of its own: told what to do on stdin, it answers in JSON on stdout.

It loads the model, generates once, and says how that went; then it answers each `round` with one more generation, and
`end` with its memory. Between commands it waits on stdin and uses no processor.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import transformers  # noqa: F401  # before anything is timed

from benchmarks.generate_engines import ENGINES
from benchmarks.generate_models import prompt
from benchmarks.machine import versions


def main(name: str, folder: str, exported: str, length: str, batch: str, tokens: str) -> None:
    """Prepare, then serve commands until stdin ends."""
    answers = _private_stdout()
    try:
        engine, ids = ENGINES[name], prompt(Path(folder), int(length), int(batch))
        started = time.perf_counter()
        generator = engine.load(Path(folder), Path(exported))
        load = time.perf_counter() - started
        first = generator.generate(ids, int(tokens))
        _answer(answers, {"load": load, **asdict(first), "peak_mb": _peak_megabytes()})
        for line in sys.stdin:
            if line.strip() == "round":
                _answer(answers, asdict(generator.generate(ids, int(tokens))))
            else:
                told = {"details": generator.details(), "versions": versions(engine.packages)}
                _answer(answers, {**told, "peak_mb": _peak_megabytes()})
    except Exception as error:
        _answer(answers, {"error": f"{type(error).__name__}: {error}"})


def _private_stdout() -> TextIO:
    """Stdout for answers alone: what libraries print goes to stderr, from C++ too."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _answer(answers: TextIO, what: dict[str, Any]) -> None:
    answers.write(json.dumps(what) + "\n")
    answers.flush()


def _peak_megabytes() -> float:
    """The most that this process has held in memory."""
    found = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024 / 1e6


if __name__ == "__main__":
    main(*sys.argv[1:])
