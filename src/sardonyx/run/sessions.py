"""Live sessions, shared by equal models over the same weights."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import onnx_ir as ir
import torch

from sardonyx.engines import Engine, Job, Runner, artifacts
from sardonyx.engines.engine import Refit
from sardonyx.options import Options
from sardonyx.run.binding import Binding
from sardonyx.run.snapshot import Snapshot


@dataclass(eq=False)
class OpenSession:
    """A runner and a snapshot of its weights; alive as long as a compiled graph refers to it."""

    runner: Runner
    snapshot: Snapshot
    constants: Mapping[str, torch.Tensor]
    """The data of its weights: other sessions share what is packed."""


_live: WeakValueDictionary[Any, OpenSession] = WeakValueDictionary()


def open_session(
    engine: Engine,
    model: bytes,
    graph: ir.Graph,
    binding: Binding,
    args: Sequence[Any],
    options: Options,
    *,
    device: torch.device | None = None,
    libraries: Sequence[str] = (),
    refit: Refit | None = None,
    records: bool = True,
) -> tuple[Job, OpenSession]:
    """Return the job and a session for the current weights among these arguments."""
    job = Job.of(
        model,
        graph,
        options,
        weights=binding.constants(args),
        fixed=frozenset(i for i, index in enumerate(binding.inputs) if index in binding.fixed),
        device=device,
        libraries=libraries,
        refit=refit,
        records=records,
    )
    return job, _shared_session(engine, job, Snapshot(binding.constant_arguments, args))


def _shared_session(engine: Engine, job: Job, snapshot: Snapshot) -> OpenSession:
    """Return the live session for the same model, options and weights, or a new one."""
    digest = hashlib.sha256(job.model).digest()
    key = (engine.name, digest, job.options.artifact_key(), str(job.device), job.records, snapshot.identity())
    session = _live.get(key)
    if session is None or not snapshot.same_contents(session.snapshot):
        session = _live[key] = OpenSession(artifacts.load(engine, job), snapshot, job.weights)
    return session


def clear() -> None:
    """Stop sharing live sessions; each is freed with its last user."""
    _live.clear()
