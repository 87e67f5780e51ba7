"""Sessions shared by equal graphs over the same weights."""

from __future__ import annotations

import hashlib
from typing import Any
from weakref import WeakValueDictionary

from sardonyx.engines import Engine, Job, Runner
from sardonyx.run.snapshot import Snapshot

_live: WeakValueDictionary[Any, Any] = WeakValueDictionary()


def shared_runner(engine: Engine, job: Job, snapshot: Snapshot) -> Runner:
    """A runner that is alive for the same model, options and weights, or a new one."""
    digest = hashlib.sha256(job.model).digest()
    key = (engine.name, digest, job.options.artifact_key(), str(job.device), snapshot.identity())
    runner = _live.get(key)
    if runner is None or not snapshot.same_contents(runner.snapshot):
        runner = engine.load(job)
        runner.snapshot = snapshot
        _live[key] = runner
    found: Runner = runner
    return found


def clear() -> None:
    """Forget every live session; they end with their last user."""
    _live.clear()
