"""What happens to an ATen call on the device: it is a matter of memory, or it becomes an ONNX model that runs."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch.utils import _pytree as pytree

from sardonyx.eager.core import Core
from sardonyx.eager.layout import IN_ORDER, layout_of
from sardonyx.eager.memory import DEVICE, is_on_device, on_device, on_host
from sardonyx.eager.plans import PLANS, Call, Direct, Plan, Results, distinct, tensors_of
from sardonyx.eager.variants import Variant, is_view, variant_of
from sardonyx.errors import EngineError, SardonyxError, UnsupportedOperator

log = logging.getLogger(__name__)

Fallback: TypeAlias = Literal["warn", "error", "quiet"]
Body: TypeAlias = Callable[..., Any]
F = TypeVar("F", bound=Body)

BODIES: dict[str, Body] = {}
"""Operators that are written by hand, by their qualified names; each takes what torch calls it with."""

CPU = DispatchKeySet(DispatchKey.CPU)


class State:
    """How the device is set, and what happened on it."""

    fallback: Fallback = "warn"
    core: Core | None = None
    """What has the calls of the executor in C++."""
    calls: ClassVar[Counter[str]] = Counter()
    fallbacks: ClassVar[Counter[str]] = Counter()


def body(*names: str) -> Callable[[F], F]:
    """Let a function be what operators do on the device."""

    def register(function: F) -> F:
        BODIES.update(dict.fromkeys(names, function))
        return function

    return register


def called(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """An operator with tensors of the device, as torch's dispatcher hands it over."""
    name = operator.name()
    State.calls[name] += 1
    written = BODIES.get(name)
    if written is not None:
        return or_by_torch(operator, args, kwargs, lambda: written(*args, **kwargs))
    if torch.Tag.nondeterministic_seeded in operator.tags:
        return by_cpu(operator, args, kwargs)  # random numbers are torch's, so that its seeds govern them
    if is_view(operator):
        return operator.redispatch(CPU, *args, **kwargs)  # which reads no memory, and so does not ask whose it is
    variant = variant_of(operator)
    if variant is None:
        return _by_torch(operator, args, kwargs, "there is no functional operator behind it")
    return or_by_torch(operator, args, kwargs, lambda: computed(variant, args, kwargs))


def or_by_torch(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], run: Callable[[], Any]) -> Any:
    """What `run` gives; where ONNX cannot express it, what the CPU does, if that is allowed."""
    try:
        return run()
    except UnsupportedOperator as error:
        return _by_torch(operator, args, kwargs, error.what)


class Kernel:
    """A functional operator as it is registered: a call that looks like one before goes straight to its session."""

    every: ClassVar[list[Kernel]] = []

    def __init__(self, operator: Any) -> None:
        self._operator, self._name = operator, operator.name()
        self.every.append(self)
        returns = operator._schema.returns
        self._single = len(returns) == 1 and str(returns[0].type) == "Tensor"
        self._parameters = tuple(a.name for a in operator._schema.arguments)
        self._known: dict[Hashable, Direct] = {}

    def forget(self) -> None:
        """Ask anew how each call is run."""
        self._known = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it."""
        look = _look(args, kwargs)
        direct = self._known.get(look) if look is not None else None
        if direct is None:
            results = called(self._operator, *args, **kwargs)
            if look is not None:
                self._learn(look, args, kwargs)
            return results
        State.calls[self._name] += 1
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        try:
            found = direct(tensors, tensors[0].get_device() if tensors else 0)
        except EngineError as error:
            raise _named(self._operator, error) from error
        return found[0] if self._single else tuple(found)

    def _learn(self, look: Hashable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        given = dict(zip(self._parameters, args, strict=False)) | dict(kwargs)
        plan = PLANS.known(Call(self._operator, given, _index_of(given)))
        if plan is None or plan.direct is None or not (self._single or len(self._operator._schema.returns) > 1):
            return
        if len(self._known) >= _MOST_LOOKS:
            self._known.clear()
        self._known[look] = plan.direct


_MOST_LOOKS = 1024


def _look(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable | None:
    """What a call looks like; None where a tensor is in a list, elsewhere, or not in order in memory.

    Complex tensors are never run straight, so it does not matter whether one is conjugate.
    """
    look: list[Any] = [torch.get_default_dtype()]  # which decides that of many results
    for x in args:
        if isinstance(x, torch.Tensor):
            index = x.get_device()  # of the CPU's less than none
            if index < 0 or not x.is_contiguous() or x.is_neg():
                return None
            look += (index, x.dtype, x.shape)
        elif isinstance(x, (list, tuple)):
            if any(isinstance(y, torch.Tensor) or y is None for y in x):
                return None
            look += (list, tuple([distinct(y) for y in x]))
        else:
            look.append(distinct(x))
    for name, x in kwargs.items():  # a call that names a device may not be on the first
        if isinstance(x, (torch.Tensor, list, tuple, torch.device)):
            return None
        look += (name, distinct(x))
    return tuple(look)


# By ONNX Runtime


def computed(variant: Variant, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An operator, computed by ONNX Runtime and written where it is wanted."""
    given = dict(zip(variant.parameters, args, strict=False)) | dict(kwargs)
    if variant.kind == "functional":
        return _as_declared(variant.operator, _run(variant, given, given))
    targets = [given[name] for name in variant.written]
    wanted = given
    if variant.kind == "out":
        wanted = {name: value for name, value in given.items() if name not in variant.written}
        _tell_dtype(variant, wanted, targets)
    for target, result in zip(targets, _run(variant, wanted, given), strict=True):
        if result is not None:
            _write(target, result, variant)
    return targets[0] if len(targets) == 1 else tuple(targets)


def _run(variant: Variant, wanted: Mapping[str, Any], given: Mapping[str, Any]) -> Results:
    """The results of the functional operator for what it wants of what was given."""
    index = _index_of(given)
    fitted = {name: _fit(value, index) for name, value in wanted.items()}
    for name in _tensors_only(variant.operator):
        if isinstance(fitted.get(name), (bool, int, float)):
            fitted[name] = on_device(_tensor(fitted[name], tensors_of(fitted)), index)
    call = Call(variant.functional, fitted, index)
    try:
        plan, results = PLANS.run(call)
    except EngineError as error:
        raise _named(variant.operator, error) from error
    if State.core is not None:
        _offer(State.core, variant, plan, call, given)
    return results


def _named(operator: Any, error: EngineError) -> EngineError:
    """What the engine has to say, with the operator's name."""
    return type(error)(f"{operator.name()}: {error.what}")


def _offer(core: Core, variant: Variant, plan: Plan, call: Call, given: Mapping[str, Any]) -> None:
    """Let the core have calls like this one."""
    if plan.plain is None or (plan.numbers and plan.numbers != call.numbers):
        return
    sized = torch.Tag.dynamic_output_shape not in variant.operator.tags
    leaves = [layout_of(x) or IN_ORDER for x in tensors_of(given)]
    core.offer(variant.operator, plan.plain, leaves, len(call.tensors), len(plan.numbers), sized=sized)


@cache
def _tensors_only(operator: Any) -> tuple[str, ...]:
    """The arguments that torch makes tensors of numbers for, hands over as numbers, and does not take as such."""
    if torch._C._should_allow_numbers_as_tensors(operator._schema.name.partition("::")[2]):
        return ()
    return tuple(a.name for a in operator._schema.arguments if str(a.type) in ("Tensor", "Optional[Tensor]"))


def _tensor(number: Any, beside: Sequence[torch.Tensor]) -> torch.Tensor:
    """A number as a tensor that decides no dtype, as exact as those beside it."""
    exact = any(x.dtype == torch.float64 for x in beside)
    return torch.tensor(number, dtype=torch.float64 if exact and isinstance(number, float) else None)


def _index_of(values: Any) -> int:
    """Which of the devices a call is on: that of its tensors, or one that it names."""
    for leaf in pytree.tree_leaves(values):
        if is_on_device(leaf):
            return int(leaf.get_device())
        if isinstance(leaf, torch.device) and leaf.type == DEVICE:
            return PLANS.index(leaf)
    return 0


def _fit(value: Any, index: int) -> Any:
    """An argument as plans take it: tensors of the device, in order in memory; no device, which is the CPU for them."""
    if isinstance(value, torch.Tensor):
        if value.device.type != DEVICE:
            if value.dim():
                raise RuntimeError(f"a tensor is on {value.device}, and others are on {DEVICE}")
            value = on_device(value.cpu(), index)
        return _in_order(value) if value.is_conj() or value.is_neg() or layout_of(value) is None else value
    if isinstance(value, (list, tuple)):
        return [_fit(x, index) for x in value]
    return None if isinstance(value, torch.device) else value


def _in_order(tensor: torch.Tensor) -> torch.Tensor:
    return on_device(on_host(tensor).contiguous(), tensor.get_device())


def _as_declared(operator: Any, results: Results) -> Any:
    """Results as the schema has them: a tensor, a list, or several."""
    returns = operator._schema.returns
    if len(returns) == 1:
        return results if str(returns[0].type) != "Tensor" else results[0]
    return tuple(results)


def _tell_dtype(variant: Variant, given: dict[str, Any], targets: Sequence[torch.Tensor]) -> None:
    """Operators without tensors, as `arange`, make what the target can hold."""
    takes = any(a.name == "dtype" for a in variant.functional._schema.arguments)
    if takes and not tensors_of(given):
        given["dtype"] = targets[0].dtype


def _write(target: torch.Tensor, result: torch.Tensor, variant: Variant) -> None:
    """Put a result where it is wanted. A target of another shape is an error, unless it is empty."""
    if target.device != result.device:
        devices = f"on {result.device}, and the tensor it is to be written to on {target.device}"
        raise RuntimeError(f"{variant.operator.name()}: the result is {devices}")
    if target.shape != result.shape:
        if variant.kind == "in place" or target.numel():
            shapes = f"the shape {tuple(result.shape)}, and the tensor it is to be written to {tuple(target.shape)}"
            raise RuntimeError(f"{variant.operator.name()}: the result has {shapes}")
        target.resize_(result.shape)
    if not torch.can_cast(result.dtype, target.dtype):
        raise RuntimeError(f"result type {result.dtype} can't be cast to the desired output type {target.dtype}")
    target.copy_(result)


# By torch


class NotMapped(SardonyxError, NotImplementedError):
    """An operator cannot run on the device, and `fallback="error"` forbids leaving it to the CPU."""


def _by_torch(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], why: str) -> Any:
    name = operator.name()
    if State.fallback == "error":
        raise NotMapped(f"{name} cannot run on {DEVICE}: {why}", hint='sardonyx.eager.enable(fallback="warn")')
    if not State.fallbacks[name]:
        log.log(logging.WARNING if State.fallback == "warn" else logging.INFO, "on the CPU: %s: %s", name, why)
    State.fallbacks[name] += 1
    return by_cpu(operator, args, kwargs)


def by_cpu(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator on the CPU, over the same memory."""
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    index = _index_of(leaves)
    given = [_on_host(leaf) for leaf in leaves]
    same = {id(host): leaf for host, leaf in zip(given, leaves, strict=True) if is_on_device(leaf)}
    args, kwargs = pytree.tree_unflatten(given, spec)
    results = operator(*args, **kwargs)
    for host, leaf in zip(given, leaves, strict=True):
        if is_on_device(leaf) and host.shape != leaf.shape:  # an `out=` that torch gave its size
            leaf.resize_(host.shape)
            on_host(leaf).copy_(host)
    for result in pytree.tree_leaves(results):
        if isinstance(result, torch.Tensor) and result.layout != torch.strided:
            raise NotMapped(f"{operator.name()}: tensors of the layout {result.layout} cannot be on {DEVICE}")
    return pytree.tree_map_only(torch.Tensor, lambda x: same[id(x)] if id(x) in same else on_device(x, index), results)


def _on_host(leaf: Any) -> Any:
    if is_on_device(leaf):
        return on_host(leaf) if leaf.numel() else torch.empty(leaf.shape, dtype=leaf.dtype)  # which torch may resize
    return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type == DEVICE else leaf
