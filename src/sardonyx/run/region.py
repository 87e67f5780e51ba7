"""A compiled region: its LRU cache of sessions, the choice of one for a call, and when to build another."""

from __future__ import annotations

import logging
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any

import onnx_ir as ir
import torch
from torch.utils import _pytree as pytree

from sardonyx import fork
from sardonyx.cache.lru import LRU
from sardonyx.capture.regions import Region, Result
from sardonyx.engines.engine import Engine, EngineChoice, Job, Runner
from sardonyx.errors import MissingKernel, UnquantizableWeight
from sardonyx.options import Options
from sardonyx.precision.metric import within
from sardonyx.precision.plan import FLOAT32, Plan
from sardonyx.run.binding import Binding
from sardonyx.run.builds import TRACE, TRAINING, Assumptions, BuildFunction, Built, Recipe
from sardonyx.run.precision_subject import Candidate
from sardonyx.run.random_inputs import fixed_seed
from sardonyx.run.region_precision import choose_precision, options_with
from sardonyx.run.sessions import OpenSession, open_session
from sardonyx.run.snapshot import EDITS_BEFORE_THAW, NumberSnapshot
from sardonyx.sizes import dims_of
from sardonyx.telemetry import dump, repro
from sardonyx.telemetry.report import Fallback, GraphReport, RegionReport, observed
from sardonyx.telemetry.report_page import ReportPage, page_of
from sardonyx.telemetry.source import source_of
from sardonyx.telemetry.verify import verify

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Session:
    shared: OpenSession
    runner: Runner
    binding: Binding
    numbers: NumberSnapshot

    def run(self, args: Sequence[Any]) -> Sequence[Any]:
        """Return the region's results for the arguments of a call."""
        return self.binding.call(self.runner, args)

    def run_with_fixed_seed(self, args: Sequence[Any]) -> Sequence[Any]:
        """Run with the same random numbers each time, leaving the caller's random generator unchanged."""
        if not self.binding.draws:
            return self.run(args)
        with fixed_seed():
            return self.run(args)

    def fits(self, args: Sequence[Any]) -> bool:
        """Whether the weights and numbers that the session was built for are those of the call."""
        return self.shared.snapshot.matches(args) and not (self.numbers.values and self.numbers.changed(args))


@dataclass(frozen=True)
class BareSession:
    """A session that can be called directly, without the checks and conversions of its region."""

    runner: Runner
    inputs: tuple[int, ...]
    """The argument of each input."""
    results: tuple[int | None, ...]
    """The output of each result; None for a result that is None."""
    reshaped: frozenset[int]
    """Outputs whose shape has to be restored."""


class CompiledRegion(torch.nn.Module):
    """A region as a callable; a module so that FX can call it."""

    def __init__(self, recipe: Recipe, build: BuildFunction, frozen: frozenset[int]) -> None:
        super().__init__()
        self._recipe, self._build = recipe, build
        self._region, self._kind, self._options = recipe.region, recipe.kind, recipe.options
        self._graph_report, self._report = recipe.graph_report, recipe.report
        self._engine = recipe.engine
        self._sessions = LRU[_Session](recipe.options.cache_size)
        self._current: _Session | None = None
        self._built: tuple[Built, NumberSnapshot] | None = None
        self._lock = fork.Lock()
        self._frozen = frozen
        self._constant_numbers = frozenset(_number_inputs(recipe.region)) if recipe.options.freeze else frozenset()
        self._edits = 0
        self._chosen: CompiledRegion | None = None
        self._in_float32: CompiledRegion | None = None
        self._missing: MissingKernel | None = None

    def run_boxed(self, args: list[Any]) -> Sequence[Any]:
        """Call with a list of arguments, and clear the list so that unused tensors can be freed."""
        try:
            results = self._run(args)
        except Exception as error:
            weights = self._region.weights
            repro.write_repro(error, self._options, self._region.graph, args, kind=self._kind, weights=weights)
            raise
        args.clear()
        return results

    run_boxed._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd's convention

    def _run(self, args: list[Any]) -> Sequence[Any]:
        try:
            session = self._current
            if session is None or not session.fits(args):
                session = self._select_session(args)
            return session.run(args)
        except MissingKernel as error:
            if self._options.fallback == "error":
                raise
            return self._run_in_torch(error, args)

    def _run_in_torch(self, error: MissingKernel, args: Sequence[Any]) -> Sequence[Any]:
        """Run the region in torch: its dtypes passed every check, but the engine lacks a kernel."""
        if self._missing is None:
            self._missing, self._current = error, None
            self._note_missing(error)
        results = self._region.graph(*args)
        return (results,) if self._region.single else results

    def _note_missing(self, error: MissingKernel) -> None:
        if self._options.fallback == "warn":
            log.warning("in torch: a region of the %s graph: %s", self._kind, error.what)
        for node in self._region.graph.graph.nodes:
            if node.op == "call_function" and node.target is not operator.getitem:
                self._graph_report.note_fallback(Fallback(str(node.target), error.what, source_of(node)), warn=False)

    def bare_session(self) -> BareSession | None:
        """Return the session of the last call, if calling it directly gives the region's results."""
        session = self._current
        if session is None or session.numbers.values or not session.binding.is_plain:
            return None
        binding = session.binding
        results = tuple(result.output for result in binding.results)
        return BareSession(session.runner, binding.inputs, results, frozenset(binding.reshaped))

    def forward(self, *args: Any) -> Any:
        """Call the region as FX calls a module."""
        results = self.run_boxed(list(args))
        return results[0] if self._region.single else results

    def _select_session(self, args: Sequence[Any]) -> _Session:
        if self._missing is not None:
            raise self._missing.with_traceback(None)
        with self._lock:
            if isinstance(self._engine, EngineChoice):
                self._chosen = self._chosen or self._choose(self._engine, args)
                self._current = self._chosen._select_session(args)
                return self._current
            if self._chosen is None and self._lowers_precision():
                if self._is_empty(args):  # the precision is chosen by a call that has elements
                    return self._session_in_float32(args)
                self._chosen = self._choose_precision(args)
            if self._chosen is not None:
                try:
                    self._current = self._chosen._select_session(args)
                except UnquantizableWeight:
                    return self._session_in_float32(args)
                return self._current
            for key, session in self._sessions.items():
                if session.fits(args):
                    self._sessions.get(key)
                    self._current = session
                    return session
            return self._build_and_check(args)

    def _choose(self, choice: EngineChoice, args: Sequence[Any]) -> CompiledRegion:
        """Return this region compiled for the chosen engine; each candidate builds its own model."""
        translation, self._recipe = self._recipe.translation, replace(self._recipe, translation=None)
        assert translation is not None
        model = ir.to_proto(translation.model).SerializeToString()
        key = choice.key(model, args, self._options, self._region.device)
        engines = choice.candidates(self._options, self._region.device)
        candidates = {engine.name: partial(self._candidate, choice, engine, args) for engine in engines}
        expected = None if translation.random_inputs else lambda: pytree.tree_leaves(self._region.graph(*args))
        lowers = self._lowers_precision()
        agree = within(self._options.max_drop, self._options.metric) if lowers else None
        measurement, chosen = choice.choose(key, candidates, expected, self._options, agree)
        chosen.report.choice = measurement
        self._graph_report.replace(self._report, chosen.report)
        return chosen

    def _lowers_precision(self) -> bool:
        """Whether the precision of layers is to be chosen: not in training, where weights change."""
        wanted = self._options.precision != FLOAT32 and self._recipe.plan is None and self._kind != TRACE
        if wanted and self._kind in TRAINING:
            _warn_of_training(self._options.precision)
        return wanted and self._kind not in TRAINING

    def _is_lowered(self) -> bool:
        """Whether layers have a precision that was chosen: their weights are packed again after every edit."""
        return self._recipe.plan is not None and not self._recipe.plan.is_float32

    def _session_in_float32(self, args: Sequence[Any]) -> _Session:
        if self._in_float32 is None:
            self._in_float32 = self._with_plan(Plan())
        return self._in_float32._select_session(args)

    def _is_empty(self, args: Sequence[Any]) -> bool:
        """Whether an argument has no elements in this call, but may have some in others."""
        return any(isinstance(args[i], torch.Tensor) and not args[i].numel() for i in self._may_be_empty)

    @cached_property
    def _may_be_empty(self) -> Sequence[int]:
        """The arguments with symbolic sizes: others are empty in every call or in none."""
        vals = [node.meta.get("val") for node in self._region.graph.graph.find_nodes(op="placeholder")]
        return [i for i, val in enumerate(vals) if isinstance(val, torch.Tensor) and _is_symbolic(val)]

    def _with_plan(self, plan: Plan, *, native: bool = True) -> CompiledRegion:
        """Return this region with the precision of each layer, and without native kernels if they are left out."""
        verify = self._options.verify and plan.is_float32  # lower precision has a bound of its own
        own = options_with(plan, self._engine, self._options)
        options = Options.of(own, verify=verify, native=self._options.native if native else False)
        recipe = replace(self._recipe, plan=plan, options=options, report=RegionReport(), translation=None)
        return CompiledRegion(recipe, self._build, self._frozen)

    def _choose_precision(self, args: Sequence[Any]) -> CompiledRegion:
        """Return this region with the precision of each layer chosen by the results for these arguments."""
        self._recipe = replace(self._recipe, translation=None)

        def candidate(plan: Plan, *, native: bool = True) -> Candidate:
            region = self._with_plan(plan, native=native)
            region._current_build(args)
            return Candidate(region, [lambda: region._select_session(args).run_with_fixed_seed(args)])

        choice, chosen = choose_precision(candidate, self._engine, args, self._options, self._region.device)
        region: CompiledRegion = chosen.model
        region._report.precision = choice
        self._graph_report.replace(self._report, region._report)
        return region

    @property
    def report(self) -> RegionReport:
        """The report of what runs, of the chosen engine or precision if there was a choice."""
        return self._report if self._chosen is None else self._chosen.report

    @property
    def built(self) -> Built | None:
        """The last build, of the chosen engine if there was a choice."""
        if self._chosen is not None:
            return self._chosen.built
        return None if self._built is None else self._built[0]

    def _candidate(self, choice: EngineChoice, engine: Engine, args: Sequence[Any]) -> tuple[CompiledRegion, Any]:
        """Return this region compiled for one engine, and a call of it with a fixed seed."""
        options = choice.options_for(engine, self._options)
        recipe = replace(self._recipe, engine=engine, options=options, report=RegionReport())
        region = CompiledRegion(recipe, self._build, self._frozen)
        return region, partial(region._select_session(args).run_with_fixed_seed, args)

    def _build_and_check(self, args: Sequence[Any]) -> _Session:
        first = self._current is None
        session = self._session(args)
        if first and self._options.verify and session.binding.draws:
            log.warning("a graph with random numbers cannot be verified")
        elif first and self._options.verify:
            verify(self._region.graph, args, session.run(args), lambda: self._trace(args))
        self._sessions.put(id(session), session)
        self._current = session
        return session

    def _session(self, args: Sequence[Any]) -> _Session:
        built, numbers = self._current_build(args)
        with self._graph_report.stage("engine"):
            job, opened = open_session(
                self._engine,
                built.model,
                built.graph,
                built.binding,
                args,
                self._options,
                device=self._region.device,
                libraries=built.libraries,
                records=self._options.cuda_graphs is True or self._kind not in TRAINING,
            )
        self._report.sessions += 1
        self._report.recordings, self._report.placement = opened.runner.recordings, opened.runner.placement
        session = _Session(opened, observed(job, opened.runner), built.binding, numbers)
        page = page_of(self._options)
        if page is not None and self._report.sessions == 1:
            self._measure_for_report(page, job, session, args)
        return session

    def _measure_for_report(self, page: ReportPage, job: Job, session: _Session, args: Sequence[Any]) -> None:
        """Measure for the HTML report, leaving the random generators unchanged."""
        why_not = page.why_not_compared(self._region.graph, bool(session.binding.draws))

        def errors() -> tuple[Mapping[str, float], float]:
            return page.compare_values(self._region.graph, args, self._trace(args), session.run(args))

        devices = [self._region.device] if self._region.device.type == "cuda" else []
        with self._graph_report.stage("report"), torch.random.fork_rng(devices=devices):
            page.measure_region(self._report, job, session.runner, session.binding.feeds(args), why_not or errors)
        page.write(self._options)

    def _current_build(self, args: Sequence[Any]) -> tuple[Built, NumberSnapshot]:
        """Return the current build: reused while only weights are edited, rebuilt when an assumption fails."""
        if self._built is not None:
            built, numbers = self._built
            changed = numbers.changed(args)
            if changed:
                log.info("a number that was a constant changed; it is an input from now on")
                self._constant_numbers -= frozenset(changed)
            elif built.binding.constant_arguments and not self._is_lowered() and self._edits_exceeded():
                log.info("weights keep changing; they are inputs from now on")
                self._frozen = frozenset()
            else:
                return self._built
        numbers = NumberSnapshot(sorted(self._constant_numbers), args)
        recipe, self._recipe = self._recipe, replace(self._recipe, translation=None)  # the build consumes it
        built = self._build(recipe, Assumptions(self._frozen, numbers.values))
        if self._options.dump:
            dump.dump(self._options.dump, self._kind, built.proto, built.binding.constants(args), self._region.graph)
        self._built = built, numbers
        return self._built

    def _edits_exceeded(self) -> bool:
        self._edits += 1
        return self._edits > EDITS_BEFORE_THAW

    def _trace(self, args: Sequence[Any]) -> dict[str, torch.Tensor]:
        """Return every node's value from the translation without rewrites, to find the first that differs."""
        nodes = [n for n in self._region.graph.graph.nodes if _is_traceable(n)]
        region = Region(
            self._region.graph,
            frozenset(),
            self._region.device,
            tuple(nodes),
            (None,) * len(nodes),
            tuple(Result(i, complex=node.meta["val"].dtype.is_complex) for i, node in enumerate(nodes)),
        )
        options = Options.of(self._options, optimize="none", verify=False, dump=None, report=None, repro=None)
        report = GraphReport("trace", 0)
        recipe = replace(
            self._recipe, region=region, kind=TRACE, options=options, graph_report=report, report=RegionReport()
        )
        probe = CompiledRegion(replace(recipe, translation=None), self._build, frozenset())
        return dict(zip((n.name for n in nodes), probe.run_boxed(list(args)), strict=True))


@cache
def _warn_of_training(precision: str) -> None:
    log.warning("training steps run in float32: precision=%r is for calls under torch.no_grad()", precision)


def _is_symbolic(val: torch.Tensor) -> bool:
    return not all(isinstance(dim, int) for dim in dims_of(val))


def _is_traceable(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor)


def _number_inputs(region: Region) -> list[int]:
    """Return the inputs that are Python floats, which dynamo passes as 0-d float64 tensors."""
    numbers = []
    for index, node in enumerate(region.graph.graph.find_nodes(op="placeholder")):
        val = node.meta.get("val")
        if isinstance(val, torch.Tensor) and not val.dim() and val.dtype == torch.float64 and val.device.type == "cpu":
            numbers.append(index)
    return numbers if len(numbers) < 64 else []
