"""A region that runs: its sessions, which of them fits a call, and when to build another."""

from __future__ import annotations

import logging
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import onnx
import onnx_ir as ir
import torch
from torch.utils import _pytree as pytree

from sardonyx import fork
from sardonyx.cache.lru import LRU
from sardonyx.capture.regions import Region, Result
from sardonyx.engines.auto import Auto
from sardonyx.engines.engine import Engine, Job, Runner, current_stream, static_sizes
from sardonyx.engines.registry import find as find_engine
from sardonyx.errors import MissingKernel
from sardonyx.native import native, takes_none
from sardonyx.optimize import optimize
from sardonyx.optimize.empty import guard_empty
from sardonyx.optimize.legalize import legalize
from sardonyx.optimize.selection import selected
from sardonyx.options import Options
from sardonyx.run.drawing import Drawer, drawer
from sardonyx.run.layout import strides_of_results, with_strides
from sardonyx.run.sessions import Held, shared_runner
from sardonyx.run.snapshot import Numbers, Snapshot
from sardonyx.sizes import SizesOfCall
from sardonyx.telemetry import dump, repro
from sardonyx.telemetry.page import Page, page_of
from sardonyx.telemetry.picture import Picture
from sardonyx.telemetry.report import Fallback, GraphReport, RegionReport, is_observed, observed
from sardonyx.telemetry.source import source_of
from sardonyx.telemetry.verify import verify
from sardonyx.translate.translator import Translation

log = logging.getLogger(__name__)

_TRAINING = ("forward", "backward")
"""Kinds of graphs that have kernels of their own without being asked: engines have none for gradients."""
_EDITS_BEFORE_THAW = 2
"""Weights edited more often than this are no constants: they become inputs."""


@dataclass(frozen=True)
class _Session:
    held: Held
    runner: Runner
    inputs: tuple[int, ...]
    complex: tuple[int, ...]
    """Which of the inputs are complex: the engine is given their parts, as pairs."""
    draws: tuple[Drawer, ...]
    shapes: Mapping[int, tuple[int, ...]]
    """Outputs that are to be seen with other sizes than the engine gives them."""
    weights: Snapshot
    numbers: Numbers
    stream: int | None

    def given(self, args: Sequence[Any]) -> list[Any]:
        """The engine's inputs for the arguments of a call; random ones are drawn."""
        given = [args[i] for i in self.inputs]
        for i in self.complex:
            given[i] = torch.view_as_real(given[i].resolve_conj())
        if self.draws:
            given += [draw(args) for draw in self.draws]
        return given

    def run(self, args: Sequence[Any]) -> list[torch.Tensor]:
        """The engine's outputs for the arguments of a call."""
        outputs = self.runner(self.given(args))
        for index, shape in self.shapes.items():
            outputs[index] = _reshaped(outputs[index], shape)
        return outputs

    def fits(self, args: Sequence[Any], stream: Callable[[], int | None]) -> bool:
        """Whether all that the session was built on still holds."""
        return (
            self.weights.holds(args)
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


@dataclass(frozen=True)
class _Built:
    """A model ready for the engine, before its weights are given."""

    model: bytes
    translation: Translation
    shapes: Mapping[int, tuple[int, ...]]
    numbers: Numbers
    libraries: tuple[str, ...]


class CompiledRegion(torch.nn.Module):
    """A region as a callable. A module only so that FX can call it."""

    def __init__(
        self,
        region: Region,
        frozen: frozenset[int],
        kind: str,
        translation: Translation,
        translate: Callable[..., Translation],
        options: Options,
        graph_report: GraphReport,
        report: RegionReport,
    ) -> None:
        super().__init__()
        self._region, self._kind, self._options = region, kind, options
        self._first: Translation | None = translation
        self._translate = translate
        self._graph_report, self._report = graph_report, report
        self._engine = find_engine(options.engine)
        self._sessions = LRU[_Session](options.cache_size)
        self._current: _Session | None = None
        self._built: _Built | None = None
        self._lock = fork.Lock()
        self._frozen = frozen
        self._fixed = frozenset(_numbers(region)) if options.freeze else frozenset()
        self._edits = 0
        self._as_they_are = _are_outputs(region.results)
        self._strides = strides_of_results(region.results, region.graph)
        self._chosen: CompiledRegion | None = None
        self._missing: MissingKernel | None = None
        self._proto: onnx.ModelProto | None = None

    def run_boxed(self, args: list[Any]) -> Sequence[Any]:
        """Call with a list of arguments, which is cleared so that tensors nobody needs can go."""
        try:
            results = self._run(args)
        except Exception as error:
            weights = self._region.weights
            repro.note(error, self._options, self._region.graph, args, kind=self._kind, weights=weights)
            raise
        args.clear()
        return results

    run_boxed._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd's convention

    def _run(self, args: list[Any]) -> Sequence[Any]:
        try:
            session = self._current
            if session is None or not session.fits(args, self._stream):
                session = self._switch(args)
            outputs = session.run(args)
        except MissingKernel as error:
            if self._options.fallback == "error":
                raise
            return self._run_in_torch(error, args)
        return outputs if self._as_they_are else self._finish(outputs, args)

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
        if session is None or session.complex or session.draws or session.numbers.values:
            return None
        results = [result.output for result in self._region.results]
        taken = [i for i in results if i is not None]
        if any(result != Result(result.output) for result in self._region.results) or len(set(taken)) < len(taken):
            return None
        return Plain(session.runner, session.inputs, tuple(results), frozenset(session.shapes))

    def _finish(self, outputs: Sequence[torch.Tensor], args: Sequence[Any]) -> list[Any]:
        """The region's results, from the engine's outputs and the arguments that are handed back."""
        pairs = zip(self._region.results, self._strides, strict=True)
        return [_result(result, strides, outputs, args) for result, strides in pairs]

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
            if isinstance(self._engine, Auto):
                self._chosen = self._chosen or self._choose(self._engine, args)
                self._current = self._chosen._switch(args)
                return self._current
            for key, session in self._sessions.items():
                if session.fits(args, self._stream):
                    self._sessions.get(key)
                    self._current = session
                    return session
            return self._build_and_check(args)

    def _choose(self, auto: Auto, args: Sequence[Any]) -> CompiledRegion:
        """This region for the engine that `auto` chooses: each candidate has a model of its own."""
        assert self._first is not None
        key = auto.key(ir.to_proto(self._first.model).SerializeToString(), args, self._options, self._region.device)
        engines = auto.candidates(self._options, self._region.device)
        contenders = {engine.name: partial(self._contender, auto, engine, args) for engine in engines}
        expected = None if self._first.draws else lambda: pytree.tree_leaves(self._region.graph(*args))
        choice, chosen = auto.choose(key, contenders, expected, self._options)
        chosen._report.choice = choice
        self._graph_report.replace(self._report, chosen._report)
        self._first = None
        return chosen

    @property
    def proto(self) -> onnx.ModelProto | None:
        """The model that was last built, of the engine that `auto` chose where there was a choice."""
        return self._proto if self._chosen is None else self._chosen.proto

    def _contender(self, auto: Auto, engine: Engine, args: Sequence[Any]) -> tuple[CompiledRegion, Any]:
        """This region for one engine, and a call of it that draws the same random numbers each time."""
        translate = partial(self._translate, engine=engine)
        translation = translate(self._region, self._frozen)
        nodes = sum(1 for _ in translation.model.graph.all_nodes())
        region = CompiledRegion(
            self._region,
            self._frozen,
            self._kind,
            translation,
            translate,
            auto.options_for(engine, self._options),
            self._graph_report,
            RegionReport(nodes_translated=nodes, weights=len(translation.weights)),
        )
        session = region._switch(args)

        def call() -> list[Any]:
            if not session.draws:
                return region._finish(session.run(args), args)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                return region._finish(session.run(args), args)

        return region, call

    def _build_and_check(self, args: Sequence[Any]) -> _Session:
        first = self._current is None
        session = self._session(args)
        if first and self._options.verify and session.draws:
            log.warning("a graph that draws random numbers cannot be verified")
        elif first and self._options.verify:
            verify(self._region.graph, args, self._finish(session.run(args), args), lambda: self._trace(args))
        self._sessions.put(id(session), session)
        self._current = session
        return session

    def _session(self, args: Sequence[Any]) -> _Session:
        built = self._model(args)
        translation = built.translation
        snapshot = Snapshot(sorted(translation.weights.values()), args)
        job = Job.of(
            built.model,
            translation.model.graph,
            self._options,
            weights={name: args[index] for name, index in translation.weights.items()},
            fixed=frozenset(i for i, index in enumerate(translation.inputs) if index in self._region.weights),
            device=self._region.device,
            libraries=built.libraries,
        )
        with self._graph_report.stage("engine"):
            held = shared_runner(self._engine, job, snapshot)
        self._report.sessions += 1
        draws = tuple(drawer(draw, self._region.graph, self._region.device) for draw in translation.draws)
        inputs = tuple(translation.inputs)
        complex_ = _complex(self._region, inputs)
        runner = observed(job, held.runner)
        session = _Session(held, runner, inputs, complex_, draws, built.shapes, snapshot, built.numbers, job.stream)
        page = page_of(self._options)
        if page is not None and self._report.sessions == 1:
            self._study(page, job, session, args)
        return session

    def _study(self, page: Page, job: Job, session: _Session, args: Sequence[Any]) -> None:
        """Measure for the HTML report, with the same random numbers again afterwards."""
        why_not = page.hindrance(self._region.graph, bool(session.draws))

        def errors() -> tuple[Mapping[str, float], float]:
            results = self._finish(session.run(args), args)
            return page.compared(self._region.graph, args, self._trace(args), results)

        devices = [self._region.device] if self._region.device.type == "cuda" else []
        with self._graph_report.stage("report"), torch.random.fork_rng(devices=devices):
            page.study(self._report, job, session.runner, session.given(args), why_not or errors)
        page.write(self._options)

    def _draw(self, stage: str, model: ir.Model) -> None:
        if self._options.report:
            self._report.pictures[stage] = Picture.of(model)

    def _model(self, args: Sequence[Any]) -> _Built:
        """The optimized model: kept while only weights are edited, made again when an assumption fails."""
        built = self._built
        if built is not None:
            changed = built.numbers.changed(args)
            if changed:
                log.info("a number that was taken for constant changed; it is an input from now on")
                self._fixed -= frozenset(changed)
            elif built.translation.weights and self._edits_exceeded():
                log.info("weights keep changing; they are inputs from now on")
                self._frozen = frozenset()
            else:
                return built
        self._built = self._build_model(args)
        return self._built

    def _edits_exceeded(self) -> bool:
        self._edits += 1
        return self._edits > _EDITS_BEFORE_THAW

    def _build_model(self, args: Sequence[Any]) -> _Built:
        numbers = Numbers(sorted(self._fixed), args)
        translation, self._first = self._first, None
        if translation is None or numbers.values:
            with self._graph_report.stage("translate"):
                translation = self._translate(self._region, self._frozen, dict(numbers.values))
        model = translation.model
        self._draw("translated", model)
        names = selected(self._options.optimize)
        if names:
            with self._graph_report.stage("optimize"):
                operators = {node.op_type for node in model.graph.all_nodes()}
                domains = self._engine.domains | self._engine.local_domains(self._region.device, operators)
                self._report.rules = optimize(model, domains=domains, names=names)
        kernels = self._engine.kernels(self._region.device)
        if kernels is not None:
            legalize(model, kernels)
        guard_empty(model)
        translation, shapes = _still_used(translation), _before_last_reshapes(model.graph)
        self._draw("rewritten", model)
        libraries = self._kernels(model)
        self._draw("runs", model)
        self._report.operators = Counter(node.op_type for node in model.graph.all_nodes())
        log.info("%s graph: %d → %d nodes", self._kind, self._report.nodes_translated, self._report.nodes)
        weights = {name: args[index] for name, index in translation.weights.items()}
        return _Built(self._serialize(model, weights), translation, shapes, numbers, libraries)

    def _kernels(self, model: ir.Model) -> tuple[str, ...]:
        """Kernels of the model's own, which then holds them, by the libraries they are in."""
        wanted = self._options.native
        if not wanted:
            return ()
        if not self._engine.takes_kernels(self._region.device):
            if wanted is True:
                raise takes_none(self._options.engine, self._region.device.type)
            return ()
        looked_at = self._options.dump or self._options.transforms
        if wanted == "auto" and (looked_at or self._kind not in _TRAINING):
            return ()
        origins = {value.name: node.meta.get("fx") for node in model.graph for value in node.outputs}
        with self._graph_report.stage("native"):
            library = native(model, self._options)
        for node in model.graph:
            node.meta.setdefault("fx", origins.get(node.outputs[0].name))  # a kernel's: whence its result comes
        return () if library is None else (str(library),)

    def _serialize(self, model: ir.Model, weights: Mapping[str, torch.Tensor]) -> bytes:
        if self._options.dump or self._options.transforms or is_observed():
            dump.add_metadata(model)
        with self._graph_report.stage("serialize"):
            proto = ir.to_proto(model)
        for transform in self._options.transforms:
            proto = transform(proto) or proto
        self._proto = proto
        if self._options.dump:
            dump.dump(self._options.dump, self._kind, proto, weights, self._region.graph)
        serialized: bytes = proto.SerializeToString()
        return serialized

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
        probe = CompiledRegion(
            region,
            frozenset(),
            "trace",
            self._translate(region, frozenset()),
            self._translate,
            Options.of(self._options, optimize="none", verify=False, dump=None, report=None, repro=None),
            GraphReport("trace", 0),
            RegionReport(),
        )
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


def _complex(region: Region, inputs: Sequence[int]) -> tuple[int, ...]:
    """Which of these placeholders are complex tensors, by their places here."""
    vals = [node.meta.get("val") for node in region.graph.graph.find_nodes(op="placeholder")]
    return tuple(i for i, at in enumerate(inputs) if isinstance(vals[at], torch.Tensor) and vals[at].dtype.is_complex)


def _still_used(translation: Translation) -> Translation:
    """Drop inputs and weights that rewriting left without a reader."""
    graph = translation.model.graph
    kept = [i for i, x in enumerate(graph.inputs) if x.uses() or x.is_graph_output()]
    for i in reversed(range(len(graph.inputs))):
        if i not in kept:
            del graph.inputs[i]
    weights = {name: index for name, index in translation.weights.items() if name in graph.initializers}
    count = len(translation.inputs)
    draws = [translation.draws[i - count] for i in kept if i >= count]
    return Translation(translation.model, [translation.inputs[i] for i in kept if i < count], weights, draws)


def _before_last_reshapes(graph: ir.Graph) -> dict[int, tuple[int, ...]]:
    """Return what an output is a mere reshape of, and remember its sizes: a node would copy, torch does it for free."""
    shapes: dict[int, tuple[int, ...]] = {}
    for index, output in enumerate(graph.outputs):
        node, dims = output.producer(), static_sizes(output)
        source = node.inputs[0] if node is not None and node.op_type == "Reshape" else None
        if node is None or source is None or dims is None or source.is_graph_output():
            continue
        producer = source.producer()
        if producer is not None and producer.graph is graph and static_sizes(source) is not None:
            graph.outputs[index] = source
            shapes[index] = dims
            if not output.uses() and not output.is_graph_output():
                graph.remove(node, safe=True)
    return shapes


def _reshaped(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The same memory with other sizes, and no view: what a graph returns may be edited in place."""
    seen = x.view(shape)
    made = torch.empty(0, dtype=x.dtype, device=x.device)
    return made.set_(x.untyped_storage(), seen.storage_offset(), shape, seen.stride())


def _are_outputs(results: Sequence[Result]) -> bool:
    """Whether the engine's outputs are the region's results as they are."""
    return all(result == Result(i) for i, result in enumerate(results))


def _result(result: Result, strides: SizesOfCall | None, outputs: Sequence[torch.Tensor], args: Sequence[Any]) -> Any:
    if result.passed is not None:
        return args[result.passed]
    if result.output is None:
        return None
    value = outputs[result.output]
    if result.number:
        return value.item()
    if result.complex:
        value = torch.view_as_complex(value)
    if result.order is not None:
        value = value.permute([result.order.index(axis) for axis in range(value.dim())])
    return value if strides is None else with_strides(value, strides(args))
