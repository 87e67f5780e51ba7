"""A region that runs: its sessions, which of them fits a call, and when to build another."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import onnx_ir as ir
import torch
from torch.utils import _pytree as pytree

from sardonyx import fork
from sardonyx.cache.lru import LRU
from sardonyx.capture.regions import Region, Result
from sardonyx.engines.engine import Engine, EngineChoice, Job, Runner, current_stream
from sardonyx.errors import MissingKernel
from sardonyx.options import Options
from sardonyx.run.binding import Binding
from sardonyx.run.builds import Assumptions, Build, Built, Recipe
from sardonyx.run.sessions import Held, open_session
from sardonyx.run.snapshot import EDITS_BEFORE_THAW, Numbers
from sardonyx.telemetry import dump, repro
from sardonyx.telemetry.report import Fallback, GraphReport, RegionReport, observed
from sardonyx.telemetry.report_page import ReportPage, page_of
from sardonyx.telemetry.source import source_of
from sardonyx.telemetry.verify import verify

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Session:
    held: Held
    runner: Runner
    binding: Binding
    numbers: Numbers
    stream: int | None

    def run(self, args: Sequence[Any]) -> Sequence[Any]:
        """The region's results for the arguments of a call."""
        return self.binding.restore(self.runner(self.binding.feeds(args)), args)

    def run_again(self, args: Sequence[Any]) -> Sequence[Any]:
        """The same with the same random numbers each time, which are not taken from the caller's generator."""
        if not self.binding.draws:
            return self.run(args)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.run(args)

    def fits(self, args: Sequence[Any], stream: Callable[[], int | None]) -> bool:
        """Whether all that the session was built on still holds."""
        return (
            self.held.snapshot.holds(args)
            and not (self.numbers.values and self.numbers.changed(args))
            and (self.stream is None or self.stream == stream())
        )


@dataclass(frozen=True)
class Plain:
    """A session, as it is run by those who have no need for what a region does beside."""

    runner: Runner
    inputs: tuple[int, ...]
    """Which argument each of its inputs is."""
    results: tuple[int | None, ...]
    """Which output each result is; None for one that was not asked for."""
    reshaped: frozenset[int]
    """Outputs that are to be seen with other sizes."""


class CompiledRegion(torch.nn.Module):
    """A region as a callable. A module only so that FX can call it."""

    def __init__(self, recipe: Recipe, build: Build, frozen: frozenset[int]) -> None:
        super().__init__()
        self._recipe, self._build = recipe, build
        self._region, self._kind, self._options = recipe.region, recipe.kind, recipe.options
        self._graph_report, self._report = recipe.graph_report, recipe.report
        self._engine = recipe.engine
        self._sessions = LRU[_Session](recipe.options.cache_size)
        self._current: _Session | None = None
        self._built: tuple[Built, Numbers] | None = None
        self._lock = fork.Lock()
        self._frozen = frozen
        self._fixed = frozenset(_numbers(recipe.region)) if recipe.options.freeze else frozenset()
        self._edits = 0
        self._chosen: CompiledRegion | None = None
        self._missing: MissingKernel | None = None

    def run_boxed(self, args: list[Any]) -> Sequence[Any]:
        """Call with a list of arguments, which is cleared so that tensors nobody needs can go."""
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
            if session is None or not session.fits(args, self._stream):
                session = self._switch(args)
            return session.run(args)
        except MissingKernel as error:
            if self._options.fallback == "error":
                raise
            return self._run_in_torch(error, args)

    def _run_in_torch(self, error: MissingKernel, args: Sequence[Any]) -> Sequence[Any]:
        """The results of a region that passed every check of its dtypes, and yet the engine lacks a kernel for."""
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

    def plain(self) -> Plain | None:
        """How to run the session of the last call alone, if a call is nothing but that."""
        session = self._current
        if session is None or session.numbers.values or not session.binding.is_plain:
            return None
        binding = session.binding
        results = tuple(result.output for result in binding.results)
        return Plain(session.runner, binding.inputs, results, frozenset(binding.reshaped))

    def forward(self, *args: Any) -> Any:
        """Call as FX calls a module."""
        results = self.run_boxed(list(args))
        return results[0] if self._region.single else results

    def _stream(self) -> int | None:
        """Which stream a session must have been made for: torch's current one, on an accelerator."""
        return current_stream(self._region.device)

    def _switch(self, args: Sequence[Any]) -> _Session:
        if self._missing is not None:
            raise self._missing.with_traceback(None)
        with self._lock:
            if isinstance(self._engine, EngineChoice):
                self._chosen = self._chosen or self._choose(self._engine, args)
                self._current = self._chosen._switch(args)
                return self._current
            for key, session in self._sessions.items():
                if session.fits(args, self._stream):
                    self._sessions.get(key)
                    self._current = session
                    return session
            return self._build_and_check(args)

    def _choose(self, choice: EngineChoice, args: Sequence[Any]) -> CompiledRegion:
        """This region for the engine that is chosen: each candidate has a model of its own."""
        translation, self._recipe = self._recipe.translation, replace(self._recipe, translation=None)
        assert translation is not None
        model = ir.to_proto(translation.model).SerializeToString()
        key = choice.key(model, args, self._options, self._region.device)
        engines = choice.candidates(self._options, self._region.device)
        contenders = {engine.name: partial(self._contender, choice, engine, args) for engine in engines}
        expected = None if translation.draws else lambda: pytree.tree_leaves(self._region.graph(*args))
        made, chosen = choice.choose(key, contenders, expected, self._options)
        chosen._report.choice = made
        self._graph_report.replace(self._report, chosen._report)
        return chosen

    @property
    def built(self) -> Built | None:
        """What was built last, for the engine that was chosen where there was a choice."""
        if self._chosen is not None:
            return self._chosen.built
        return None if self._built is None else self._built[0]

    def _contender(self, choice: EngineChoice, engine: Engine, args: Sequence[Any]) -> tuple[CompiledRegion, Any]:
        """This region for one engine, and a call of it that draws the same random numbers each time."""
        options = choice.options_for(engine, self._options)
        recipe = replace(self._recipe, engine=engine, options=options, report=RegionReport())
        region = CompiledRegion(recipe, self._build, self._frozen)
        return region, partial(region._switch(args).run_again, args)

    def _build_and_check(self, args: Sequence[Any]) -> _Session:
        first = self._current is None
        session = self._session(args)
        if first and self._options.verify and session.binding.draws:
            log.warning("a graph that draws random numbers cannot be verified")
        elif first and self._options.verify:
            verify(self._region.graph, args, session.run(args), lambda: self._trace(args))
        self._sessions.put(id(session), session)
        self._current = session
        return session

    def _session(self, args: Sequence[Any]) -> _Session:
        built, numbers = self._model(args)
        with self._graph_report.stage("engine"):
            job, held = open_session(
                self._engine,
                built.model,
                built.graph,
                built.binding,
                args,
                self._options,
                device=self._region.device,
                libraries=built.libraries,
            )
        self._report.sessions += 1
        session = _Session(held, observed(job, held.runner), built.binding, numbers, job.stream)
        page = page_of(self._options)
        if page is not None and self._report.sessions == 1:
            self._study(page, job, session, args)
        return session

    def _study(self, page: ReportPage, job: Job, session: _Session, args: Sequence[Any]) -> None:
        """Measure for the HTML report, with the same random numbers again afterwards."""
        why_not = page.why_not_compared(self._region.graph, bool(session.binding.draws))

        def errors() -> tuple[Mapping[str, float], float]:
            return page.compare_values(self._region.graph, args, self._trace(args), session.run(args))

        devices = [self._region.device] if self._region.device.type == "cuda" else []
        with self._graph_report.stage("report"), torch.random.fork_rng(devices=devices):
            page.measure_region(self._report, job, session.runner, session.binding.feeds(args), why_not or errors)
        page.write(self._options)

    def _model(self, args: Sequence[Any]) -> tuple[Built, Numbers]:
        """What was built: kept while only weights are edited, built again when an assumption fails."""
        if self._built is not None:
            built, numbers = self._built
            changed = numbers.changed(args)
            if changed:
                log.info("a number that was taken for constant changed; it is an input from now on")
                self._fixed -= frozenset(changed)
            elif built.binding.weights and self._edits_exceeded():
                log.info("weights keep changing; they are inputs from now on")
                self._frozen = frozenset()
            else:
                return self._built
        numbers = Numbers(sorted(self._fixed), args)
        recipe, self._recipe = self._recipe, replace(self._recipe, translation=None)  # which the build changes
        built = self._build(recipe, Assumptions(self._frozen, numbers.values))
        if self._options.dump:
            weights = {name: args[index] for name, index in built.binding.weights.items()}
            dump.dump(self._options.dump, self._kind, built.proto, weights, self._region.graph)
        self._built = built, numbers
        return self._built

    def _edits_exceeded(self) -> bool:
        self._edits += 1
        return self._edits > EDITS_BEFORE_THAW

    def _trace(self, args: Sequence[Any]) -> dict[str, torch.Tensor]:
        """Every node's value as our translation computes it, without rewrites: for finding where one differs."""
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
            self._recipe, region=region, kind="trace", options=options, graph_report=report, report=RegionReport()
        )
        probe = CompiledRegion(replace(recipe, translation=None), self._build, frozenset())
        return dict(zip((n.name for n in nodes), probe.run_boxed(list(args)), strict=True))


def _is_traceable(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor)


def _numbers(region: Region) -> list[int]:
    """Inputs that are Python floats in disguise: dynamo hands them over as float64 tensors without dimensions."""
    found = []
    for index, node in enumerate(region.graph.graph.find_nodes(op="placeholder")):
        val = node.meta.get("val")
        if isinstance(val, torch.Tensor) and not val.dim() and val.dtype == torch.float64 and val.device.type == "cpu":
            found.append(index)
    return found if len(found) < 64 else []
