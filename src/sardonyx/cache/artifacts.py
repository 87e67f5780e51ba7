"""What engines compile, kept on disk for the next process."""

from __future__ import annotations

import tempfile
from pathlib import Path

from sardonyx.engines import Engine, Job, Runner


def load(engine: Engine, job: Job) -> Runner:
    """A runner for the model: compiled before, or compiled now."""
    if engine.identity(job.options) is None:
        return engine.load(job, None)
    with tempfile.TemporaryDirectory(prefix="sardonyx-") as folder:
        engine.compile(job, Path(folder))
        return engine.load(job, Path(folder))
