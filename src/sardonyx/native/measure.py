"""Time kernels against the nodes they replace, as ONNX Runtime optimizes these."""

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
from sardonyx.native.partition import KernelGroup
from sardonyx.native.report import KernelEntry
from sardonyx.native.session import onnxruntime, open_session
from sardonyx.telemetry.verify import close, difference
from sardonyx.timing import in_turns

Feeds: TypeAlias = Mapping[str, np.ndarray[Any, Any]]
Progress: TypeAlias = Callable[[str], object]

_SYMBOLIC_SIZE = 16
_MIN_ROUNDS = 15
_MAX_RATIO = 0.99
"""The largest ratio of the model's time with kernels: smaller gains are noise."""
_ROUNDS, _ROUND_SECONDS, _MAX_SECONDS = 15, 2e-3, 1.0


def random_inputs(graph: ir.Graph) -> Feeds:
    """Return random inputs for a model by their types and shapes; symbolic sizes are 16."""
    rng = np.random.default_rng(0)
    return {str(x.name): _array(rng, x) for x in graph.inputs if not x.is_initializer()}


def _array(rng: np.random.Generator, value: ir.Value) -> np.ndarray[Any, Any]:
    if value.shape is None or value.dtype is None:
        raise OptionError(f"the shape of the input {value.name!r} is unknown", hint=_PASS_INPUTS)
    dims = [dim if isinstance(dim, int) else _SYMBOLIC_SIZE for dim in value.shape]
    kind = value.dtype.numpy()
    if kind.kind in "iub":
        return rng.integers(0, 2, dims).astype(kind)
    return rng.standard_normal(dims).astype(kind)


_PASS_INPUTS = "pass inputs to measure with: measure={name: array}"


class Measurement:
    """A model without and with kernels, and inputs to time both."""

    def __init__(self, before: ir.Model, after: ir.Model, library: Path, feeds: Feeds) -> None:
        self._before, self._after, self._library, self._feeds = before, after, library, feeds

    def time_model(self) -> tuple[float, float, bool]:
        """Return the seconds of a call without and with kernels, and whether the kernels are worth it.

        They are if they are faster with all threads, and not slower with one. Load on the machine changes times by more
        than kernels do, but affects both calls of a round alike: the median of their ratios decides.
        """
        single_threaded, all_threads = (self._in_turns(threads) for threads in (1, 0))
        before, after = _medians(all_threads)
        return before, after, _ratio(single_threaded) <= 1 and _ratio(all_threads) <= _MAX_RATIO

    def _in_turns(self, threads: int) -> list[list[float]]:
        sessions = [
            _session(self._before, None, threads=threads),
            _session(self._after, self._library, threads=threads),
        ]
        return _rounds([_call(session, self._feeds) for session in sessions], least=_MIN_ROUNDS)

    def time_parts(
        self, time_parts: Sequence[GroupBounds], planned: Sequence[KernelEntry], report_progress: Progress
    ) -> list[KernelEntry]:
        """Return the planned kernels with their times, and the reason if the nodes are better."""
        values = self._run_inputs(time_parts)
        known: dict[tuple[Any, ...], KernelEntry] = {}
        measured = []
        for i, (bounds, entry) in enumerate(zip(time_parts, planned, strict=True)):
            if bounds.in_branch:  # timed with the whole model: its inputs are known only inside
                measured.append(entry)
                continue
            feeds = {name: values[name] for name in bounds.inputs}
            key = (entry.kernel, *(x.shape for x in feeds.values()))
            if key not in known:
                report_progress(f"measuring kernel {i + 1} of {len(time_parts)}")
                known[key] = self._part(bounds, entry, feeds)
            result = known[key]
            times = {name: getattr(result, name) for name in ("seconds_before", "seconds_after", "why_not")}
            measured.append(replace(entry, **times))
        return measured

    def _run_inputs(self, time_parts: Sequence[GroupBounds]) -> Feeds:
        """Return the inputs of the parts, by running the model."""
        model = self._before.clone()
        inputs = {str(x.name) for x in model.graph.inputs}
        values = ir.convenience.create_value_mapping(model.graph, include_subgraphs=False)
        read = (name for bounds in time_parts if not bounds.in_branch for name in bounds.inputs)
        names = list(dict.fromkeys(name for name in read if name not in inputs))
        model.graph.outputs[:] = [values[name] for name in names] or model.graph.outputs[:]
        try:
            results = _session(model, None, optimized=False).run(names, dict(self._feeds)) if names else []
        except Exception as error:
            raise OptionError(f"onnxruntime cannot run the model to measure it: {error}", hint=_PASS_INPUTS) from error
        return {**self._feeds, **dict(zip(names, results, strict=True))}

    def _part(self, bounds: GroupBounds, entry: KernelEntry, feeds: Feeds) -> KernelEntry:
        models = [
            _extract(self._before, bounds.inputs, bounds.outputs),
            _extract(self._after, bounds.kernel_inputs, bounds.outputs),
        ]
        try:
            sessions = [_session(models[0], None), _session(models[1], self._library)]
        except EngineError:
            return entry  # ONNX Runtime does not support the type: nothing to compare with
        calls = [_call(session, feeds) for session in sessions]
        expected, results = (call() for call in calls)
        for name, x, y in zip(bounds.outputs, results, expected, strict=True):
            actual, reference = torch.from_numpy(x), torch.from_numpy(y)
            if not close(actual, reference):
                return replace(entry, why_not=f"{name} differs from onnxruntime by {difference(actual, reference):.1e}")
        before, after = _medians(_rounds(calls))
        return replace(
            entry, seconds_before=before, seconds_after=after, why_not="slower than the nodes" if after > before else ""
        )


class GroupBounds:
    """The inputs and outputs of a group by name, the same before and after splicing."""

    def __init__(self, part: KernelGroup, main: ir.Graph) -> None:
        self.in_branch = part.group[0].graph is not main
        self.inputs = [str(x.name) for x in part.inputs]
        kernel_names = {str(x.name) for x in part.kernel.region.inputs}
        self.kernel_inputs = [name for name in self.inputs if name in kernel_names]
        self.outputs = [str(x.name) for x in part.outputs]


def _extract(model: ir.Model, inputs: Collection[str], outputs: Collection[str]) -> ir.Model:
    graph = ir.convenience.extract(model.graph, list(inputs), list(outputs))
    return ir.Model(graph, ir_version=model.ir_version)


def _session(model: ir.Model, library: Path | None, *, optimized: bool = True, threads: int = 0) -> Any:
    ort = onnxruntime()
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads  # 0 for all cores
    options.log_severity_level = 4
    options.add_session_config_entry("session.force_spinning_stop", "1")  # the other session runs next
    if not optimized:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return open_session(model, library, options)


def _call(session: Any, feeds: Feeds) -> Callable[[], Any]:
    inputs = {x.name: feeds[x.name] for x in session.get_inputs() if x.name in feeds}
    return lambda: session.run(None, inputs)


def _rounds(calls: Sequence[Callable[[], Any]], *, least: int = 3) -> list[list[float]]:
    """Return the times of the calls by round, interleaved."""
    for call in calls:
        call()
    times = in_turns(calls, rounds=_ROUNDS, least=least, limit=_MAX_SECONDS, round_seconds=_ROUND_SECONDS)
    return [list(row) for row in zip(*times, strict=True)]


def _ratio(rounds: Sequence[Sequence[float]]) -> float:
    return median(with_kernels / without for without, with_kernels in rounds)


def _medians(rounds: Sequence[Sequence[float]]) -> list[float]:
    return [median(column) for column in zip(*rounds, strict=True)]
