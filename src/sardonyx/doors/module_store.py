"""Disk cache of the models of modules, so that the next process need not trace them.

An entry has the optimized model without weights, and its call spec. Its key is made of the module's fingerprint, the
call's signature and the options. The first call that finds an entry runs the module itself; then the model is loaded
and its results are compared with the module's. Later calls use the model only if they agree.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import torch

from sardonyx import fork
from sardonyx.cache.disk import default_cache
from sardonyx.cache.fingerprint import fingerprint
from sardonyx.cache.machine import key_of
from sardonyx.cache.provenance import origin_of_module
from sardonyx.capture.arguments import Arguments
from sardonyx.capture.conditions import function_of_sizes
from sardonyx.capture.module_trace import FlatModule, ModuleTrace, find_tensor
from sardonyx.capture.regions import Result
from sardonyx.engines.engine import Engine, EngineChoice
from sardonyx.engines.registry import find as find_engine
from sardonyx.options import Options
from sardonyx.pipeline import refit
from sardonyx.run.binding import Binding
from sardonyx.run.builds import Built
from sardonyx.run.cache_binding import CacheBinding
from sardonyx.run.region import CompiledRegion
from sardonyx.run.sessions import OpenSession, open_session
from sardonyx.run.snapshot import EDITS_BEFORE_THAW
from sardonyx.telemetry.report import RegionReport
from sardonyx.telemetry.verify import close
from sardonyx.translate import table

log = logging.getLogger(__name__)

_MODEL, _CALL_SPEC = "model.onnx", "call_spec.json"


# Keys


def store_key(
    module: torch.nn.Module, options: Options, arguments: Arguments, sizes: Sequence[int], varying: set[int]
) -> str | None:
    """Return the cache key of the model of a call; None if it cannot be cached."""
    signature = _stable_text(arguments.key)
    plain = all(tensor.device.type == "cpu" and not tensor.is_complex() for tensor in arguments.tensors)
    single = all(tensor.dim() or tensor.dtype != torch.float64 for tensor in arguments.tensors)  # others may be numbers
    inspected = options.transforms or options.dump or options.verify or options.report
    translated_otherwise = options.translations or not table.has_only_own_translations()
    chooses = options.precision != "float32"  # the choice is cached by itself, and the report has it
    if signature is None or not plain or not single or inspected or translated_otherwise or chooses:
        return None
    module_fingerprint = fingerprint(module) if default_cache(options) else None
    if module_fingerprint is None:
        return None
    engine = find_engine(options.engine)
    return key_of(
        what="a module's model",
        module=module_fingerprint,
        arguments=signature,
        sizes=repr([None if place in varying and size > 1 else size for place, size in enumerate(sizes)]),
        options=repr(options.artifact_key()),
        engine=repr((engine.name, engine.probe().version, engine.identity(options))),
    )


def _stable_text(token: Any) -> str | None:
    """Format a part of a signature identically in every process; None if it is compared by identity."""
    if isinstance(token, tuple):
        parts = [_stable_text(part) for part in token]
        return None if None in parts else f"({', '.join(map(str, parts))})"
    if isinstance(token, type):
        origin = origin_of_module(token.__module__)
        return f"{origin} {token.__module__}.{token.__qualname__}" if origin else None
    return repr(token) if isinstance(token, _STABLE_REPR) else None


_STABLE_REPR = (type(None), bool, int, float, str, bytes, complex, range, torch.dtype, torch.device, torch.layout)


# Entries


@dataclass(frozen=True)
class StoredCallSpec:
    """How a stored model is called, as plain data for JSON."""

    inputs: list[int | str]
    """For each input the index among the call's tensors and dynamic integers, or the name of a weight."""
    weights: dict[str, str]
    """For each initializer without data the name of a weight."""
    results: list[dict[str, Any]]
    """For each tensor of the results the output of the model, and the memory order of its axes."""
    reshaped: list[tuple[int, list[int]]]
    """Outputs whose shape differs from the engine's, with the shape to restore."""
    dynamic: list[int]
    condition: str
    is_dynamic: bool
    orders: list[tuple[int, list[int]]] = field(default_factory=list)
    """Inputs that the engine gets with their axes permuted, with the order."""
    widened: list[str] = field(default_factory=list)
    """Initializers that are in half precision in the module, and in float32 in the model."""
    cache: list[list[int]] = field(default_factory=list)
    """Keys and values that are appended in place: the inputs, the outputs, and the inputs with their lengths."""

    def names(self) -> list[str]:
        """Return the names of the weights that the model needs."""
        return sorted({*self.weights.values(), *(x for x in self.inputs if isinstance(x, str))})

    def binding(self) -> Binding:
        """Return the binding for arguments that are the weights in the order of `names`, then the inputs."""
        weights = {name: index for index, name in enumerate(self.names())}
        arguments = iter(range(len(weights), len(weights) + len(self.inputs)))
        inputs = tuple(weights[x] if isinstance(x, str) else next(arguments) for x in self.inputs)
        return Binding(
            inputs=inputs,
            results=tuple(Result(x["output"], order=x["order"] and tuple(x["order"])) for x in self.results),
            weights={name: weights[weight] for name, weight in self.weights.items()},
            widened=frozenset(self.widened),
            fixed=frozenset(weights.values()),
            reshaped={index: tuple(shape) for index, shape in self.reshaped},
            orders={inputs[index]: tuple(order) for index, order in self.orders},
            cache=CacheBinding(*map(tuple, self.cache)) if self.cache else None,
        )


def store(
    options: Options, key: str, module: torch.nn.Module, traced: ModuleTrace, compiled: CompiledRegion | None
) -> None:
    """Store the model of a call, if it is a single region whose call spec can be stored."""
    built = None if compiled is None else compiled.built
    call_spec = _call_spec(traced, built, find_engine(options.engine)) if built is not None else None
    cache = default_cache(options)
    if built is None or call_spec is None or cache is None:
        log.info("the model of %s is not stored on disk", type(module).__name__)
        return

    def make(folder: Path) -> None:
        (folder / _MODEL).write_bytes(built.model)
        (folder / _CALL_SPEC).write_text(json.dumps(vars(call_spec)), encoding="utf-8")

    cache.put(key, make, {"what": "module", "name": type(module).__name__, "engine": options.engine})


def _call_spec(traced: ModuleTrace, built: Built, engine: Engine) -> StoredCallSpec | None:
    binding, cache = built.binding, built.binding.cache
    places: dict[int, int | str] = {**traced.inputs}
    places |= {index: name for index, name in traced.weights.items() if isinstance(name, str)}
    simple = all(r.output is not None and r == Result(r.output, order=r.order) for r in binding.results)
    known = {*binding.inputs, *binding.weights.values()} <= set(places)
    if not simple or not known or binding.draws or binding.complex or traced.has_numbers or built.libraries:
        return None
    if cache is not None and isinstance(engine, EngineChoice):  # it could choose one that does not append in place
        return None
    return StoredCallSpec(
        inputs=[places[index] for index in binding.inputs],
        weights={name: str(places[index]) for name, index in binding.weights.items()},
        results=[{"output": r.output, "order": r.order} for r in binding.results],
        reshaped=[(index, list(shape)) for index, shape in binding.reshaped.items()],
        dynamic=list(traced.dynamic),
        condition=traced.condition,
        is_dynamic=traced.is_dynamic,
        widened=sorted(binding.widened & binding.weights.keys()),
        orders=[(i, list(binding.orders[index])) for i, index in enumerate(binding.inputs) if index in binding.orders],
        cache=[] if cache is None else [list(cache.pasts), list(cache.presents), list(cache.lengths)],
    )


# Loading


class StaleModel(Exception):
    """A stored model must not be used; another session has to be built."""


def load(
    options: Options, key: str, module: torch.nn.Module, arguments: Arguments, sizes: Sequence[int], flat: FlatModule
) -> tuple[ModuleTrace, StoredModel, list[torch.Tensor]] | None:
    """Return the stored model of a call, and the tensors that the module itself computes; None if there is no entry."""
    cache = default_cache(options)
    folder = cache.get(key) if cache else None
    if cache is None or folder is None:
        return None

    def reject(reason: str) -> None:
        log.warning("the stored model of %s is dropped: %s", type(module).__name__, reason)
        cache.drop(key)

    try:
        call_spec = StoredCallSpec(**json.loads((folder / _CALL_SPEC).read_text(encoding="utf-8")))
        accepts = function_of_sizes(call_spec.condition)
        if not accepts(sizes):
            log.info("the stored model of %s is for other sizes", type(module).__name__)
            return None
        run = StoredModel((folder / _MODEL).read_bytes(), call_spec, options)
        weights = [_weight(module, name) for name in call_spec.names()]
        tensors = [*arguments.dense(), *(arguments.integers[i] for i in call_spec.dynamic)]
        inputs = [tensors[place] for place in call_spec.inputs if isinstance(place, int)]
    except Exception as error:  # a corrupt entry may fail in any way
        reject(f"it cannot be used: {error}")
        return None
    with torch.no_grad():
        outputs = run.compare_in_background(lambda: flat(*arguments.to_trace()), weights, inputs, reject)
    return _new_trace(call_spec, accepts, flat), run, outputs


def _weight(module: torch.nn.Module, name: str) -> torch.Tensor:
    tensor = find_tensor(module, name)
    if tensor is None:
        raise ValueError(f"the module has no tensor {name}")
    return tensor


def _new_trace(call_spec: StoredCallSpec, accepts: Callable[[Sequence[int]], bool], flat: FlatModule) -> ModuleTrace:
    names = call_spec.names()
    return ModuleTrace(
        graph=torch.fx.GraphModule({}, torch.fx.Graph()),
        weights=dict(enumerate(names)),
        inputs={len(names) + i: x for i, x in enumerate(x for x in call_spec.inputs if isinstance(x, int))},
        dynamic=tuple(call_spec.dynamic),
        results=flat.results,
        accepts=accepts,
        condition=call_spec.condition,
        numbers=lambda sizes: (),
        is_dynamic=call_spec.is_dynamic,
    )


class StoredModel:
    """A stored model as a callable over weights and inputs; it detects edited weights."""

    def __init__(self, model: bytes, call_spec: StoredCallSpec, options: Options) -> None:
        self._model, self._options = model, options
        self._graph = ir.from_proto(onnx.load_from_string(model)).graph
        operators = Counter(node.op_type for node in self._graph)
        self.report = RegionReport(operators, operators.total(), weights=len(call_spec.weights), sessions=1)
        self.report.in_place = len(call_spec.cache[0]) if call_spec.cache else 0
        self._binding = call_spec.binding()
        self._current: OpenSession | None = None
        self._edits = -1
        self._lock = fork.Lock()
        self._verdict: Future[bool] | None = None
        fork.register(self)

    def forked(self) -> None:
        """In a child process: reject a model whose comparison was still running, since its thread is gone."""
        if self._verdict is not None and not self._verdict.done():
            self._verdict = Future()
            self._verdict.set_result(False)

    @property
    def should_rebuild(self) -> bool:
        """Whether weights change so often that they should be inputs, which a stored model does not support."""
        return self._edits > EDITS_BEFORE_THAW

    def compare_in_background(
        self,
        module: Callable[[], Sequence[torch.Tensor]],
        weights: Sequence[torch.Tensor],
        inputs: Sequence[Any],
        reject: Callable[[str], None],
    ) -> list[torch.Tensor]:
        """Return the module's results; load the model and compare its results in the background.

        The module runs first: on the same cores, running both at once would take as long as one after the other.
        """
        args = [*weights, *(x.clone() if isinstance(x, torch.Tensor) else x for x in inputs)]
        executor = ThreadPoolExecutor(1)
        expected = list(module())
        self._verdict = executor.submit(self._agrees, args, [x.clone() for x in expected], reject)
        executor.shutdown(wait=False)
        return expected

    @torch.no_grad()
    def _agrees(self, args: Sequence[Any], expected: Sequence[torch.Tensor], reject: Callable[[str], None]) -> bool:
        try:
            outputs = self._run(args)
        except Exception as error:
            reject(f"it cannot be used: {error}")
            return False
        if self._edits:
            log.info("weights were edited before a stored model could be compared with the module")
            return False
        agrees = len(outputs) == len(expected) and all(map(close, outputs, expected))
        if not agrees:
            reject("its results differ from the module's")
        return agrees

    def __call__(self, args: Sequence[Any]) -> Sequence[torch.Tensor]:
        """Return the results for the weights in the order of `StoredCallSpec.names`, then the inputs."""
        if self._verdict is not None and not self._verdict.result():
            raise StaleModel
        return self._run(args)

    def _run(self, args: Sequence[Any]) -> Sequence[torch.Tensor]:
        current = self._current
        if current is None or not current.snapshot.matches(args):
            current = self._load(args)
        return self._binding.call(current.runner, args)

    def _load(self, args: Sequence[Any]) -> OpenSession:
        """Open a session for the current weights."""
        with self._lock:
            if self._current is None or not self._current.snapshot.matches(args):
                engine = find_engine(self._options.engine)
                _, self._current = open_session(
                    engine, self._model, self._graph, self._binding, args, self._options, refit=refit
                )
                self._edits += 1
            return self._current
