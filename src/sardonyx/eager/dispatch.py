"""Dispatch of ATen calls on the device: handwritten kernels, ONNX models, or the CPU as a fallback."""

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
from sardonyx.eager.layout import CONTIGUOUS, layout_of
from sardonyx.eager.memory import DEVICE, is_on_device, on_device, on_host
from sardonyx.eager.plans import PLANS, AtenCall, DirectSession, Plan, Results, argument_key, tensors_of
from sardonyx.eager.variants import Variant, is_view, variant_of
from sardonyx.errors import EngineError, SardonyxError, UnsupportedOperator

log = logging.getLogger(__name__)

Fallback: TypeAlias = Literal["warn", "error", "quiet"]
Implementation: TypeAlias = Callable[..., Any]
F = TypeVar("F", bound=Implementation)

HANDWRITTEN: dict[str, Implementation] = {}
"""Handwritten kernels by qualified operator name; each takes the arguments of the torch call."""

CPU = DispatchKeySet(DispatchKey.CPU)


class State:
    """Settings of the device, and its counters."""

    fallback: Fallback = "warn"
    core: Core | None = None
    """The native executor, which counts its calls itself."""
    calls: ClassVar[Counter[str]] = Counter()
    fallbacks: ClassVar[Counter[str]] = Counter()


def handwritten(*names: str) -> Callable[[F], F]:
    """Register a function as the kernel of operators."""

    def register(function: F) -> F:
        HANDWRITTEN.update(dict.fromkeys(names, function))
        return function

    return register


def call_operator(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator with device tensors, as called by torch's dispatcher."""
    name = operator.name()
    State.calls[name] += 1
    function = HANDWRITTEN.get(name)
    if function is not None:
        return with_cpu_fallback(operator, args, kwargs, lambda: function(*args, **kwargs))
    if torch.Tag.nondeterministic_seeded in operator.tags:
        return run_on_cpu(operator, args, kwargs)  # torch's generator, so that its seeds apply
    if is_view(operator):
        return operator.redispatch(CPU, *args, **kwargs)  # views read no memory, so CPU kernels work
    variant = variant_of(operator)
    if variant is None:
        return _fall_back(operator, args, kwargs, "it has no functional variant")
    return with_cpu_fallback(operator, args, kwargs, lambda: compute(variant, args, kwargs))


def with_cpu_fallback(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], run: Callable[[], Any]) -> Any:
    """Return `run()`; if ONNX cannot express it, run on the CPU if allowed."""
    try:
        return run()
    except UnsupportedOperator as error:
        return _fall_back(operator, args, kwargs, error.what)


class Kernel:
    """A registered functional operator: a call whose key was seen before goes straight to its session."""

    every: ClassVar[list[Kernel]] = []

    def __init__(self, operator: Any) -> None:
        self._operator, self._name = operator, operator.name()
        self.every.append(self)
        returns = operator._schema.returns
        self._returns_tensor = len(returns) == 1 and str(returns[0].type) == "Tensor"
        self._parameters = tuple(a.name for a in operator._schema.arguments)
        self._sessions: dict[Hashable, DirectSession] = {}

    def clear(self) -> None:
        """Clear the cached sessions."""
        self._sessions = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the operator."""
        key = _call_key(args, kwargs)
        session = self._sessions.get(key) if key is not None else None
        if session is None:
            results = call_operator(self._operator, *args, **kwargs)
            if key is not None:
                self._remember(key, args, kwargs)
            return results
        State.calls[self._name] += 1
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        try:
            results = session(tensors, tensors[0].get_device() if tensors else 0)
        except EngineError as error:
            raise _name_operator(self._operator, error) from error
        return results[0] if self._returns_tensor else tuple(results)

    def _remember(self, key: Hashable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        arguments = dict(zip(self._parameters, args, strict=False)) | dict(kwargs)
        plan = PLANS.find(AtenCall(self._operator, arguments, _index_of(arguments)))
        if plan is None or plan.direct is None or not (self._returns_tensor or len(self._operator._schema.returns) > 1):
            return
        if len(self._sessions) >= _MAX_KEYS:
            self._sessions.clear()
        self._sessions[key] = plan.direct


_MAX_KEYS = 1024


def _call_key(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable | None:
    """Return the cache key of a call; None if a tensor is in a list, on the CPU, or not contiguous.

    Complex tensors never run directly, so conjugation does not matter.
    """
    key: list[Any] = [torch.get_default_dtype()]  # decides the dtype of many results
    for x in args:
        if isinstance(x, torch.Tensor):
            index = x.get_device()  # negative for the CPU
            if index < 0 or not x.is_contiguous() or x.is_neg():
                return None
            key += (index, x.dtype, x.shape)
        elif isinstance(x, (list, tuple)):
            if any(isinstance(y, torch.Tensor) or y is None for y in x):
                return None
            key += (list, tuple([argument_key(y) for y in x]))
        else:
            key.append(argument_key(x))
    for name, x in kwargs.items():  # a device argument may not be ort:0
        if isinstance(x, (torch.Tensor, list, tuple, torch.device)):
            return None
        key += (name, argument_key(x))
    return tuple(key)


# By ONNX Runtime


def compute(variant: Variant, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator as an ONNX model, and write the results to in-place or `out=` arguments."""
    arguments = dict(zip(variant.parameters, args, strict=False)) | dict(kwargs)
    if variant.kind == "functional":
        return _match_schema(variant.operator, _run(variant, arguments, arguments))
    targets = [arguments[name] for name in variant.written]
    inputs = arguments
    if variant.kind == "out":
        inputs = {name: value for name, value in arguments.items() if name not in variant.written}
        _set_dtype(variant, inputs, targets)
    for target, result in zip(targets, _run(variant, inputs, arguments), strict=True):
        if result is not None:
            _write(target, result, variant)
    return targets[0] if len(targets) == 1 else tuple(targets)


def _run(variant: Variant, inputs: Mapping[str, Any], arguments: Mapping[str, Any]) -> Results:
    """Return the results of the functional variant for `inputs`, a subset of the call's `arguments`."""
    index = _index_of(arguments)
    prepared = {name: _prepare(value, index) for name, value in inputs.items()}
    for name in _tensor_parameters(variant.operator):
        if isinstance(prepared.get(name), (bool, int, float)):
            prepared[name] = on_device(_scalar_tensor(prepared[name], tensors_of(prepared)), index)
    call = AtenCall(variant.functional, prepared, index)
    try:
        plan, results = PLANS.run(call)
    except EngineError as error:
        raise _name_operator(variant.operator, error) from error
    if State.core is not None:
        _offer_to_core(State.core, variant, plan, call, arguments)
    return results


def _name_operator(operator: Any, error: EngineError) -> EngineError:
    """Return the engine's error, prefixed with the operator's name."""
    return type(error)(f"{operator.name()}: {error.what}")


def _offer_to_core(core: Core, variant: Variant, plan: Plan, call: AtenCall, arguments: Mapping[str, Any]) -> None:
    if plan.plain is None or (plan.scalars and plan.scalars != call.scalars):
        return
    static = torch.Tag.dynamic_output_shape not in variant.operator.tags
    leaves = [layout_of(x) or CONTIGUOUS for x in tensors_of(arguments)]
    core.offer(variant.operator, plan.plain, leaves, len(call.tensors), len(plan.scalars), static=static)


@cache
def _tensor_parameters(operator: Any) -> tuple[str, ...]:
    """Return the tensor parameters for which torch may pass Python numbers that the functional variant rejects."""
    if torch._C._should_allow_numbers_as_tensors(operator._schema.name.partition("::")[2]):
        return ()
    return tuple(a.name for a in operator._schema.arguments if str(a.type) in ("Tensor", "Optional[Tensor]"))


def _scalar_tensor(number: Any, others: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a number as a 0-d tensor, in float64 if another tensor is."""
    exact = any(x.dtype == torch.float64 for x in others)
    return torch.tensor(number, dtype=torch.float64 if exact and isinstance(number, float) else None)


def _index_of(values: Any) -> int:
    """Return the device index of a call: that of its tensors, or of a device argument."""
    for leaf in pytree.tree_leaves(values):
        if is_on_device(leaf):
            return int(leaf.get_device())
        if isinstance(leaf, torch.device) and leaf.type == DEVICE:
            return PLANS.index(leaf)
    return 0


def _prepare(value: Any, index: int) -> Any:
    """Return an argument as plans take it: device tensors in a supported layout; None for a device."""
    if isinstance(value, torch.Tensor):
        if value.device.type != DEVICE:
            if value.dim():
                raise RuntimeError(f"expected all tensors on {DEVICE}, found one on {value.device}")
            value = on_device(value.cpu(), index)
        return _contiguous(value) if value.is_conj() or value.is_neg() or layout_of(value) is None else value
    if isinstance(value, (list, tuple)):
        return [_prepare(x, index) for x in value]
    return None if isinstance(value, torch.device) else value


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return on_device(on_host(tensor).contiguous(), tensor.get_device())


def _match_schema(operator: Any, results: Results) -> Any:
    """Return results as the schema declares them: a tensor, a list, or a tuple."""
    returns = operator._schema.returns
    if len(returns) == 1:
        return results if str(returns[0].type) != "Tensor" else results[0]
    return tuple(results)


def _set_dtype(variant: Variant, arguments: dict[str, Any], targets: Sequence[torch.Tensor]) -> None:
    """Pass the dtype of the target to operators without tensor arguments, such as `arange`."""
    has_dtype = any(a.name == "dtype" for a in variant.functional._schema.arguments)
    if has_dtype and not tensors_of(arguments):
        arguments["dtype"] = targets[0].dtype


def _write(target: torch.Tensor, result: torch.Tensor, variant: Variant) -> None:
    """Copy a result into its target; a shape mismatch is an error unless the target is empty."""
    if target.device != result.device:
        devices = f"the result is on {result.device} and its target on {target.device}"
        raise RuntimeError(f"{variant.operator.name()}: {devices}")
    if target.shape != result.shape:
        if variant.kind == "in place" or target.numel():
            shapes = f"the result has shape {tuple(result.shape)} and its target {tuple(target.shape)}"
            raise RuntimeError(f"{variant.operator.name()}: {shapes}")
        target.resize_(result.shape)
    if not torch.can_cast(result.dtype, target.dtype):
        raise RuntimeError(f"result type {result.dtype} can't be cast to the desired output type {target.dtype}")
    target.copy_(result)


# By torch


class NotMapped(SardonyxError, NotImplementedError):
    """The device cannot run an operator, and `fallback="error"` forbids the CPU."""


def _fall_back(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], reason: str) -> Any:
    name = operator.name()
    if State.fallback == "error":
        raise NotMapped(f"{name} cannot run on {DEVICE}: {reason}", hint='sardonyx.eager.enable(fallback="warn")')
    if not State.fallbacks[name]:
        log.log(logging.WARNING if State.fallback == "warn" else logging.INFO, "on the CPU: %s: %s", name, reason)
    State.fallbacks[name] += 1
    return run_on_cpu(operator, args, kwargs)


def run_on_cpu(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator on the CPU, over the same memory."""
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    index = _index_of(leaves)
    host_leaves = [_on_host(leaf) for leaf in leaves]
    device_tensors = {id(host): leaf for host, leaf in zip(host_leaves, leaves, strict=True) if is_on_device(leaf)}
    args, kwargs = pytree.tree_unflatten(host_leaves, spec)
    results = operator(*args, **kwargs)
    for host, leaf in zip(host_leaves, leaves, strict=True):
        if is_on_device(leaf) and host.shape != leaf.shape:  # an `out=` resized by torch
            leaf.resize_(host.shape)
            on_host(leaf).copy_(host)
    for result in pytree.tree_leaves(results):
        if isinstance(result, torch.Tensor) and result.layout != torch.strided:
            raise NotMapped(f"{operator.name()}: {DEVICE} does not support the layout {result.layout}")
    return pytree.tree_map_only(
        torch.Tensor, lambda x: device_tensors[id(x)] if id(x) in device_tensors else on_device(x, index), results
    )


def _on_host(leaf: Any) -> Any:
    if is_on_device(leaf):
        return on_host(leaf) if leaf.numel() else torch.empty(leaf.shape, dtype=leaf.dtype)  # torch may resize it
    return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type == DEVICE else leaf
