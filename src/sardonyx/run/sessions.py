"""Sessions shared by equal graphs over the same weights."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from sardonyx.engines import Engine, Job, Runner, artifacts
from sardonyx.run.snapshot import Snapshot


@dataclass(eq=False)
class Held:
    """A runner with what it was built from; alive as long as a compiled graph holds it."""

    runner: Runner
    snapshot: Snapshot


_live: WeakValueDictionary[Any, Held] = WeakValueDictionary()


def shared_runner(engine: Engine, job: Job, snapshot: Snapshot) -> Held:
    """A runner that is alive for the same model, options and weights, or a new one."""
    digest = hashlib.sha256(job.model).digest()
    key = (engine.name, digest, job.options.artifact_key(), str(job.device), job.stream, snapshot.identity())
    held = _live.get(key)
    if held is None or not snapshot.same_contents(held.snapshot):
        held = _live[key] = Held(artifacts.load(engine, job), snapshot)
    return held


def clear() -> None:
    """Forget every live session; they end with their last user."""
    _live.clear()
