"""`compare` and `find_nonfinite`: where two ways of running a model part, and where a NaN is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sardonyx.diagnose.comparison.errors import ValueStats, error_of, tolerance_of, value_stats
from sardonyx.diagnose.comparison.result import Comparison, Row, rank_rows
from sardonyx.diagnose.comparison.run_config import PLAIN, RunConfig, RunConfigLike
from sardonyx.diagnose.comparison.subject import Model, Place, Subject, is_onnx, subject_of
from sardonyx.diagnose.comparison.trace import Trace, trace_of
from sardonyx.engines.registry import opset_of_files
from sardonyx.errors import OptionError

_BUDGET = 2**28
"""Bytes of values that are held at a time, of each way."""

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
    """Run a model in two ways, compare every value that both have, and say where the error begins.

    The model is a module or a function, which is exported, or ONNX: a path, a proto, an `onnx_ir.Model`, a `Program`.
    For ONNX the arguments are its inputs, in order or by name; where there are none, they are made up.

    `ways` are two ways, see `RunConfig`: by default torch and onnxruntime, for ONNX onnxruntime without and with rewrites.
    The first counts as right. `also` are further calls: the worst of all counts. `tolerance` is what counts as a
    difference, relative to the largest magnitude; by default what `verify` allows. `budget` is how many bytes of values
    are held at a time: what does not fit is fetched by further runs.

    >>> def model(x):
    ...     return (x * 100.0).exp().log() / 100.0
    >>> found = compare(model, torch.tensor([0.5, 1.0]), ways=("torch:float64", "torch"))
    >>> print(found.first.place.operator)
    aten.exp.default
    """
    first, second = _two_configs(ways, model)
    tell = progress or _no_progress
    tell("exporting the model")
    subject = subject_of(model, args, kwargs, also=also, opset=opset_for([first, second]), translator=_translator(ways))
    tell(f"preparing {first}")
    expected = trace_of(first, subject, budget)
    tell(f"preparing {second}")
    found = trace_of(second, subject, budget)
    order = [place for place in subject.places.values() if place.key in expected.keys and place.key in found.keys]
    keys = [place.key for place in order]
    measured: dict[str, Row] = {}
    for call in range(len(subject.calls)):
        pairs = zip(order, expected.values(keys, call), found.values(keys, call), strict=True)
        for index, (place, a, b) in enumerate(pairs):
            tell(f"comparing value {index + 1} of {len(keys)}, call {call + 1} of {len(subject.calls)}")
            if (expected.stands_in(place.key) or found.stands_in(place.key)) and not _are_comparable(a, b):
                continue
            row = _row(place, a, b, tolerance, call)
            if place.key not in measured or not row.error <= measured[place.key].error:
                measured[place.key] = row
    graph = found if not second.is_torch else expected
    order = [place for place in order if place.key in measured]
    rows = rank_rows(order, measured, _parents(graph, list(measured)), subject.outputs)
    errors, differs = _output_errors(expected, found, subject, tolerance)
    return Comparison((str(first), str(second)), rows, errors, differs, _tracing_error(expected, subject, tolerance))


def _no_progress(line: str) -> None:
    pass


def _two_configs(ways: Sequence[RunConfigLike] | None, model: Model) -> tuple[RunConfig, RunConfig]:
    chosen = ways or ((PLAIN, "onnxruntime") if is_onnx(model) else ("torch", "onnxruntime"))
    if isinstance(chosen, str) or len(chosen) != 2:
        raise OptionError(f"ways is {chosen!r}", hint="give two, as ways=('torch', 'onnxruntime')")
    return RunConfig.of(chosen[0]), RunConfig.of(chosen[1])


def opset_for(ways: Sequence[RunConfig]) -> int | None:
    """The opset that every engine takes."""
    chosen = [way.options for way in ways if way.options is not None]
    if not chosen:
        return None
    return min(map(opset_of_files, chosen))


def _translator(ways: Sequence[RunConfigLike] | None) -> str:
    """Whose translations are used: of one model there is one graph."""
    named = {way.options.translator for way in map(RunConfig.of, ways or ()) if way.options is not None}
    if len(named) > 1:
        raise OptionError(
            "the two ways have different translators, so that their graphs have nothing in common",
            hint="compare each with torch",
        )
    return named.pop() if named else "sardonyx"


def _are_comparable(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.is_floating_point() == b.is_floating_point()


def _row(place: Place, expected: torch.Tensor, found: torch.Tensor, tolerance: float | None, call: int) -> Row:
    allowed = tolerance_of(found) if tolerance is None else tolerance
    health = value_stats(expected), value_stats(found)
    return Row(place, error_of(found, expected), 0.0, allowed, call, health)


def _parents(trace: Trace, keys: Sequence[str]) -> dict[str, list[str]]:
    """For each value the nearest ones that it is computed from and that are compared too."""
    known = {trace.keys[key]: key for key in reversed(keys)}
    above: dict[str, frozenset[str]] = {}

    def nearest(name: str) -> frozenset[str]:
        """Walks up without recursion: graphs are deep."""
        stack = [name]
        while stack:
            here = stack[-1]
            lacking = [x for x in trace.reads(here) if x not in known and x not in above]
            if lacking:
                stack += lacking
                continue
            stack.pop()
            found = (frozenset({known[x]}) if x in known else above[x] for x in trace.reads(here))
            above[here] = frozenset().union(*found)
        return above.pop(name) if name in known else above[name]

    return {key: sorted(nearest(trace.keys[key]) - {key}) for key in keys}


def _output_errors(
    expected: Trace, found: Trace, subject: Subject, tolerance: float | None
) -> tuple[dict[str, float], bool]:
    errors = dict.fromkeys(subject.outputs, 0.0)
    differs = False
    for call in range(len(subject.calls)):
        for name, a, b in zip(subject.outputs, expected.outputs(call), found.outputs(call), strict=True):
            error = error_of(b, a)
            errors[name] = error if not error <= errors[name] else errors[name]
            differs |= not error <= (tolerance_of(b) if tolerance is None else tolerance)
    return errors, differs


def _tracing_error(trace: Trace, subject: Subject, tolerance: float | None) -> float:
    """How far torch's graph is from the module, where that is more than rounding."""
    if not trace.way.is_torch or trace.way.dtype is not None:
        return 0.0
    pairs = zip(trace.values(subject.outputs, 0), trace.outputs(0), strict=True)
    found = [(error_of(a, b), tolerance_of(b) if tolerance is None else tolerance) for a, b in pairs]
    return max((error for error, allowed in found if not error <= allowed), default=0.0)


# NaN and Inf


@dataclass(frozen=True)
class Nonfinite:
    """A value with NaN or Inf that is computed from values without."""

    place: Place
    kind: str
    """"NaN" or "Inf"."""
    call: int
    health: ValueStats
    reads: Mapping[str, ValueStats]
    """What is in the values that it is computed from."""

    def __str__(self) -> str:
        read = "; ".join(f"{name}: {health}" for name, health in self.reads.items())
        lines = [f"{self.place} makes {self.kind}: {self.health}", *([f"  from {read}"] if read else [])]
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
    """Where a model makes NaN or Inf: every value that has some, computed from values that have none.

    Those that make NaN come first, in the order they are computed in; a NaN that is made from Inf is one of them. The
    model and its arguments are as in `compare`; `way` is torch by default, for ONNX onnxruntime without rewrites.

    >>> (found,) = find_nonfinite(lambda x: (x - 1).log() * 2, torch.tensor([0.5, 3.0]))
    >>> print(found.place.operator, found.kind)
    aten.log.default NaN
    """
    chosen = RunConfig.of(way or (PLAIN if is_onnx(model) else "torch"))
    subject = subject_of(model, args, kwargs, also=also, opset=opset_for([chosen]), translator=_translator([chosen]))
    trace = trace_of(chosen, subject, budget)
    keys = [key for key in subject.places if key in trace.keys]
    parents = _parents(trace, keys)
    found: list[Nonfinite] = []
    for call in range(len(subject.calls)):
        given = {name: value_stats(x) for name, x in subject.calls[call].items()}
        found += _find_sources(subject, trace, keys, parents, given, call, progress or _no_progress)
    return sorted(found, key=lambda made: (made.kind != "NaN", made.call))


def _find_sources(
    subject: Subject,
    trace: Trace,
    keys: Sequence[str],
    parents: Mapping[str, Sequence[str]],
    given: Mapping[str, ValueStats],
    call: int,
    tell: Progress,
) -> Iterator[Nonfinite]:
    known: dict[str, ValueStats] = {}
    for index, (key, value) in enumerate(zip(keys, trace.values(keys, call), strict=True)):
        tell(f"looking at value {index + 1} of {len(keys)}")
        known[key] = here = value_stats(value)
        reads = {name: known[name] for name in parents[key]}
        reads |= {name: given[name] for name in trace.reads(trace.keys[key]) if name in given}
        if here.nan and not any(health.nan for health in reads.values()):
            yield Nonfinite(subject.places[key], "NaN", call, here, reads)
        elif here.inf and all(health.finite for health in reads.values()):
            yield Nonfinite(subject.places[key], "Inf", call, here, reads)
