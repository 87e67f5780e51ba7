"""Plans: an ATen call as a small ONNX model that is ready to run, kept by what the call looks like."""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, TypeAlias

import torch
from torch._decomp import core_aten_decompositions
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from sardonyx.cache.lru import LRU
from sardonyx.capture.aot import decompositions
from sardonyx.capture.whole import keeping_whole
from sardonyx.diagnose.report import collecting
from sardonyx.eager.memory import from_runtime, on_device, on_host, to_runtime
from sardonyx.engines.onnxruntime import OnnxRuntimeRunner
from sardonyx.errors import UnsupportedOperator
from sardonyx.options import Options
from sardonyx.pipeline import compile_graph
from sardonyx.run.region import CompiledRegion

log = logging.getLogger(__name__)

_MOST = 8192
"""Plans that are kept; the least recently used go."""
_LARGE = 2**16
"""Elements from which several threads are worth having: each session has threads of its own."""

Results: TypeAlias = "list[torch.Tensor | None]"
Plan: TypeAlias = Callable[[Sequence[torch.Tensor]], Results]
"""Tensors of the device in and out; None for a result that was not asked for, as a gradient may not be."""

_VALUES = 2
"""How many values of a number get plans of their own, before there is one that takes any."""

_lock = threading.RLock()


class _Kept:
    """Plans by what a call looks like; and by that without the values of its numbers."""

    exact = LRU[Plan](_MOST)
    loose: ClassVar[dict[Hashable, _Numbered | None]] = {}
    """None where there cannot be one."""
    seen: ClassVar[Counter[Hashable]] = Counter()


def run(operator: Any, given: dict[str, Any]) -> Results:
    """The results of a call, by its plan, which is made if there is none."""
    key = key_of(operator, given)
    plan = _Kept.exact.get(key)
    if plan is not None:
        return plan(tensors_of(given))
    with _lock:
        numbered = _loosely(operator, given)
        if numbered is not None:
            return numbered(given)
        plan = _made(operator, given)
        _Kept.exact.put(key, plan)
    return plan(tensors_of(given))


def made_so_far() -> int:
    """How many plans there are."""
    return len(_Kept.exact) + len(_Kept.loose)


def direct_of(operator: Any, given: dict[str, Any]) -> Direct | None:
    """The session of a call that has been, if running it is all there is to do."""
    plan = _Kept.exact.get(key_of(operator, given))
    return plan.direct if isinstance(plan, _Plan) else None


def key_of(operator: Any, given: dict[str, Any]) -> Hashable:
    """What a plan is for: the operator, dtypes and sizes of tensors, and everything else as it is."""
    return operator, tuple([(name, _kind(value)) for name, value in given.items()])


def _kind(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape
    if isinstance(value, (list, tuple)):
        return tuple([_kind(x) for x in value])
    return type(value), value  # 1, 1.0 and True are equal, and not the same argument


def _loosely(operator: Any, given: dict[str, Any]) -> _Numbered | None:
    """The plan that takes any number where this call has one, once there have been a few: an optimizer's change."""
    names = [name for name, value in given.items() if type(value) is float and math.isfinite(value)]
    if not names:
        return None
    key = key_of(operator, {name: None if name in names else value for name, value in given.items()})
    if key in _Kept.loose:
        return _Kept.loose[key]
    _Kept.seen[key] += 1
    if _Kept.seen[key] <= _VALUES:
        return None
    try:
        made = _Numbered(operator, given, names)
    except Exception as error:
        log.info("%s has a plan for every number it is called with: %s", operator, error)
        made = None
    _Kept.loose[key] = made
    return made


def tensors_of(given: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among arguments, in their order."""
    found: list[torch.Tensor] = []
    for value in given.values():
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [x for x in value if isinstance(x, torch.Tensor)]
    return found


def _made(operator: Any, given: dict[str, Any]) -> Plan:
    """Trace the call, and compile it. What cannot be expressed in ONNX raises `UnsupportedOperator`."""
    tensors = tensors_of(given)
    with torch.no_grad(), keeping_whole(), collecting():
        try:
            graph = make_fx(_function(operator, given), decompositions(), tracing_mode="fake")(*map(_like, tensors))
        except _UNTRACEABLE as error:
            raise UnsupportedOperator(f"it cannot be traced: {error}") from error
        return _Plan(compile_graph(graph, "inference", frozenset(), _options(tensors)))


def _options(tensors: Sequence[torch.Tensor]) -> Options:
    large = sum(x.numel() for x in tensors) >= _LARGE
    threads = torch.get_num_threads() if large else 1
    return Options.of({}, fallback="error", session_options={"intra_op_num_threads": threads}, cache_dir="")


_UNTRACEABLE = (DynamicOutputShapeException, DataDependentOutputException, UnsupportedFakeTensorException)


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def _function(operator: Any, given: dict[str, Any]) -> Callable[..., Any]:
    """The call as a function of its tensors alone."""
    leaves, spec = pytree.tree_flatten(given)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def call(*tensors: torch.Tensor, **numbers: Any) -> Any:
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        result = operator(**(pytree.tree_unflatten(filled, spec) | numbers))
        return list(result) if isinstance(result, (tuple, list)) else [result]

    return call


class _Plan:
    """A compiled call. Where its session takes and gives tensors as they are, it is run without a way around."""

    def __init__(self, run: Callable[[list[Any]], Sequence[Any]]) -> None:
        self._run = run
        self.direct: Direct | None = None

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Results:
        if self.direct is not None:
            return self.direct(tensors)
        whole = all(x.numel() for x in tensors)  # without elements, a tensor cannot be handed over
        given = [on_host(x) for x in tensors]
        memory = {x.untyped_storage().data_ptr() for x in given if x.numel()}
        results = [None if x is None else on_device(_apart(x, memory)) for x in self._run(list(given))]
        region = getattr(self._run, "__self__", None)
        if whole and isinstance(region, CompiledRegion):
            self.direct = Direct.of(region)
        return results


def _apart(result: torch.Tensor, memory: set[int]) -> torch.Tensor:
    """A result in memory of its own: a graph may hand an operand back, and an operator that is no view does not."""
    return result.clone() if result.numel() and result.untyped_storage().data_ptr() in memory else result


class Direct:
    """A session that is given the device's tensors."""

    def __init__(self, runner: OnnxRuntimeRunner, inputs: Sequence[int]) -> None:
        self._runner, self._inputs = runner, tuple(inputs)
        self._booleans = [dtype == torch.bool for dtype in runner.output_types]

    @classmethod
    def of(cls, region: CompiledRegion) -> Direct | None:
        """That of a region, if it does nothing beside running a session."""
        session = region.plain_session()
        if session is None or not isinstance(session.runner, OnnxRuntimeRunner):
            return None
        return cls(session.runner, session.inputs)

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Results:
        """Run it; the tensors lie in order in memory."""
        feeds = [to_runtime(tensors[i]) for i in self._inputs]
        fetched = self._runner.fetch(feeds)
        return [self._read(fetched, i) for i in range(len(self._booleans))]

    def _read(self, fetched: Any, index: int) -> torch.Tensor:
        try:
            return from_runtime(fetched.dlpack_at(index), self._booleans[index])
        except RuntimeError:  # DLPack does not carry a tensor without elements from there
            shape = fetched[index].shape()
            if 0 not in shape:
                raise
            return on_device(torch.empty(shape, dtype=self._runner.output_types[index]))


class _Numbered:
    """A plan for any value of some numbers, which its model takes as tensors."""

    def __init__(self, operator: Any, given: dict[str, Any], names: Sequence[str]) -> None:
        self._names = names
        tensors = tensors_of(given)
        call = _function(operator, dict.fromkeys(names) | {n: v for n, v in given.items() if n not in names})

        def of_numbers(*values: torch.Tensor) -> Any:
            numbers = {name: value.item() for name, value in zip(names, values[len(tensors) :], strict=True)}
            return call(*values[: len(tensors)], **numbers)

        values = [torch.tensor(given[name], dtype=torch.float64) for name in names]
        with torch.no_grad(), collecting():
            apart: dict[Any, Any] = dict(core_aten_decompositions())
            traced = make_fx(of_numbers, apart, tracing_mode="symbolic")
            graph = traced(*map(_like, tensors), *values)
            self._plan = _Plan(compile_graph(graph, "inference", frozenset(), _options(tensors)))

    def __call__(self, given: dict[str, Any]) -> Results:
        """The results of a call."""
        values = [on_device(torch.tensor(given[name], dtype=torch.float64)) for name in self._names]
        return self._plan([*tensors_of(given), *values])
