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
from sardonyx.capture.regions import Result
from sardonyx.engines.registry import find as find_engine
from sardonyx.options import Options
from sardonyx.pipeline import refit
from sardonyx.run.binding import Binding
from sardonyx.run.builds import Built
from sardonyx.run.region import CompiledRegion
from sardonyx.run.sessions import Held, open_session
from sardonyx.run.snapshot import EDITS_BEFORE_THAW
from sardonyx.telemetry.report import RegionReport
from sardonyx.telemetry.verify import close
from sardonyx.translate import table

log = logging.getLogger(__name__)

_MODEL, _CALLING = "model.onnx", "calling.json"


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
    results: list[dict[str, Any]]
    """For each tensor of the results an output of the model, and the order in which its axes lie in memory."""
    reshaped: list[tuple[int, list[int]]]
    """Outputs that are to be seen with other sizes than the engine gives them."""
    dynamic: list[int]
    condition: str
    is_dynamic: bool

    def names(self) -> list[str]:
        """The weights that the model needs."""
        return sorted({*self.weights.values(), *(x for x in self.inputs if isinstance(x, str))})

    def binding(self) -> Binding:
        """That of a call with the weights by name, and then the inputs."""
        weights = {name: index for index, name in enumerate(self.names())}
        given = iter(range(len(weights), len(weights) + len(self.inputs)))
        return Binding(
            inputs=tuple(weights[x] if isinstance(x, str) else next(given) for x in self.inputs),
            results=tuple(Result(x["output"], order=x["order"] and tuple(x["order"])) for x in self.results),
            weights={name: weights[weight] for name, weight in self.weights.items()},
            fixed=frozenset(weights.values()),
            reshaped={index: tuple(shape) for index, shape in self.reshaped},
        )


def keep(options: Options, at: str, module: torch.nn.Module, traced: Traced, compiled: CompiledRegion | None) -> None:
    """Keep the model of a call, if it is one, and one that can be called without its graph."""
    built = None if compiled is None else compiled.built
    calling = _calling(traced, built) if built is not None else None
    cache = default_cache(options)
    if built is None or calling is None or cache is None:
        log.info("the model of %s is not kept", type(module).__name__)
        return

    def make(folder: Path) -> None:
        (folder / _MODEL).write_bytes(built.model)
        (folder / _CALLING).write_text(json.dumps(vars(calling)), encoding="utf-8")

    cache.put(at, make, {"what": "module", "name": type(module).__name__, "engine": options.engine})


def _calling(traced: Traced, built: Built) -> Calling | None:
    binding = built.binding
    places: dict[int, int | str] = {**traced.given}
    places |= {index: name for index, name in traced.held.items() if isinstance(name, str)}
    simple = all(r.output is not None and r == Result(r.output, order=r.order) for r in binding.results)
    known = {*binding.inputs, *binding.weights.values()} <= set(places)
    if not simple or not known or binding.draws or binding.complex or traced.has_numbers or built.libraries:
        return None
    return Calling(
        inputs=[places[index] for index in binding.inputs],
        weights={name: str(places[index]) for name, index in binding.weights.items()},
        results=[{"output": r.output, "order": r.order} for r in binding.results],
        reshaped=[(index, list(shape)) for index, shape in binding.reshaped.items()],
        dynamic=list(traced.dynamic),
        condition=traced.condition,
        is_dynamic=traced.is_dynamic,
    )


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
        self._model, self._options = model, options
        self._graph = ir.from_proto(onnx.load_from_string(model)).graph
        operators = Counter(node.op_type for node in self._graph)
        self.report = RegionReport(operators, operators.total(), weights=len(calling.weights), sessions=1)
        self._binding = calling.binding()
        self._current: Held | None = None
        self._edits = -1
        self._lock = fork.Lock()
        self._verdict: Future[bool] | None = None
        fork.register(self)

    def forked(self) -> None:
        """In a child process: what was still being compared with the module there never will be, and is not used."""
        if self._verdict is not None and not self._verdict.done():
            self._verdict = Future()
            self._verdict.set_result(False)

    @property
    def worn(self) -> bool:
        """Whether weights keep changing: they had better be inputs, which those of a kept model are not."""
        return self._edits > EDITS_BEFORE_THAW

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

    def __call__(self, args: Sequence[Any]) -> Sequence[torch.Tensor]:
        """The results, from the weights by name and then the inputs."""
        if self._verdict is not None and not self._verdict.result():
            raise Stale
        return self._run(args)

    def _run(self, args: Sequence[Any]) -> Sequence[torch.Tensor]:
        current = self._current
        if current is None or not current.snapshot.holds(args):
            current = self._load(args)
        return self._binding.restore(current.runner(self._binding.feeds(args)), args)

    def _load(self, args: Sequence[Any]) -> Held:
        """A session for the weights as they are now."""
        with self._lock:
            if self._current is None or not self._current.snapshot.holds(args):
                engine = find_engine(self._options.engine)
                _, self._current = open_session(
                    engine, self._model, self._graph, self._binding, args, self._options, refit=refit
                )
                self._edits += 1
            return self._current
