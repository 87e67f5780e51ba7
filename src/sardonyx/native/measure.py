"""Kernels timed against the nodes they stand for, as ONNX Runtime optimises these by itself."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir
import torch

from sardonyx.errors import EngineError, OptionError
from sardonyx.native.carve import Part
from sardonyx.native.report import Taken
from sardonyx.native.session import onnxruntime, open_session
from sardonyx.telemetry.verify import close, difference
from sardonyx.timing import in_turns

Feeds: TypeAlias = Mapping[str, np.ndarray[Any, Any]]
Tell: TypeAlias = Callable[[str], object]

_MADE_UP_SIZE = 16
_LEAST_OF_WHOLE = 15
_WORTH = 0.99
"""The part of a model's time that is left with kernels: what gains less cannot be told from chance."""
_ROUNDS, _ROUND_SECONDS, _MOST_SECONDS = 15, 2e-3, 1.0


def made_up(graph: ir.Graph) -> Feeds:
    """Inputs for a model, of which only their types and sizes are known; sizes with a name are 16."""
    draw = np.random.default_rng(0)
    return {str(x.name): _array(draw, x) for x in graph.inputs if not x.is_initializer()}


def _array(draw: np.random.Generator, value: ir.Value) -> np.ndarray[Any, Any]:
    if value.shape is None or value.dtype is None:
        raise OptionError(f"the sizes of the input {value.name!r} are unknown", hint=_GIVE)
    dims = [dim if isinstance(dim, int) else _MADE_UP_SIZE for dim in value.shape]
    kind = value.dtype.numpy()
    if kind.kind in "iub":
        return draw.integers(0, 2, dims).astype(kind)
    return draw.standard_normal(dims).astype(kind)


_GIVE = "give inputs to measure with: measure={name: array}"


class Trial:
    """A model, the same with kernels, and inputs to run both with."""

    def __init__(self, before: ir.Model, after: ir.Model, library: Path, feeds: Feeds) -> None:
        self._before, self._after, self._library, self._feeds = before, after, library, feeds

    def whole(self) -> tuple[float, float, bool]:
        """The seconds that a call takes, without and with kernels, and whether these are worth a library.

        They are if they gain something with all threads, and lose nothing with one. What others do on the machine moves
        times by more than kernels do, and both of a round alike: what counts is the median of their ratios.
        """
        alone, shared = (self._in_turns(threads) for threads in (1, 0))
        before, after = _medians(shared)
        return before, after, _ratio(alone) <= 1 and _ratio(shared) <= _WORTH

    def _in_turns(self, threads: int) -> list[list[float]]:
        sessions = [
            _session(self._before, None, threads=threads),
            _session(self._after, self._library, threads=threads),
        ]
        return _rounds([_call(session, self._feeds) for session in sessions], least=_LEAST_OF_WHOLE)

    def parts(self, parts: Sequence[Bounds], planned: Sequence[Taken], tell: Tell) -> list[Taken]:
        """What was planned, with what each kernel and its nodes take; and why not, where the nodes are better."""
        inner = self._inner(parts)
        known: dict[tuple[Any, ...], Taken] = {}
        tried = []
        for i, (bounds, taken) in enumerate(zip(parts, planned, strict=True)):
            if bounds.in_branch:  # judged with the whole model: what it reads is known only inside
                tried.append(taken)
                continue
            feeds = {name: inner[name] for name in bounds.reads}
            key = (taken.kernel, *(x.shape for x in feeds.values()))
            if key not in known:
                tell(f"measuring kernel {i + 1} of {len(parts)}")
                known[key] = self._part(bounds, taken, feeds)
            found = known[key]
            times = {name: getattr(found, name) for name in ("seconds_before", "seconds_after", "why_not")}
            tried.append(replace(taken, **times))
        return tried

    def _inner(self, parts: Sequence[Bounds]) -> Feeds:
        """What the parts read, when the model runs with the inputs."""
        model = self._before.clone()
        inputs = {str(x.name) for x in model.graph.inputs}
        values = ir.convenience.create_value_mapping(model.graph, include_subgraphs=False)
        read = (name for bounds in parts if not bounds.in_branch for name in bounds.reads)
        wanted = list(dict.fromkeys(name for name in read if name not in inputs))
        model.graph.outputs[:] = [values[name] for name in wanted] or model.graph.outputs[:]
        try:
            results = _session(model, None, optimised=False).run(wanted, dict(self._feeds)) if wanted else []
        except Exception as error:
            raise OptionError(f"onnxruntime cannot run the model to measure it: {error}", hint=_GIVE) from error
        return {**self._feeds, **dict(zip(wanted, results, strict=True))}

    def _part(self, bounds: Bounds, taken: Taken, feeds: Feeds) -> Taken:
        cut = [_cut(self._before, bounds.reads, bounds.gives), _cut(self._after, bounds.kernel_reads, bounds.gives)]
        try:
            sessions = [_session(cut[0], None), _session(cut[1], self._library)]
        except EngineError:
            return taken  # a type that only the kernel computes with: there is nothing to compare it with
        calls = [_call(session, feeds) for session in sessions]
        expected, found = (call() for call in calls)
        for name, x, y in zip(bounds.gives, found, expected, strict=True):
            ours, theirs = torch.from_numpy(x), torch.from_numpy(y)
            if not close(ours, theirs):
                return replace(taken, why_not=f"{name} differs from onnxruntime's by {difference(ours, theirs):.1e}")
        before, after = _medians(_rounds(calls))
        return replace(
            taken, seconds_before=before, seconds_after=after, why_not="slower than the nodes" if after > before else ""
        )


class Bounds:
    """Where a part begins and ends, by the names of values, which are the same before and after."""

    def __init__(self, part: Part, main: ir.Graph) -> None:
        self.in_branch = part.group[0].graph is not main
        self.reads = [str(x.name) for x in part.reads]
        kernels = {str(x.name) for x in part.kernel.region.inputs}
        self.kernel_reads = [name for name in self.reads if name in kernels]
        self.gives = [str(x.name) for x in part.gives]


def _cut(model: ir.Model, inputs: Collection[str], outputs: Collection[str]) -> ir.Model:
    graph = ir.convenience.extract(model.graph, list(inputs), list(outputs))
    return ir.Model(graph, ir_version=model.ir_version)


def _session(model: ir.Model, library: Path | None, *, optimised: bool = True, threads: int = 0) -> Any:
    ort = onnxruntime()
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads  # 0 for as many as there are cores
    options.log_severity_level = 4
    options.add_session_config_entry("session.force_spinning_stop", "1")  # the other's turn is next
    if not optimised:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return open_session(model, library, options)


def _call(session: Any, feeds: Feeds) -> Callable[[], Any]:
    given = {x.name: feeds[x.name] for x in session.get_inputs() if x.name in feeds}
    return lambda: session.run(None, given)


def _rounds(calls: Sequence[Callable[[], Any]], *, least: int = 3) -> list[list[float]]:
    """What each call takes, by rounds in which they take turns."""
    for call in calls:
        call()
    taken = in_turns(calls, rounds=_ROUNDS, least=least, limit=_MOST_SECONDS, round_seconds=_ROUND_SECONDS)
    return [list(row) for row in zip(*taken, strict=True)]


def _ratio(rounds: Sequence[Sequence[float]]) -> float:
    return median(with_kernels / without for without, with_kernels in rounds)


def _medians(rounds: Sequence[Sequence[float]]) -> list[float]:
    return [median(column) for column in zip(*rounds, strict=True)]
