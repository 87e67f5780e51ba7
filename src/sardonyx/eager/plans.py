"""Plans: an ATen call as a small ONNX model that is ready to run, kept by what the call looks like."""

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
from sardonyx.eager.layout import IN_ORDER, Layout, layout_of
from sardonyx.eager.memory import from_runtime, on_device, on_host, value_over
from sardonyx.engines.onnxruntime import OnnxRuntimeRunner
from sardonyx.errors import UnsupportedOperator
from sardonyx.options import Options
from sardonyx.pipeline import compile_graph
from sardonyx.run.graph import CompiledGraph
from sardonyx.run.region import BareSession
from sardonyx.telemetry.report import collecting

log = logging.getLogger(__name__)

_MOST = 8192
"""Plans that are kept; the least recently used go."""
_LARGE = 2**16
"""Elements from which several threads are worth having: each session of the binding's has threads of its own."""
_ALIKE = 2
"""How many calls that differ in sizes or numbers get plans of their own, before there is one for all like them."""

_MOST_PLACES = 16
"""How many places in memory of its inputs a session remembers."""

Results: TypeAlias = "list[torch.Tensor | None]"
"""Tensors of the device; None for a result that was not asked for, as a gradient may not be."""


@dataclass
class Device:
    """How a device runs its sessions: by which engine and which provider."""

    engine: str = "onnxruntime"
    threads: bool = False
    """Whether the engine has threads that all sessions share."""
    providers: Any = None

    @property
    def name(self) -> str:
        """What computes on it."""
        if self.providers is None:
            return "ONNX Runtime, CPUExecutionProvider"
        first = self.providers[0]
        return f"ONNX Runtime, {first if isinstance(first, str) else first[0]}"

    def options(self, tensors: Sequence[torch.Tensor]) -> Options:
        """Those that plans are compiled with."""
        given: dict[str, Any] = {"engine": self.engine, "fallback": "error", "cache_dir": "", "freeze": False}
        if not self.threads:
            large = sum(x.numel() for x in tensors) >= _LARGE
            given["session_options"] = {"intra_op_num_threads": torch.get_num_threads() if large else 1}
        if self.providers is not None:
            given["providers"] = self.providers
        return Options.of({}, **given)


@dataclass
class Call:
    """An operator and what it is called with: tensors of the device that lie in order, or nearly so."""

    operator: Any
    given: Mapping[str, Any]
    index: int = 0
    """Which of the devices it is on."""
    tensors: list[torch.Tensor] = field(init=False)
    layouts: list[Layout] = field(init=False)

    def __post_init__(self) -> None:
        self.tensors = tensors_of(self.given)
        self.layouts = [layout_of(x) or IN_ORDER for x in self.tensors]
        for tensor in self.tensors:
            if tensor.get_device() != self.index:
                raise RuntimeError(f"{self.operator}: a tensor is on {tensor.device}, another on ort:{self.index}")

    def bases(self) -> list[torch.Tensor]:
        """What lies in order under its tensors."""
        return [layout.base(x) for x, layout in zip(self.tensors, self.layouts, strict=True)]

    @cached_property
    def numbers(self) -> tuple[str, ...]:
        """The arguments that are numbers of which a model could take any."""
        return tuple(name for name, x in self.given.items() if type(x) is float and math.isfinite(x))

    def key(self) -> Hashable:
        """What a plan is for: the operator, dtypes, sizes and layouts of tensors, and everything else as it is."""
        return self._where(), self._kinds(lambda x: tuple(x.shape), ())

    def loose_key(self, numbers: tuple[str, ...]) -> Hashable:
        """The same for any sizes that are equal where these are, and any of these numbers."""
        places: dict[int, int] = {}

        def pattern(tensor: torch.Tensor) -> tuple[int, ...]:
            return tuple(size if size < 2 else 2 + places.setdefault(size, len(places)) for size in tensor.shape)

        repeated = tuple(x.shape[axis] for x, y in zip(self.tensors, self.layouts, strict=True) for axis in y.repeated)
        return self._where(), repeated, self._kinds(pattern, numbers)

    def _where(self) -> Hashable:
        return self.operator, self.index, tuple(self.layouts), torch.get_default_dtype()

    def _kinds(self, sizes: Callable[[torch.Tensor], Hashable], any_of: tuple[str, ...]) -> Hashable:
        def kind(value: Any) -> Hashable:
            if isinstance(value, torch.Tensor):
                return value.dtype, sizes(value)
            if isinstance(value, (list, tuple)):
                return tuple([kind(x) for x in value])
            return distinct(value)

        return tuple([(name, None if name in any_of else kind(value)) for name, value in self.given.items()])

    def function(self) -> Callable[..., Any]:
        """The call as a function of its bases, and of numbers by name."""
        leaves, spec = pytree.tree_flatten(dict(self.given))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        shapes = [tuple(x.shape) for x in self.tensors]

        def call(*bases: torch.Tensor, **numbers: Any) -> Any:
            filled = list(leaves)
            for place, base, layout, sizes in zip(places, bases, self.layouts, shapes, strict=True):
                filled[place] = layout.seen(base, sizes)
            result = self.operator(**(pytree.tree_unflatten(filled, spec) | numbers))
            return list(result) if isinstance(result, (tuple, list)) else [result]

        return call


def distinct(value: Hashable) -> Hashable:
    """An argument as a key: 1, 1.0 and True are equal and not the same, nor are 0.0 and -0.0; NaN equals nothing."""
    odd = isinstance(value, complex) or (isinstance(value, float) and (not value or value != value))
    return type(value), repr(value) if odd else value


def tensors_of(given: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors among arguments, in their order."""
    return list(_tensors(given.values()))


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


class Plan:
    """A compiled call. Where its session takes and gives tensors as they are, it is run without a way around."""

    numbers: tuple[str, ...] = ()
    """Arguments that it takes any numbers for, as tensors after the others."""
    sized = True
    """Whether it is for tensors of certain sizes."""

    def __init__(self, compiled: CompiledGraph) -> None:
        self._compiled = compiled
        self.direct: Direct | None = None
        self.plain: BareSession | None = None

    def __call__(self, call: Call) -> Results:
        """The results of a call."""
        numbers = [on_device(torch.tensor(call.given[name], dtype=torch.float64)) for name in self.numbers]
        tensors = [*call.bases(), *numbers]
        if self.direct is not None:
            return self.direct(tensors, call.index)
        whole = all(x.numel() for x in tensors)  # without elements, a tensor cannot be handed over
        given = [on_host(x) for x in tensors]
        memory = {x.untyped_storage().data_ptr() for x in given if x.numel()}
        results = [
            None if x is None else on_device(_apart(x, memory), call.index) for x in self._compiled.run(list(given))
        ]
        if self._compiled.region is not None:
            self.plain = self._compiled.region.bare_session()
            if whole and self.plain is not None:
                self.direct = Direct.of(self.plain, sized=self.sized)
        return results


def _apart(result: torch.Tensor, memory: set[int]) -> torch.Tensor:
    """A result in memory of its own: a graph may hand an operand back, and an operator that is no view does not."""
    return result.clone() if result.numel() and result.untyped_storage().data_ptr() in memory else result


@contextmanager
def _tracing() -> Iterator[None]:
    """As plans are made, one at a time: without torch's log of calls that its users got wrong."""
    noise = logging.getLogger("torch._subclasses.fake_tensor")
    was, noise.disabled = noise.disabled, True
    try:
        with torch.no_grad(), preserve_composite_ops(), collecting():
            yield
    finally:
        noise.disabled = was


class _Loose(Plan):
    """A plan for any sizes that are equal where those it was made with are, and for any value of some numbers."""

    sized = False

    def __init__(self, call: Call, numbers: tuple[str, ...], device: Device) -> None:
        bases, function = call.bases(), call.function()

        def of_numbers(*values: torch.Tensor) -> Any:
            given = {name: value.item() for name, value in zip(numbers, values[len(bases) :], strict=True)}
            return function(*values[: len(bases)], **given)

        values = [torch.tensor(call.given[name], dtype=torch.float64) for name in numbers]
        apart: Any = dict(core_aten_decompositions()) if numbers else decompositions()
        with _tracing():
            graph = make_fx(of_numbers, apart, tracing_mode="symbolic")(*map(_like, bases), *values)
            super().__init__(compile_graph(graph, "inference", frozenset(), device.options(bases)))
        self.numbers = numbers
        environment: Any = graph.shape_env
        self._conditions = [guard.expr for guard in environment.guards]
        self._conditions += [sympy.Eq(symbol, expression) for symbol, expression in environment.replacements.items()]
        self._sizes = [node.meta["val"].shape for node in graph.graph.find_nodes(op="placeholder")]

    def fits(self, call: Call) -> bool:
        """Whether all that tracing took for granted holds for these sizes."""
        bound: dict[Any, int] = {}
        for symbols, base in zip(self._sizes, call.bases(), strict=False):
            for symbol, size in zip(symbols, base.shape, strict=True):
                expression = symbol.node._expr if isinstance(symbol, torch.SymInt) else sympy.Integer(symbol)
                if isinstance(expression, sympy.Symbol):
                    bound.setdefault(expression, size)
                elif expression != size:
                    return False
        return all(condition.xreplace(bound) == sympy.true for condition in self._conditions)


class Plans:
    """The plans of the process, by what calls look like."""

    def __init__(self) -> None:
        self.devices: dict[int, Device] = {0: Device()}
        self.current: Callable[[], int] = lambda: 0
        """Which is meant where none is said."""
        self._exact = LRU[Plan](_MOST)
        self._loose = LRU[_Loose | str](_MOST)
        """A reason where there cannot be one."""
        self._seen = LRU[int](_MOST)
        self._lock = fork.Lock()

    def index(self, device: torch.device) -> int:
        """Which device is meant by one that may not say so."""
        index = self.current() if device.index is None else device.index
        if index not in self.devices:
            raise RuntimeError(f"there is no device ort:{index}; sardonyx.eager.set_device makes one")
        return index

    def __len__(self) -> int:
        """How many there are: one may serve calls that look different."""
        return len({id(plan) for kept in (self._exact, self._loose) for _, plan in kept.items()})

    def clear(self) -> None:
        """Forget all of them."""
        with self._lock:
            for kept in (self._exact, self._loose, self._seen):
                kept.clear()

    def known(self, call: Call) -> Plan | None:
        """The plan of calls of exactly this look."""
        with self._lock:
            return self._exact.get(call.key())

    def run(self, call: Call) -> tuple[Plan, Results]:
        """The results of a call, and its plan, which is made if there is none."""
        plan = self.known(call)
        if plan is not None:
            return plan, plan(call)
        with self._lock:
            for numbers in dict.fromkeys((call.numbers, ())):
                key = call.loose_key(numbers)
                loose = self._loose.get(key)
                if loose is None and (self._seen.get(key) or 0) >= _ALIKE:
                    loose = self._loosely(call, numbers)
                    self._loose.put(key, loose)
                if isinstance(loose, _Loose) and loose.fits(call):
                    found = self._tried(key, loose, call)
                    if found is not None:
                        return loose, found
            plan = self._made(call)
            for numbers in dict.fromkeys((call.numbers, ())):
                key = call.loose_key(numbers)
                self._seen.put(key, (self._seen.get(key) or 0) + 1)
            self._exact.put(call.key(), plan)
        return plan, plan(call)

    def _tried(self, key: Hashable, loose: _Loose, call: Call) -> Results | None:
        """The results by a plan for many calls; None where it fails for this one, and is used no more."""
        try:
            results = loose(call)
        except Exception as error:  # as where a size of none makes an operator of ONNX's impossible
            log.info("%s has a plan for each look: %s", call.operator, error)
            self._loose.put(key, str(error))
            return None
        if not loose.numbers:
            self._exact.put(call.key(), loose)
        return results

    def _loosely(self, call: Call, numbers: tuple[str, ...]) -> _Loose | str:
        try:
            made = _Loose(call, numbers, self.devices[call.index])
            return made if made.fits(call) else "tracing took its numbers for granted"
        except Exception as error:  # whatever tracing cannot do without sizes or numbers, it can with them
            log.info("%s has a plan for each look: %s", call.operator, error)
            return str(error)

    def _made(self, call: Call) -> Plan:
        """Trace the call, and compile it. What cannot be expressed in ONNX raises `UnsupportedOperator`."""
        bases = call.bases()
        with _tracing():
            try:
                graph = make_fx(call.function(), decompositions(), tracing_mode="fake")(*map(_like, bases))
            except _UNTRACEABLE as error:
                raise UnsupportedOperator(f"it cannot be traced: {error}") from error
            return Plan(compile_graph(graph, "inference", frozenset(), self.devices[call.index].options(bases)))


PLANS = Plans()

_UNTRACEABLE = (DynamicOutputShapeException, DataDependentOutputException, UnsupportedFakeTensorException)


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)


class Direct:
    """A session of the binding's that is given the device's tensors."""

    def __init__(self, runner: OnnxRuntimeRunner, plain: BareSession, *, sized: bool) -> None:
        self._runner, self._inputs, self._results = runner, plain.inputs, plain.results
        self._sized = sized
        self._booleans = [dtype == torch.bool for dtype in runner.output_types]
        self._fed: dict[tuple[Any, ...], Any] = {}
        """What the session was given before, by places in memory that may be used again; it keeps nothing alive."""

    @classmethod
    def of(cls, plain: BareSession, *, sized: bool) -> Direct | None:
        """That of a region, if its session is of that kind and gives results as they are.

        `sized` says that inputs have the same sizes every time.
        """
        if not isinstance(plain.runner, OnnxRuntimeRunner) or plain.reshaped:
            return None
        return cls(plain.runner, plain, sized=sized)

    def __call__(self, tensors: Sequence[torch.Tensor], index: int) -> Results:
        """Run it on a device; the tensors lie in order in memory."""
        places: tuple[Any, ...] = tuple([tensors[i].data_ptr() for i in self._inputs])
        if not self._sized:
            places += tuple([tensors[i].shape for i in self._inputs])
        feeds = self._fed.get(places)
        if feeds is None:
            feeds = self._feed(places, tensors)
        fetched = self._runner.fetch(feeds)
        return [None if i is None else self._read(fetched, i, index) for i in self._results]

    def _feed(self, places: tuple[Any, ...], tensors: Sequence[torch.Tensor]) -> Any:
        if len(self._fed) >= _MOST_PLACES:
            self._fed.clear()
        made = self._fed[places] = self._runner.feeds([value_over(tensors[i]) for i in self._inputs])
        return made

    def _read(self, fetched: Any, output: int, index: int) -> torch.Tensor:
        try:
            return from_runtime(fetched.dlpack_at(output), self._booleans[output], index)
        except RuntimeError:  # DLPack does not carry a tensor without elements from there
            shape = fetched[output].shape()
            if 0 not in shape:
                raise
            return on_device(torch.empty(shape, dtype=self._runner.output_types[output]), index)
