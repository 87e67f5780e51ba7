"""One engine with one model, in a process of its own: told what to do on stdin, it answers in JSON on stdout.

It loads the model, generates once, and says how that went; then it answers each `round` with one more generation, and
`end` with its memory. Between commands it waits on stdin and uses no processor.
"""

from __future__ import annotations

import re
import sys
import time
from dataclasses import asdict
from pathlib import Path

import transformers  # noqa: F401  # before anything is timed

from benchmarks.generate_engines import ENGINES
from benchmarks.generate_models import prompt
from benchmarks.machine import versions
from benchmarks.processes import Answers


def main(name: str, folder: str, exported: str, length: str, batch: str, tokens: str) -> None:
    """Prepare, then serve commands until stdin ends."""
    answers = Answers.on_stdout()
    try:
        engine, ids = ENGINES[name], prompt(Path(folder), int(length), int(batch))
        started = time.perf_counter()
        generator = engine.load(Path(folder), Path(exported))
        load = time.perf_counter() - started
        first = generator.generate(ids, int(tokens))
        answers.send({"load": load, **asdict(first), "peak_mb": _peak_megabytes()})
        for line in sys.stdin:
            if line.strip() == "round":
                answers.send(asdict(generator.generate(ids, int(tokens))))
            else:
                told = {"details": generator.details(), "versions": versions(engine.packages)}
                answers.send({**told, "peak_mb": _peak_megabytes()})
    except Exception as error:
        answers.send({"error": f"{type(error).__name__}: {error}"})


def _peak_megabytes() -> float:
    """The most that this process has held in memory."""
    found = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024 / 1e6


if __name__ == "__main__":
    main(*sys.argv[1:])
