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

from sardonyx.eager.memory import DEVICE, is_on_device, on_device, on_host
from sardonyx.eager.plans import Direct, Results, direct_of, run, tensors_of
from sardonyx.eager.variants import Variant, is_view, variant_of
from sardonyx.errors import SardonyxError, UnsupportedOperator

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
        return written(*args, **kwargs)
    if torch.Tag.nondeterministic_seeded in operator.tags:
        return by_cpu(operator, args, kwargs)  # random numbers are torch's, so that its seeds govern them
    if is_view(operator):
        return operator.redispatch(CPU, *args, **kwargs)  # which reads no memory, and so does not ask whose it is
    variant = variant_of(operator)
    if variant is None:
        return _by_torch(operator, args, kwargs, "there is no functional operator behind it")
    try:
        return computed(variant, args, kwargs)
    except UnsupportedOperator as error:
        return _by_torch(operator, args, kwargs, error.what)


class Kernel:
    """A functional operator as it is registered: a call that looks like one before goes straight to its session."""

    def __init__(self, operator: Any) -> None:
        self._operator, self._name = operator, operator.name()
        returns = operator._schema.returns
        self._single = len(returns) == 1 and str(returns[0].type) == "Tensor"
        self._parameters = tuple(a.name for a in operator._schema.arguments)
        self._known: dict[Hashable, Direct] = {}

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
        found = direct([x for x in args if isinstance(x, torch.Tensor)])
        return found[0] if self._single else tuple(found)

    def _learn(self, look: Hashable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        direct = direct_of(self._operator, dict(zip(self._parameters, args, strict=False)) | dict(kwargs))
        if direct is not None and (self._single or len(self._operator._schema.returns) > 1):
            if len(self._known) >= _MOST_LOOKS:
                self._known.clear()
            self._known[look] = direct


_MOST_LOOKS = 1024


def _look(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable | None:
    """What a call looks like; None where a tensor is in a list, elsewhere, or not in order in memory."""
    look: list[Any] = []
    for x in args:
        if isinstance(x, torch.Tensor):
            if not x.is_contiguous() or x.device.type != DEVICE or x.is_complex() or x.is_neg():
                return None
            look += (x.dtype, x.shape)
        elif isinstance(x, (list, tuple)):
            if any(isinstance(y, torch.Tensor) or y is None for y in x):
                return None
            look += (list, tuple(x))
        else:
            look += (type(x), x)
    for name, x in kwargs.items():
        if isinstance(x, (torch.Tensor, list, tuple, torch.device)):
            return None
        look += (name, type(x), x)
    return tuple(look)


# By ONNX Runtime


def computed(variant: Variant, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An operator, computed by ONNX Runtime and written where it is wanted."""
    given = dict(zip(variant.parameters, args, strict=False)) | dict(kwargs)
    if variant.kind == "functional":
        results = _run(variant.functional, given)
        return _as_declared(variant.functional, results)
    targets = [given[name] for name in variant.written]
    if variant.kind == "out":
        given = {name: value for name, value in given.items() if name not in variant.written}
        _tell_dtype(variant, given, targets)
    for target, result in zip(targets, _run(variant.functional, given), strict=True):
        if result is not None:
            _write(target, result, variant)
    return targets[0] if len(targets) == 1 else tuple(targets)


def _run(operator: Any, given: dict[str, Any]) -> Results:
    given = {name: _fit(value) for name, value in given.items()}
    for name in _tensors_only(operator):
        if isinstance(given.get(name), (bool, int, float)):
            given[name] = _tensor(given[name], tensors_of(given))
    return run(operator, given)


@cache
def _tensors_only(operator: Any) -> tuple[str, ...]:
    """The arguments that torch makes tensors of numbers for, hands over as numbers, and does not take as such."""
    if torch._C._should_allow_numbers_as_tensors(operator._schema.name.partition("::")[2]):
        return ()
    return tuple(a.name for a in operator._schema.arguments if str(a.type) in ("Tensor", "Optional[Tensor]"))


def _tensor(number: Any, beside: Sequence[torch.Tensor]) -> torch.Tensor:
    """A number as a tensor that decides no dtype, as exact as those beside it."""
    exact = any(x.dtype == torch.float64 for x in beside)
    return on_device(torch.tensor(number, dtype=torch.float64 if exact and isinstance(number, float) else None))


def _fit(value: Any) -> Any:
    """An argument as plans take it: tensors of the device, in order in memory; no device, which is the CPU for them."""
    if isinstance(value, torch.Tensor):
        if value.device.type != DEVICE:
            if value.dim():
                raise RuntimeError(f"a tensor is on {value.device}, and others are on {DEVICE}")
            value = on_device(value.cpu())
        return value if value.is_contiguous() and not (value.is_conj() or value.is_neg()) else _in_order(value)
    if isinstance(value, (list, tuple)):
        return [_fit(x) for x in value]
    return None if isinstance(value, torch.device) else value


def _in_order(tensor: torch.Tensor) -> torch.Tensor:
    return on_device(on_host(tensor).contiguous())


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
    if target.shape != result.shape:
        if variant.kind == "in place" or target.numel():
            shapes = f"the shape {tuple(result.shape)}, and the tensor it is to be written to {tuple(target.shape)}"
            raise RuntimeError(f"{variant.functional.name()}: the result has {shapes}")
        target.resize_(result.shape)
    if not torch.can_cast(result.dtype, target.dtype):
        raise RuntimeError(f"result type {result.dtype} can't be cast to the desired output type {target.dtype}")
    on_host(target).copy_(on_host(result))


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
    given = [_on_host(leaf) for leaf in leaves]
    same = {id(host): leaf for host, leaf in zip(given, leaves, strict=True) if is_on_device(leaf)}
    args, kwargs = pytree.tree_unflatten(given, spec)
    results = operator(*args, **kwargs)
    for host, leaf in zip(given, leaves, strict=True):
        if is_on_device(leaf) and host.shape != leaf.shape:  # an `out=` that torch gave its size
            leaf.resize_(host.shape)
            on_host(leaf).copy_(host)
    return pytree.tree_map_only(torch.Tensor, lambda x: same.get(id(x)) if id(x) in same else on_device(x), results)


def _on_host(leaf: Any) -> Any:
    if is_on_device(leaf):
        return on_host(leaf)
    return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type == DEVICE else leaf
