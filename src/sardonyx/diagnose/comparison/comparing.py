"""`compare` and `find_nonfinite`: find where two ways of running a model diverge, and where NaN originates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sardonyx.diagnose.comparison.errors import ValueStats, error_of, tolerance_of, value_stats
from sardonyx.diagnose.comparison.result import Comparison, Row, rank_rows
from sardonyx.diagnose.comparison.run_config import PLAIN, RunConfig, RunConfigLike
from sardonyx.diagnose.comparison.subject import Model, Place, Subject, subject_of
from sardonyx.diagnose.comparison.trace import Trace, trace_of
from sardonyx.engines.registry import opset_of_files
from sardonyx.errors import OptionError
from sardonyx.model_files import is_onnx

_BUDGET = 2**28
"""Default limit of the bytes of values in memory, for each way."""

Progress = Callable[[str], object]


def compare(
    model: Model,
    *args: Any,
    ways: Sequence[RunConfigLike] | None = None,
    also: Sequence[Any] = (),
    tolerance: float | None = None,
    budget: int = _BUDGET,
    progress: Progress | None = None,
    **kwargs: Any,
) -> Comparison:
    """Run a model in two ways, compare every value that both have, and find where the error begins.

    The model is a module or a function, which is exported, or ONNX: a path, a proto, an `onnx_ir.Model`, a `Program`.
    For ONNX the arguments are its inputs, in order or by name; by default they are random.

    `ways` are two ways to run it, see `RunConfig`: by default torch and onnxruntime; for ONNX, onnxruntime without and
    with rewrites. The first is the reference. `also` are further calls: the largest error counts. `tolerance` is
    relative to the largest magnitude; by default that of `verify`. `budget` limits the bytes of values in memory:
    values that do not fit are computed by further runs.

    >>> def model(x):
    ...     return (x * 100.0).exp().log() / 100.0
    >>> found = compare(model, torch.tensor([0.5, 1.0]), ways=("torch:float64", "torch"))
    >>> print(found.first.place.operator)
    aten.exp.default
    """
    first, second = _two_configs(ways, model)
    report_progress = progress or _no_progress
    report_progress("exporting the model")
    subject = subject_of(model, args, kwargs, also=also, opset=opset_for([first, second]), translator=_translator(ways))
    report_progress(f"preparing {first}")
    expected = trace_of(first, subject, budget)
    report_progress(f"preparing {second}")
    actual = trace_of(second, subject, budget)
    order = [place for place in subject.places.values() if place.key in expected.keys and place.key in actual.keys]
    keys = [place.key for place in order]
    measured: dict[str, Row] = {}
    for call in range(len(subject.calls)):
        pairs = zip(order, expected.values(keys, call), actual.values(keys, call), strict=True)
        for index, (place, a, b) in enumerate(pairs):
            report_progress(f"comparing value {index + 1} of {len(keys)}, call {call + 1} of {len(subject.calls)}")
            if (expected.is_substitute(place.key) or actual.is_substitute(place.key)) and not _are_comparable(a, b):
                continue
            row = _row(place, a, b, tolerance, call)
            if place.key not in measured or not row.error <= measured[place.key].error:
                measured[place.key] = row
    graph = actual if not second.is_torch else expected
    order = [place for place in order if place.key in measured]
    rows = rank_rows(order, measured, _parents(graph, list(measured)), subject.outputs)
    errors, differs = _output_errors(expected, actual, subject, tolerance)
    return Comparison((str(first), str(second)), rows, errors, differs, _tracing_error(expected, subject, tolerance))


def _no_progress(line: str) -> None:
    pass


def _two_configs(ways: Sequence[RunConfigLike] | None, model: Model) -> tuple[RunConfig, RunConfig]:
    chosen = ways or ((PLAIN, "onnxruntime") if is_onnx(model) else ("torch", "onnxruntime"))
    if isinstance(chosen, str) or len(chosen) != 2:
        raise OptionError(f"ways is {chosen!r}", hint="give two, as ways=('torch', 'onnxruntime')")
    return RunConfig.of(chosen[0]), RunConfig.of(chosen[1])


def opset_for(configs: Sequence[RunConfig]) -> int | None:
    """Return the newest opset that every engine supports."""
    chosen = [config.options for config in configs if config.options is not None]
    if not chosen:
        return None
    return min(map(opset_of_files, chosen))


def _translator(ways: Sequence[RunConfigLike] | None) -> str:
    """Return the translator of all ways: they must use the same graph."""
    options = (config.options for config in map(RunConfig.of, ways or ()))
    translators = {chosen.translator for chosen in options if chosen is not None}
    if len(translators) > 1:
        raise OptionError(
            "the two ways have different translators, so that their graphs differ",
            hint="compare each with torch",
        )
    return translators.pop() if translators else "sardonyx"


def _are_comparable(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.is_floating_point() == b.is_floating_point()


def _row(place: Place, expected: torch.Tensor, actual: torch.Tensor, tolerance: float | None, call: int) -> Row:
    allowed = tolerance_of(actual) if tolerance is None else tolerance
    stats = value_stats(expected), value_stats(actual)
    return Row(place, error_of(actual, expected), 0.0, allowed, call, stats)


def _parents(trace: Trace, keys: Sequence[str]) -> dict[str, list[str]]:
    """Return for each value its nearest ancestors among the compared values."""
    known = {trace.keys[key]: key for key in reversed(keys)}
    above: dict[str, frozenset[str]] = {}

    def nearest(name: str) -> frozenset[str]:
        """Without recursion: graphs are deep."""
        stack = [name]
        while stack:
            here = stack[-1]
            missing = [x for x in trace.reads(here) if x not in known and x not in above]
            if missing:
                stack += missing
                continue
            stack.pop()
            ancestors = (frozenset({known[x]}) if x in known else above[x] for x in trace.reads(here))
            above[here] = frozenset().union(*ancestors)
        return above.pop(name) if name in known else above[name]

    return {key: sorted(nearest(trace.keys[key]) - {key}) for key in keys}


def _output_errors(
    expected: Trace, actual: Trace, subject: Subject, tolerance: float | None
) -> tuple[dict[str, float], bool]:
    errors = dict.fromkeys(subject.outputs, 0.0)
    differs = False
    for call in range(len(subject.calls)):
        for name, a, b in zip(subject.outputs, expected.outputs(call), actual.outputs(call), strict=True):
            error = error_of(b, a)
            errors[name] = error if not error <= errors[name] else errors[name]
            differs |= not error <= (tolerance_of(b) if tolerance is None else tolerance)
    return errors, differs


def _tracing_error(trace: Trace, subject: Subject, tolerance: float | None) -> float:
    """Return the error of torch's traced graph against the module; 0 if within the tolerance."""
    if not trace.config.is_torch or trace.config.dtype is not None:
        return 0.0
    pairs = zip(trace.values(subject.outputs, 0), trace.outputs(0), strict=True)
    errors = [(error_of(a, b), tolerance_of(b) if tolerance is None else tolerance) for a, b in pairs]
    return max((error for error, allowed in errors if not error <= allowed), default=0.0)


# NaN and Inf


@dataclass(frozen=True)
class Nonfinite:
    """A value with NaN or Inf that is computed from values without any."""

    place: Place
    kind: str
    """"NaN" or "Inf"."""
    call: int
    stats: ValueStats
    reads: Mapping[str, ValueStats]
    """Statistics of the values that it is computed from."""

    def __str__(self) -> str:
        read = "; ".join(f"{name}: {stats}" for name, stats in self.reads.items())
        lines = [f"{self.place} makes {self.kind}: {self.stats}", *([f"  from {read}"] if read else [])]
        return "\n".join([*lines, *([f"  at: {self.place.where}"] if self.place.where else [])])


def find_nonfinite(
    model: Model,
    *args: Any,
    way: RunConfigLike | None = None,
    also: Sequence[Any] = (),
    budget: int = _BUDGET,
    progress: Progress | None = None,
    **kwargs: Any,
) -> list[Nonfinite]:
    """Find the origins of NaN and Inf: every value that has some and is computed from values that have none.

    Origins of NaN come first, in the order of computation, including NaN computed from Inf. The model and its arguments
    are as in `compare`; `way` is torch by default, for ONNX onnxruntime without rewrites.

    >>> (found,) = find_nonfinite(lambda x: (x - 1).log() * 2, torch.tensor([0.5, 3.0]))
    >>> print(found.place.operator, found.kind)
    aten.log.default NaN
    """
    chosen = RunConfig.of(way or (PLAIN if is_onnx(model) else "torch"))
    subject = subject_of(model, args, kwargs, also=also, opset=opset_for([chosen]), translator=_translator([chosen]))
    trace = trace_of(chosen, subject, budget)
    keys = [key for key in subject.places if key in trace.keys]
    parents = _parents(trace, keys)
    sources: list[Nonfinite] = []
    for call in range(len(subject.calls)):
        inputs = {name: value_stats(x) for name, x in subject.calls[call].items()}
        sources += _find_sources(subject, trace, keys, parents, inputs, call, progress or _no_progress)
    return sorted(sources, key=lambda source: (source.kind != "NaN", source.call))


def _find_sources(
    subject: Subject,
    trace: Trace,
    keys: Sequence[str],
    parents: Mapping[str, Sequence[str]],
    inputs: Mapping[str, ValueStats],
    call: int,
    report_progress: Progress,
) -> Iterator[Nonfinite]:
    known: dict[str, ValueStats] = {}
    for index, (key, value) in enumerate(zip(keys, trace.values(keys, call), strict=True)):
        report_progress(f"checking value {index + 1} of {len(keys)}")
        known[key] = stats = value_stats(value)
        reads = {name: known[name] for name in parents[key]}
        reads |= {name: inputs[name] for name in trace.reads(trace.keys[key]) if name in inputs}
        if stats.nan and not any(read.nan for read in reads.values()):
            yield Nonfinite(subject.places[key], "NaN", call, stats, reads)
        elif stats.inf and all(read.finite for read in reads.values()):
            yield Nonfinite(subject.places[key], "Inf", call, stats, reads)
