"""Cache on disk what engines compile, and load it from there."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path

from sardonyx.cache.disk import DiskCache, default_cache
from sardonyx.cache.machine import key_of
from sardonyx.engines import Engine, Job, Runner
from sardonyx.errors import EngineError
from sardonyx.telemetry.progress import show_progress

log = logging.getLogger(__name__)


def load(engine: Engine, job: Job) -> Runner:
    """Load a model: compile it, unless the disk cache already has the artifact."""
    identity = engine.identity(job.options)
    if identity is None:
        return engine.load(job, None)
    compilation = _Compilation(engine, job)
    cache = default_cache(job.options)
    if cache is not None:
        return _load_cached(cache, _key(engine, identity, job), compilation)
    with tempfile.TemporaryDirectory(prefix="sardonyx-") as folder:
        compilation.write(Path(folder))
        return engine.load(job, Path(folder))


def _load_cached(cache: DiskCache, key: str, compilation: _Compilation) -> Runner:
    """Load from the cache. If a cached artifact does not load, compile it once more and replace it."""
    engine, job, about = compilation.engine, compilation.job, compilation.about
    folder = cache.get_or_make(key, compilation.write, about)
    generation = cache.generation(key)
    try:
        return engine.load(job, folder)
    except (EngineError, OSError) as error:
        if compilation.done:
            cache.drop(key)
            raise
        log.warning("the cached artifact of %s does not load; compiling again: %s", engine.name, error)
    return engine.load(job, cache.get_or_make(key, compilation.write, about, stale=generation or "gone"))


class _Compilation:
    """One compilation, which records whether it ran."""

    def __init__(self, engine: Engine, job: Job) -> None:
        self.engine, self.job, self.done = engine, job, False

    @property
    def about(self) -> Mapping[str, str]:
        """The metadata that a listing of the cache shows."""
        return {"what": "artifact", "engine": self.engine.name, "device": str(self.job.device)}

    def write(self, folder: Path) -> None:
        self.done = True
        with show_progress(f"compiling with {self.engine.name}"):
            self.engine.compile(self.job, folder)


def _key(engine: Engine, identity: str, job: Job) -> str:
    """Return the cache key of the artifact. An engine's `identity` may miss an option, so options are included too."""
    return key_of(
        engine=engine.name,
        identity=identity,
        model=job.digest(),
        device=str(job.device),
        fixed=repr(sorted(job.fixed)),
        compile_options=job.options.compile_options,
        engine_options=repr(sorted((job.options.engine_options or {}).items())),
    )
