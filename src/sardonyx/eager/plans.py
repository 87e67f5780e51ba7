"""Plans: ATen calls compiled to small ONNX models, cached by call key."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import sympy
import torch
from torch._decomp import core_aten_decompositions
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from sardonyx import fork
from sardonyx.cache.lru import LRU
from sardonyx.capture.aot import decompositions
from sardonyx.capture.composite_ops import preserve_composite_ops
from sardonyx.eager.layout import CONTIGUOUS, Layout, layout_of
from sardonyx.eager.memory import from_ort, on_device, on_host, ort_value_view
from sardonyx.engines.onnxruntime import OnnxRuntimeRunner
from sardonyx.errors import UnsupportedOperator
from sardonyx.options import Options
from sardonyx.pipeline import compile_graph
from sardonyx.run.graph import CompiledGraph
from sardonyx.run.region import BareSession
from sardonyx.telemetry.report import collecting

log = logging.getLogger(__name__)

_MAX_PLANS = 8192
"""Size of the LRU of plans."""
_MULTITHREADED_FROM = 2**16
"""Number of elements from which a session gets several threads: each onnxruntime session has its own pool."""
_STATIC_PLANS = 2
"""How many calls that differ in sizes or scalars get static plans, before a dynamic plan is made."""

_MAX_FEEDS = 16
"""How many sets of input addresses a session caches."""

Results: TypeAlias = "list[torch.Tensor | None]"
"""Device tensors; None for a result that is not computed, such as a gradient that is not needed."""


@dataclass
class Device:
    """The engine and provider of a device."""

    engine: str = "onnxruntime"
    threads: bool = False
    """Whether the sessions of the engine share a thread pool."""
    providers: Any = None

    @property
    def name(self) -> str:
        """The engine and provider."""
        if self.providers is None:
            return "ONNX Runtime, CPUExecutionProvider"
        first = self.providers[0]
        return f"ONNX Runtime, {first if isinstance(first, str) else first[0]}"

    def options(self, tensors: Sequence[torch.Tensor]) -> Options:
        """Return the options for compiling plans."""
        options: dict[str, Any] = {"engine": self.engine, "fallback": "error", "cache_dir": "", "freeze": False}
        options["precision"] = "float32"  # also where the environment has another one for models
        if not self.threads:
            large = sum(x.numel() for x in tensors) >= _MULTITHREADED_FROM
            options["session_options"] = {"intra_op_num_threads": torch.get_num_threads() if large else 1}
        if self.providers is not None:
            options["providers"] = self.providers
        return Options.of({}, **options)


@dataclass
class AtenCall:
    """An operator with its arguments: device tensors that are contiguous, permuted or expanded."""

    operator: Any
    arguments: Mapping[str, Any]
    index: int = 0
    """Index of the device."""
    tensors: list[torch.Tensor] = field(init=False)
    layouts: list[Layout] = field(init=False)

    def __post_init__(self) -> None:
        self.tensors = tensors_of(self.arguments)
        self.layouts = [layout_of(x) or CONTIGUOUS for x in self.tensors]
        for tensor in self.tensors:
            if tensor.get_device() != self.index:
                raise RuntimeError(f"{self.operator}: tensors are on {tensor.device} and ort:{self.index}")

    def bases(self) -> list[torch.Tensor]:
        """Return the contiguous tensors under its tensors."""
        return [layout.base(x) for x, layout in zip(self.tensors, self.layouts, strict=True)]

    @cached_property
    def scalars(self) -> tuple[str, ...]:
        """Names of the finite float arguments, which a dynamic plan takes as inputs."""
        return tuple(name for name, x in self.arguments.items() if type(x) is float and math.isfinite(x))

    def key(self) -> Hashable:
        """Return the key of a static plan: operator, dtypes, sizes, layouts, and all other arguments."""
        return self._context_key(), self._arguments_key(lambda x: tuple(x.shape), ())

    def dynamic_key(self, scalars: tuple[str, ...]) -> Hashable:
        """Return the key of a dynamic plan: which sizes are equal instead of sizes, without the scalars."""
        symbols: dict[int, int] = {}

        def pattern(tensor: torch.Tensor) -> tuple[int, ...]:
            return tuple(size if size < 2 else 2 + symbols.setdefault(size, len(symbols)) for size in tensor.shape)

        expanded = tuple(x.shape[axis] for x, y in zip(self.tensors, self.layouts, strict=True) for axis in y.expanded)
        return self._context_key(), expanded, self._arguments_key(pattern, scalars)

    def _context_key(self) -> Hashable:
        return self.operator, self.index, tuple(self.layouts), torch.get_default_dtype()

    def _arguments_key(self, sizes: Callable[[torch.Tensor], Hashable], excluded: tuple[str, ...]) -> Hashable:
        def key(value: Any) -> Hashable:
            if isinstance(value, torch.Tensor):
                return value.dtype, sizes(value)
            if isinstance(value, (list, tuple)):
                return tuple([key(x) for x in value])
            return argument_key(value)

        return tuple([(name, None if name in excluded else key(value)) for name, value in self.arguments.items()])

    def function(self) -> Callable[..., Any]:
        """Return the call as a function of its bases, and of scalars by name."""
        leaves, spec = pytree.tree_flatten(dict(self.arguments))
        positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        shapes = [tuple(x.shape) for x in self.tensors]

        def call(*bases: torch.Tensor, **scalars: Any) -> Any:
            filled = list(leaves)
            for position, base, layout, sizes in zip(positions, bases, self.layouts, shapes, strict=True):
                filled[position] = layout.view(base, sizes)
            result = self.operator(**(pytree.tree_unflatten(filled, spec) | scalars))
            return list(result) if isinstance(result, (tuple, list)) else [result]

        return call


def argument_key(value: Hashable) -> Hashable:
    """Return an argument as a key that distinguishes 1, 1.0 and True, 0.0 and -0.0, and equates NaN with itself."""
    needs_repr = isinstance(value, complex) or (isinstance(value, float) and (not value or value != value))
    return type(value), repr(value) if needs_repr else value


def tensors_of(arguments: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors among arguments, in order."""
    return list(_tensors(arguments.values()))


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


class Plan:
    """A compiled call; it runs its session directly if that takes and returns tensors as they are."""

    scalars: tuple[str, ...] = ()
    """Arguments passed as tensors, after the others."""
    static = True
    """Whether the sizes of its tensors are fixed."""

    def __init__(self, compiled: CompiledGraph) -> None:
        self._compiled = compiled
        self.direct: DirectSession | None = None
        self.plain: BareSession | None = None

    def __call__(self, call: AtenCall) -> Results:
        """Return the results of a call."""
        scalars = [on_device(torch.tensor(call.arguments[name], dtype=torch.float64)) for name in self.scalars]
        tensors = [*call.bases(), *scalars]
        if self.direct is not None:
            return self.direct(tensors, call.index)
        nonempty = all(x.numel() for x in tensors)  # DLPack does not pass empty tensors
        host_tensors = [on_host(x) for x in tensors]
        storages = {x.untyped_storage().data_ptr() for x in host_tensors if x.numel()}
        results = [
            None if x is None else on_device(_unaliased(x, storages), call.index)
            for x in self._compiled.run(list(host_tensors))
        ]
        if self._compiled.region is not None:
            self.plain = self._compiled.region.bare_session()
            if nonempty and self.plain is not None:
                self.direct = DirectSession.create(self.plain, static=self.static)
        return results


def _unaliased(result: torch.Tensor, storages: set[int]) -> torch.Tensor:
    """Return a result in memory of its own: a graph may return an input, but an operator that is not a view may not."""
    return result.clone() if result.numel() and result.untyped_storage().data_ptr() in storages else result


@contextmanager
def _tracing() -> Iterator[None]:
    """Context for tracing, with torch's log of user errors disabled."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        with torch.no_grad(), preserve_composite_ops(), collecting():
            yield
    finally:
        logger.disabled = before


class _DynamicPlan(Plan):
    """A plan for any sizes that are equal where those it was traced with are, and any values of its scalars."""

    static = False

    def __init__(self, call: AtenCall, scalars: tuple[str, ...], device: Device) -> None:
        bases, function = call.bases(), call.function()

        def with_scalars(*values: torch.Tensor) -> Any:
            by_name = {name: value.item() for name, value in zip(scalars, values[len(bases) :], strict=True)}
            return function(*values[: len(bases)], **by_name)

        values = [torch.tensor(call.arguments[name], dtype=torch.float64) for name in scalars]
        table: Any = dict(core_aten_decompositions()) if scalars else decompositions()
        with _tracing():
            graph = make_fx(with_scalars, table, tracing_mode="symbolic")(*map(_empty_like, bases), *values)
            super().__init__(compile_graph(graph, "inference", frozenset(), device.options(bases)))
        self.scalars = scalars
        environment: Any = graph.shape_env
        self._conditions = [guard.expr for guard in environment.guards]
        self._conditions += [sympy.Eq(symbol, expression) for symbol, expression in environment.replacements.items()]
        self._sizes = [node.meta["val"].shape for node in graph.graph.find_nodes(op="placeholder")]

    def fits(self, call: AtenCall) -> bool:
        """Return whether the guards of the trace hold for these sizes."""
        values: dict[Any, int] = {}
        for symbols, base in zip(self._sizes, call.bases(), strict=False):
            for symbol, size in zip(symbols, base.shape, strict=True):
                expression = symbol.node._expr if isinstance(symbol, torch.SymInt) else sympy.Integer(symbol)
                if isinstance(expression, sympy.Symbol):
                    values.setdefault(expression, size)
                elif expression != size:
                    return False
        return all(condition.xreplace(values) == sympy.true for condition in self._conditions)


class Plans:
    """The plans of the process, by call key."""

    def __init__(self) -> None:
        self.devices: dict[int, Device] = {0: Device()}
        self.current: Callable[[], int] = lambda: 0
        """Returns the current device."""
        self._static = LRU[Plan](_MAX_PLANS)
        self._dynamic = LRU[_DynamicPlan | str](_MAX_PLANS)
        """A string says why there is no dynamic plan."""
        self._counts = LRU[int](_MAX_PLANS)
        self._lock = fork.Lock()

    def index(self, device: torch.device) -> int:
        """Return the index of a device, by default the current one."""
        index = self.current() if device.index is None else device.index
        if index not in self.devices:
            raise RuntimeError(f"there is no device ort:{index}; add it with sardonyx.eager.set_device")
        return index

    def __len__(self) -> int:
        """Return the number of plans; one may serve calls with different keys."""
        return len({id(plan) for plans in (self._static, self._dynamic) for _, plan in plans.items()})

    def clear(self) -> None:
        """Drop all plans."""
        with self._lock:
            for lru in (self._static, self._dynamic, self._counts):
                lru.clear()

    def find(self, call: AtenCall) -> Plan | None:
        """Return the static plan of a call."""
        with self._lock:
            return self._static.get(call.key())

    def run(self, call: AtenCall) -> tuple[Plan, Results]:
        """Return the plan of a call, compiled if needed, and its results."""
        plan = self.find(call)
        if plan is not None:
            return plan, plan(call)
        with self._lock:
            for scalars in dict.fromkeys((call.scalars, ())):
                key = call.dynamic_key(scalars)
                dynamic = self._dynamic.get(key)
                if dynamic is None and (self._counts.get(key) or 0) >= _STATIC_PLANS:
                    dynamic = self._make_dynamic(call, scalars)
                    self._dynamic.put(key, dynamic)
                if isinstance(dynamic, _DynamicPlan) and dynamic.fits(call):
                    results = self._try_dynamic(key, dynamic, call)
                    if results is not None:
                        return dynamic, results
            plan = self._compile(call)
            for scalars in dict.fromkeys((call.scalars, ())):
                key = call.dynamic_key(scalars)
                self._counts.put(key, (self._counts.get(key) or 0) + 1)
            self._static.put(call.key(), plan)
        return plan, plan(call)

    def _try_dynamic(self, key: Hashable, plan: _DynamicPlan, call: AtenCall) -> Results | None:
        """Return the results of a dynamic plan; None, and drop the plan, if it fails for this call."""
        try:
            results = plan(call)
        except Exception as error:  # for instance an ONNX operator that rejects an empty tensor
            log.info("%s has no dynamic plan: %s", call.operator, error)
            self._dynamic.put(key, str(error))
            return None
        if not plan.scalars:
            self._static.put(call.key(), plan)
        return results

    def _make_dynamic(self, call: AtenCall, scalars: tuple[str, ...]) -> _DynamicPlan | str:
        try:
            plan = _DynamicPlan(call, scalars, self.devices[call.index])
            return plan if plan.fits(call) else "tracing specialized on its sizes or scalars"
        except Exception as error:  # a static plan may still work
            log.info("%s has no dynamic plan: %s", call.operator, error)
            return str(error)

    def _compile(self, call: AtenCall) -> Plan:
        """Trace and compile a call; raise `UnsupportedOperator` if ONNX cannot express it."""
        bases = call.bases()
        with _tracing():
            try:
                graph = make_fx(call.function(), decompositions(), tracing_mode="fake")(*map(_empty_like, bases))
            except _UNTRACEABLE as error:
                raise UnsupportedOperator(f"it cannot be traced: {error}") from error
            return Plan(compile_graph(graph, "inference", frozenset(), self.devices[call.index].options(bases)))


PLANS = Plans()

_UNTRACEABLE = (DynamicOutputShapeException, DataDependentOutputException, UnsupportedFakeTensorException)


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)


class DirectSession:
    """An onnxruntime session run directly on device tensors."""

    def __init__(self, runner: OnnxRuntimeRunner, plain: BareSession, *, static: bool) -> None:
        self._runner, self._inputs, self._results = runner, plain.inputs, plain.results
        self._static = static
        self._booleans = [dtype == torch.bool for dtype in runner.output_types]
        self._feeds: dict[tuple[Any, ...], Any] = {}
        """Feeds by the addresses of the inputs; they keep no memory alive."""

    @classmethod
    def create(cls, plain: BareSession, *, static: bool) -> DirectSession | None:
        """Return the session of a region, or None if it has no onnxruntime runner or reshapes results.

        `static` says that input sizes are fixed.
        """
        if not isinstance(plain.runner, OnnxRuntimeRunner) or plain.reshaped:
            return None
        return cls(plain.runner, plain, static=static)

    def __call__(self, tensors: Sequence[torch.Tensor], index: int) -> Results:
        """Run on a device; the tensors are contiguous."""
        key: tuple[Any, ...] = tuple([tensors[i].data_ptr() for i in self._inputs])
        if not self._static:
            key += tuple([tensors[i].shape for i in self._inputs])
        feeds = self._feeds.get(key)
        if feeds is None:
            feeds = self._make_feeds(key, tensors)
        fetched = self._runner.fetch(feeds)
        return [None if i is None else self._read(fetched, i, index) for i in self._results]

    def _make_feeds(self, key: tuple[Any, ...], tensors: Sequence[torch.Tensor]) -> Any:
        if len(self._feeds) >= _MAX_FEEDS:
            self._feeds.clear()
        feeds = self._feeds[key] = self._runner.feeds([ort_value_view(tensors[i]) for i in self._inputs])
        return feeds

    def _read(self, fetched: Any, output: int, index: int) -> torch.Tensor:
        try:
            return from_ort(fetched.dlpack_at(output), self._booleans[output], index)
        except RuntimeError:  # ONNX Runtime's DLPack does not export empty tensors
            shape = fetched[output].shape()
            if 0 not in shape:
                raise
            return on_device(torch.empty(shape, dtype=self._runner.output_types[output]), index)
