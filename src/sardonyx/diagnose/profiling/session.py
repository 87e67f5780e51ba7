"""Profile ONNX Runtime sessions during normal calls of a model."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sardonyx.diagnose.profiling.events import Events, read
from sardonyx.engines.engine import Job, Runner
from sardonyx.engines.registry import find as find_engine
from sardonyx.options import Options
from sardonyx.telemetry.graph_snapshot import GraphSnapshot

_MAX_WEIGHT_BYTES = 2**30
"""Bytes of weights up to which a session writes its optimized model, to map fused nodes."""


def profiling_options(session_options: Any, folder: Path, weights: int) -> dict[str, Any]:
    """Return session options that write a profile to a folder, and the optimized model if it is small."""
    options = {**_as_mapping(session_options), "enable_profiling": True, "profile_file_prefix": str(folder / "profile")}
    return options | (
        {"optimized_model_filepath": str(folder / "optimized.onnx")} if weights <= _MAX_WEIGHT_BYTES else {}
    )


def _as_mapping(session_options: Any) -> Mapping[str, Any]:
    """Convert session options to a mapping."""
    if session_options is None or isinstance(session_options, Mapping):
        return session_options or {}
    from sardonyx.engines.onnxruntime import _changed_attributes  # the engine reads an object by it too

    return _changed_attributes(session_options, type(session_options)())


def events_of(session: Any, folder: Path, snapshot: GraphSnapshot, *, skip: int, calls: int) -> Events:
    """End the profile of a session, and read it."""
    file, optimized = Path(session.end_profiling()), folder / "optimized.onnx"
    return read(file, optimized if optimized.exists() else None, snapshot, skip, calls)


class ProfiledRunner(Runner):
    """A runner with a profiled copy: `is_profiled` selects which one is called; times are recorded."""

    def __init__(self, job: Job, runner: Runner) -> None:
        self.job, self._plain, self.engine = job, runner, job.options.engine
        self.snapshot = GraphSnapshot.of_bytes(job.model)
        self.seconds: list[float] = []
        self._folder = Path(tempfile.mkdtemp(prefix="sardonyx-profile-"))
        self._profiled = self._load() if find_engine(self.engine).takes_session_options else None
        self.is_profiled = False
        self._runs = self._skip = 0

    def begin(self) -> None:
        """Start counting: previous runs were warm-ups."""
        self._skip = self._runs

    def _load(self) -> Any:
        session_options = profiling_options(self.job.options.session_options, self._folder, self.snapshot.weights)
        options = Options.of(self.job.options, session_options=session_options)
        return find_engine(self.engine).load(replace(self.job, options=options), None)

    def __call__(self, inputs: Sequence[torch.Tensor | int]) -> list[torch.Tensor]:
        """Run once, and record the time."""
        runner = self._profiled if self.is_profiled and self._profiled is not None else self._plain
        self._runs += self.is_profiled
        started = time.perf_counter()
        try:
            return runner(inputs)
        finally:
            self.seconds.append(time.perf_counter() - started)

    def finish(self, calls: int) -> Events | None:
        """Return the events of the counted calls, and delete the profile's files; None for other engines."""
        try:
            if self._profiled is None:
                return None
            return events_of(self._profiled._session, self._folder, self.snapshot, skip=self._skip, calls=calls)
        finally:
            self.close()

    def close(self) -> None:
        """Drop the profiled session and its files."""
        if self._profiled is not None:
            self._profiled.close()
            self._profiled = None
        shutil.rmtree(self._folder, ignore_errors=True)
