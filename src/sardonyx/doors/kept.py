"""Models of modules kept on disk, so that the next process need not trace them.

What is kept is the optimized model without weights, and a list of what its inputs and outputs are. It is found by the
module's fingerprint, the call's signature and the options. The call that finds it is answered by the module itself;
then the model is loaded and compared with that answer, and later calls use it only if it gave the same.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
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
from sardonyx.capture.calls import Flat, Traced, tensor_of
from sardonyx.capture.conditions import function_of_sizes
from sardonyx.capture.regions import region_of
from sardonyx.engines import Job
from sardonyx.engines.registry import find as find_engine
from sardonyx.native.carve import DOMAIN as NATIVE
from sardonyx.options import Options
from sardonyx.run.region import CompiledRegion
from sardonyx.run.sessions import Held, shared_runner
from sardonyx.run.snapshot import Snapshot
from sardonyx.telemetry.report import RegionReport
from sardonyx.telemetry.verify import close
from sardonyx.translate import table
from sardonyx.translate.translator import WEIGHTS_LOCATION

log = logging.getLogger(__name__)

_MODEL, _CALLING = "model.onnx", "calling.json"
_MOST_EDITS = 2
"""Weights edited more often than this had better be inputs, which those of a kept model are not."""


# What a model is kept under


def key(
    module: torch.nn.Module, options: Options, arguments: Arguments, sizes: Sequence[int], varying: set[int]
) -> str | None:
    """What the model of a call is kept under; None if it cannot be kept."""
    told = _told(arguments.key)
    plain = all(tensor.device.type == "cpu" and not tensor.is_complex() for tensor in arguments.tensors)
    single = all(tensor.dim() or tensor.dtype != torch.float64 for tensor in arguments.tensors)  # taken for numbers
    looked_at = options.transforms or options.dump or options.verify or options.report
    translated_otherwise = options.translations or not table.is_as_released()
    if told is None or not plain or not single or looked_at or translated_otherwise:
        return None
    found = fingerprint(module) if default_cache(options) else None
    if found is None:
        return None
    engine = find_engine(options.engine)
    return key_of(
        what="a module's model",
        module=found,
        arguments=told,
        sizes=repr([None if place in varying and size > 1 else size for place, size in enumerate(sizes)]),
        options=repr(options.artifact_key()),
        engine=repr((engine.name, engine.probe().version, engine.identity(options))),
    )


def _told(token: Any) -> str | None:
    """A part of a signature as text that is the same in every process; None for what is known by identity alone."""
    if isinstance(token, tuple):
        parts = [_told(part) for part in token]
        return None if None in parts else f"({', '.join(map(str, parts))})"
    if isinstance(token, type):
        origin = origin_of_module(token.__module__)
        return f"{origin} {token.__module__}.{token.__qualname__}" if origin else None
    return repr(token) if isinstance(token, _PLAIN) else None


_PLAIN = (type(None), bool, int, float, str, bytes, complex, range, torch.dtype, torch.device, torch.layout)


# The model, and what its inputs and outputs are


@dataclass(frozen=True)
class Calling:
    """How a kept model is called: plain data, as JSON has it."""

    inputs: list[int | str]
    """For each input the place among the call's tensors and dynamic integers, or the name of a weight."""
    weights: dict[str, str]
    """For each initializer that has no data the name of a weight."""
    results: list[int]
    """For each tensor of the results an output of the model."""
    orders: list[list[int] | None]
    """For each output the order in which its axes lie in memory, where it is not the usual one."""
    shapes: list[list[int] | None]
    """For each output its sizes in that order, where they are known: the model may give it with others."""
    dynamic: list[int]
    condition: str
    is_dynamic: bool

    def names(self) -> list[str]:
        """The weights that the model needs."""
        return sorted({*self.weights.values(), *(x for x in self.inputs if isinstance(x, str))})


def keep(options: Options, at: str, module: torch.nn.Module, traced: Traced, compiled: CompiledRegion | None) -> None:
    """Keep the model of a call, if it is one, and one that can be called without its graph."""
    proto = None if compiled is None else compiled.proto
    calling = _calling(traced, proto) if proto is not None else None
    cache = default_cache(options)
    if proto is None or calling is None or cache is None:
        log.info("the model of %s is not kept", type(module).__name__)
        return

    def make(folder: Path) -> None:
        (folder / _MODEL).write_bytes(proto.SerializeToString())
        (folder / _CALLING).write_text(json.dumps(vars(calling)), encoding="utf-8")

    cache.keep(at, make, {"what": "module", "name": type(module).__name__, "engine": options.engine})


def _calling(traced: Traced, proto: onnx.ModelProto) -> Calling | None:
    region = region_of(traced.graph, frozenset(traced.held))
    if any(found.domain.startswith(NATIVE) for found in proto.opset_import):
        return None  # its kernels are in a library beside it
    if region is None or traced.has_numbers:
        return None
    places: dict[str, int | str] = {}
    for index, node in enumerate(traced.graph.graph.find_nodes(op="placeholder")):
        found = traced.held[index] if index in traced.held else traced.given[index]
        if not isinstance(found, torch.Tensor):
            places[node.name] = found
    outside = [x.name for x in proto.graph.initializer if _is_outside(x)]
    inputs = [x.name for x in proto.graph.input]
    simple = all(r.output is not None and not (r.complex or r.number or r.strides) for r in region.results)
    if not simple or not {*inputs, *outside} <= set(places):
        return None
    return Calling(
        inputs=[places[name] for name in inputs],
        weights={name: str(places[name]) for name in outside},
        results=[r.output for r in region.results if r.output is not None],
        orders=[list(order) if order else None for order in region.orders],
        shapes=[_shape(node.meta["val"], order) for node, order in zip(region.outputs, region.orders, strict=True)],
        dynamic=list(traced.dynamic),
        condition=traced.condition,
        is_dynamic=traced.is_dynamic,
    )


def _is_outside(initializer: onnx.TensorProto) -> bool:
    return any(e.key == "location" and e.value == WEIGHTS_LOCATION for e in initializer.external_data)


def _shape(val: torch.Tensor, order: Sequence[int] | None) -> list[int] | None:
    sizes = [val.shape[axis] for axis in order or range(val.dim())]
    return [int(size) for size in sizes] if all(isinstance(size, int) for size in sizes) else None


# Back from disk


class Stale(Exception):
    """A kept model is not to be used: something else has to be built."""


def find(
    options: Options, at: str, module: torch.nn.Module, arguments: Arguments, sizes: Sequence[int], flat: Flat
) -> tuple[Traced, Restored, list[torch.Tensor]] | None:
    """The kept model of a call, and the tensors that the module itself computes in it."""
    cache = default_cache(options)
    folder = cache.get(at) if cache else None
    if cache is None or folder is None:
        return None

    def reject(reason: str) -> None:
        log.warning("the kept model of %s is dropped: %s", type(module).__name__, reason)
        cache.drop(at)

    try:
        calling = Calling(**json.loads((folder / _CALLING).read_text(encoding="utf-8")))
        accepts = function_of_sizes(calling.condition)
        if not accepts(sizes):
            log.info("the kept model of %s is for other sizes", type(module).__name__)
            return None
        run = Restored((folder / _MODEL).read_bytes(), calling, options)
        weights = [_weight(module, name) for name in calling.names()]
        tensors = [*arguments.dense(), *(arguments.integers[i] for i in calling.dynamic)]
        given = [tensors[place] for place in calling.inputs if isinstance(place, int)]
    except Exception as error:  # whatever is wrong with it
        reject(f"it cannot be used: {error}")
        return None
    with torch.no_grad():
        outputs = run.compared_with(lambda: flat(*arguments.dense()), weights, given, reject)
    return _traced(calling, accepts, flat), run, outputs


def _weight(module: torch.nn.Module, name: str) -> torch.Tensor:
    found = tensor_of(module, name)
    if found is None:
        raise ValueError(f"the module has no {name}")
    return found


def _traced(calling: Calling, accepts: Callable[[Sequence[int]], bool], flat: Flat) -> Traced:
    names = calling.names()
    return Traced(
        graph=torch.fx.GraphModule({}, torch.fx.Graph()),
        held=dict(enumerate(names)),
        given={len(names) + i: x for i, x in enumerate(x for x in calling.inputs if isinstance(x, int))},
        dynamic=tuple(calling.dynamic),
        results=flat.results,
        accepts=accepts,
        condition=calling.condition,
        numbers=lambda sizes: (),
        is_dynamic=calling.is_dynamic,
    )


class Restored:
    """A kept model as a callable over weights and inputs; a weight that is edited is noticed."""

    def __init__(self, model: bytes, calling: Calling, options: Options) -> None:
        self._model, self._calling, self._options = model, calling, options
        self._graph = ir.from_proto(onnx.load_from_string(model)).graph
        operators = Counter(node.op_type for node in self._graph)
        self.report = RegionReport(operators, operators.total(), weights=len(calling.weights), sessions=1)
        weights = {name: index for index, name in enumerate(calling.names())}
        given = iter(range(len(weights), len(weights) + len(calling.inputs)))
        self._inputs = [weights[x] if isinstance(x, str) else next(given) for x in calling.inputs]
        self._weights = {name: weights[weight] for name, weight in calling.weights.items()}
        self._current: tuple[Snapshot, Held] | None = None
        self._edits = -1
        self._lock = fork.Lock()
        self._verdict: Future[bool] | None = None
        fork.watch(self)

    def forked(self) -> None:
        """In a child process: what was still being compared with the module there never will be, and is not used."""
        if self._verdict is not None and not self._verdict.done():
            self._verdict = Future()
            self._verdict.set_result(False)

    @property
    def worn(self) -> bool:
        """Whether weights keep changing, for which another session is better."""
        return self._edits > _MOST_EDITS

    def compared_with(
        self,
        module: Callable[[], Sequence[torch.Tensor]],
        weights: Sequence[torch.Tensor],
        given: Sequence[Any],
        reject: Callable[[str], None],
    ) -> list[torch.Tensor]:
        """What the module gives. The model is loaded, and compared with it, while the caller goes on.

        Not sooner: on the same cores, both would take as long as one after the other.
        """
        args = [*weights, *(x.clone() if isinstance(x, torch.Tensor) else x for x in given)]
        beside = ThreadPoolExecutor(1)
        expected = list(module())
        self._verdict = beside.submit(self._agrees, args, [x.clone() for x in expected], reject)
        beside.shutdown(wait=False)
        return expected

    @torch.no_grad()
    def _agrees(self, args: Sequence[Any], expected: Sequence[torch.Tensor], reject: Callable[[str], None]) -> bool:
        try:
            outputs = self._run(args)
        except Exception as error:
            reject(f"it cannot be used: {error}")
            return False
        if self._edits:
            log.info("weights were edited before a kept model could be compared with the module")
            return False
        agrees = len(outputs) == len(expected) and all(map(close, outputs, expected))
        if not agrees:
            reject("its results are not the module's")
        return agrees

    def __call__(self, args: Sequence[Any]) -> list[torch.Tensor]:
        """The results, from the weights by name and then the inputs."""
        if self._verdict is not None and not self._verdict.result():
            raise Stale
        return self._run(args)

    def _run(self, args: Sequence[Any]) -> list[torch.Tensor]:
        current = self._current
        if current is None or not current[0].holds(args):
            current = self._load(args)
        outputs = current[1].runner([args[index] for index in self._inputs])
        for index, (order, shape) in enumerate(zip(self._calling.orders, self._calling.shapes, strict=True)):
            if shape is not None and list(outputs[index].shape) != shape:
                outputs[index] = outputs[index].view(shape)
            if order is not None:
                outputs[index] = outputs[index].permute([order.index(axis) for axis in range(len(order))])
        return [outputs[index] for index in self._calling.results]

    def _load(self, args: Sequence[Any]) -> tuple[Snapshot, Held]:
        """A session for the weights as they are now."""
        with self._lock:
            if self._current is None or not self._current[0].holds(args):
                self._current = self._session(args)
                self._edits += 1
            return self._current

    def _session(self, args: Sequence[Any]) -> tuple[Snapshot, Held]:
        snapshot = Snapshot(sorted(self._weights.values()), args)
        job = Job.of(
            self._model,
            self._graph,
            self._options,
            weights={name: args[index] for name, index in self._weights.items()},
            fixed=frozenset(i for i, x in enumerate(self._calling.inputs) if isinstance(x, str)),
        )
        return snapshot, shared_runner(find_engine(self._options.engine), job, snapshot)
