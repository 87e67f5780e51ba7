"""The device `ort`: registration with torch, and which operators it implements."""

from __future__ import annotations

import functools
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypeAlias

import torch
from torch.utils.backend_registration import (
    _setup_privateuseone_for_python_backend,
    generate_methods_for_privateuse1_backend,
    rename_privateuse1_backend,
)

from sardonyx import onnx_ops
from sardonyx.eager import autocast, inductor, storage
from sardonyx.eager.core import MAX_DEVICES, Core, CoreEngine, load
from sardonyx.eager.dispatch import HANDWRITTEN, Fallback, Kernel, State, call_operator
from sardonyx.eager.handwritten import cast as cast_kernel
from sardonyx.eager.memory import DEVICE, on_device, on_host, use_core
from sardonyx.eager.plans import PLANS, Device
from sardonyx.eager.variants import COMPOSITES, is_view, variant_of
from sardonyx.engines.onnxruntime import checked_provider
from sardonyx.engines.registry import register as register_engine
from sardonyx.errors import SardonyxError
from sardonyx.run import cpu_backed
from sardonyx.translate import table

log = logging.getLogger(__name__)

Executor: TypeAlias = Literal["auto", "native", "python"]

_registered: list[Any] = []

_MEMORY_OPERATORS = frozenset(
    {
        *("_to_copy", "clone", "contiguous", "lift_fresh", "lift_fresh_copy", "copy", "_unsafe_view", "alias"),
        *("empty_like", "empty_permuted", "new_empty", "new_empty_strided"),
    }
)
"""Translated operators that only move memory on a device: torch composes them from copies and views."""

_IN_CORE = frozenset(
    {
        *("empty.memory_format", "empty_strided", "copy_", "_copy_from", "_local_scalar_dense", "set_"),
        *("view", "as_strided", "_reshape_alias", "resize_"),
    }
)
"""Operators implemented by the core in C++."""
_CPU_KERNELS = frozenset({"set_.source_Storage", "set_.source_Storage_storage_offset", "set_.source_Tensor"})
"""Operators for which the core calls the CPU's kernels."""


def enable(*, fallback: Fallback = "warn", executor: Executor = "auto") -> None:
    """Register `torch.device("ort")`, a device whose operators run on ONNX Runtime.

    An operator without an ONNX model runs on the CPU over the same memory: with `fallback` "warn" it is logged once,
    with "quiet" only counted, with "error" an error.

    `executor` "native" is a core in C++ built on first use; "python" needs no compiler and adds some microseconds to
    every call; "auto" is native if it can be built. The environment variable SARDONYX_EAGER overrides "auto". The
    executor cannot change within a process.

    >>> enable()
    >>> torch.ones(3, device="ort") + 1
    tensor([2., 2., 2.], device='ort:0')
    """
    if fallback not in ("warn", "error", "quiet"):
        raise ValueError(f"fallback is {fallback!r}; use 'warn', 'error' or 'quiet'")
    if executor == "auto":
        executor = os.environ.get("SARDONYX_EAGER", "auto")  # type: ignore[assignment]  # checked below
    if executor not in ("auto", "native", "python"):
        raise ValueError(f"executor is {executor!r}; use 'auto', 'native' or 'python'")
    if _registered:
        if executor not in ("auto", _current_executor()):
            raise SardonyxError(f"the device is already enabled with executor={_current_executor()!r}")
        State.fallback = fallback
        _check_autograd()
        return
    name = torch._C._get_privateuse1_backend_name()
    if name not in ("privateuseone", DEVICE):
        raise SardonyxError(f"torch supports one custom device (PrivateUse1), and {name!r} is already registered")
    State.core = _load_core(executor)
    if State.core is None:
        _setup_privateuseone_for_python_backend(DEVICE, backend_module=_module)
        storage.install()
    else:
        rename_privateuse1_backend(DEVICE)
        generate_methods_for_privateuse1_backend()
        torch._register_device_module(DEVICE, _module)  # type: ignore[no-untyped-call]
    State.fallback = fallback
    cpu_backed.DEVICES[DEVICE] = cpu_backed.CpuBackedDevice(on_host, on_device)
    _register(State.core)
    inductor.install(DEVICE, _module)
    onnx_ops.register()
    _check_autograd()


def _check_autograd() -> None:
    """Raise an error if autograd does not know the device: it looks for devices once, at the first backward.

    The native core can register itself later.
    """
    if State.core is None and not _is_known_to_autograd():
        raise SardonyxError(
            "autograd does not know the device: a backward ran before it was enabled",
            hint="call sardonyx.eager.enable() before the first backward, or use executor='native'",
        )


@functools.cache
def _is_known_to_autograd() -> bool:
    """Run a backward on the device: Python has no other way to ask."""
    calls = State.calls.copy()
    x = torch.empty(1, device=DEVICE, requires_grad=True)
    try:
        with torch.enable_grad():
            torch.autograd.grad(x.view(1), x, x.detach())
    except RuntimeError:
        return False
    finally:
        State.calls.clear()
        State.calls.update(calls)
    return True


def _current_executor() -> str:
    return "python" if State.core is None else "native"


def _load_core(executor: str) -> Core | None:
    """Load and start the core; None if not wanted, or if executor is "auto" and it cannot be built."""
    if executor == "python":
        return None
    try:
        core = load(torch.get_num_threads())
    except (SardonyxError, OSError) as error:
        if executor == "native":
            raise
        log.warning("the device ort uses the slower Python executor: %s", error)
        return None
    register_engine(CoreEngine(core))
    PLANS.devices[0] = Device(CoreEngine.name, threads=True)
    PLANS.current = lambda: core.current
    use_core()
    return core


def _register(core: Core | None) -> None:
    """Register the kernels; with a core, Python kernels get a separate dispatch key, from which it calls them."""
    key = "PrivateUse1" if core is None else "PrivateUse2"
    fallback: Any = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
    for dispatch_key in {"PrivateUse1", key}:
        fallback.fallback(call_operator, dispatch_key)
    aten: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about overriding kernels that raise for such devices
        for operator in _operators():
            name = operator.name().removeprefix("aten::")
            if core is None:
                aten.impl(name, _kernel(operator), key)
            elif name in _CPU_KERNELS:
                core.register(operator, "view")
            elif name in _IN_CORE:
                continue
            elif _runs_as_model(operator):
                aten.impl(name, functools.partial(call_operator, operator), key)
                core.register(operator, variant_of(operator).kind)  # type: ignore[union-attr]  # it has one
            else:
                aten.impl(name, functools.partial(call_operator, operator), "PrivateUse1")
        if core is not None:
            _register_rest(core, aten)
        aten.impl("_has_compatible_shallow_copy_type", _can_replace_data, "PrivateUse1")
    _registered.extend((fallback, aten, *autocast.install()))


def _register_rest(core: Core, aten: Any) -> None:
    """Register all other operators that torch does not compose: as views, or as models."""
    known = {operator.name() for operator in _operators()}
    for name in torch._C._dispatch_get_all_op_names():
        operator = None if name in known else _operator(name)
        if operator is None or _is_composite(operator) or name.removeprefix("aten::") in _IN_CORE:
            continue
        if is_view(operator):
            core.register(operator, "view")
        elif _runs_as_model(operator):
            core.register(operator, variant_of(operator).kind)  # type: ignore[union-attr]  # it has one
    cast = torch.ops.sardonyx_eager.cast.default
    own_cast: Any = torch.library.Library("sardonyx_eager", "IMPL")  # type: ignore[no-untyped-call]
    own_cast.impl("cast", cast_kernel, "PrivateUse2")
    core.register(cast, "functional")
    _registered.append(own_cast)


def _can_replace_data(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether `tensor.data = other` is allowed, with which `module.to("ort")` keeps parameter identity.

    torch allows it only among its own devices; otherwise it creates new parameters, and tied ones become separate.
    """
    devices = {tensor.device.type, other.device.type}
    return tensor.layout == other.layout == torch.strided and devices <= {*_DENSE, DEVICE}


_DENSE = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia")
"""Devices whose tensors can replace each other's data."""


def _runs_as_model(operator: Any) -> bool:
    special = operator.name() in HANDWRITTEN or torch.Tag.nondeterministic_seeded in operator.tags
    return not special and variant_of(operator) is not None


def _kernel(operator: Any) -> Callable[..., Any]:
    """Return the kernel to register; an operator that runs as a model gets one with a call cache."""
    variant = variant_of(operator)
    if variant is None or variant.kind != "functional" or not _runs_as_model(operator):
        return functools.partial(call_operator, operator)
    return Kernel(operator).__call__


def _operators() -> Iterator[Any]:
    """Yield operators that torch would decompose, or reject, and that the device implements."""
    for name in sorted(table.names() | HANDWRITTEN.keys() | COMPOSITES.keys()):
        operator = _operator(name)
        if operator is None or _is_implicit_composite(operator) or (is_view(operator) and name not in HANDWRITTEN):
            continue
        if name.partition("::")[2].partition(".")[0] in _MEMORY_OPERATORS:
            continue
        yield operator


def _operator(name: str) -> Any:
    return table.find_operator(name) if name.startswith("aten::") else None


def clear_caches() -> None:
    """Clear the plans, because operators or execution providers changed."""
    PLANS.clear()
    variant_of.cache_clear()
    for kernel in Kernel.every:
        kernel.clear()
    if State.core is not None:
        State.core.set_device_count(len(PLANS.devices))


def register_operator(operator: Any) -> None:
    """Register an operator declared after `enable`: handwritten, or one with a composite kernel.

    For others torch calls the `out=` variant, which finds the translation.
    """
    name, has = operator.name(), torch._C._dispatch_has_kernel_for_dispatch_key
    is_called = name in HANDWRITTEN or has(name, "CompositeExplicitAutograd")
    if not _registered or has(name, "PrivateUse1") or not is_called:
        return
    namespace, _, overload = name.partition("::")
    library: Any = torch.library.Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
    library.impl(overload, functools.partial(call_operator, operator), "PrivateUse1")
    _registered.append(library)


def why_not_translated(operator: Any) -> str | None:
    """Return why the device never runs the translation of an operator, or None."""
    name = operator.name()
    plain = name.removeprefix("aten::")
    if _is_implicit_composite(operator):
        return "torch decomposes it before the device sees it"
    if is_view(operator):
        return "views are handled by torch"
    if name in HANDWRITTEN:
        return "its implementation on the device is handwritten"
    if plain.partition(".")[0] in _MEMORY_OPERATORS or plain in _IN_CORE or plain in _CPU_KERNELS:
        return "on the device it only moves memory"
    if torch.Tag.nondeterministic_seeded in operator.tags:
        return "random numbers come from torch's generator"
    return None


def _is_implicit_composite(operator: Any) -> bool:
    """Return whether autograd sees only the decomposition of an operator."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CompositeImplicitAutograd")


def _is_composite(operator: Any) -> bool:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    keys = ("CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
    return any(has(operator.name(), key) for key in keys)


def set_device(index: int, provider: str = "CPUExecutionProvider", options: Mapping[str, Any] | None = None) -> None:
    """Set the execution provider of `torch.device("ort", index)`.

    Tensors stay in host memory, from which ONNX Runtime copies them to the provider.

    >>> enable()
    >>> set_device(1, "CPUExecutionProvider", {})
    >>> torch.ones(2, device="ort:1") * 2
    tensor([2., 2.], device='ort:1')
    """
    if not _registered:
        raise SardonyxError("the device ort is not enabled", hint="call sardonyx.eager.enable() first")
    count = len(PLANS.devices)
    if not 0 <= index <= count or index >= MAX_DEVICES:
        raise ValueError(f"device index is {index}; use 0 to {count}, below the limit of {MAX_DEVICES} devices")
    provided = checked_provider((provider, dict(options or {})))
    PLANS.devices[index] = Device(providers=[provided, *_FALLBACK_PROVIDERS[provider != "CPUExecutionProvider"]])
    clear_caches()


_FALLBACK_PROVIDERS = ((), ("CPUExecutionProvider",))
"""Providers for operators that the first one lacks."""


class _DeviceContext:
    """`with torch.ort.device(1):` sets the current device."""

    def __init__(self, device: Any) -> None:
        self.index = device if isinstance(device, int) else torch.device(device).index or 0

    def __enter__(self) -> None:
        self._previous = _module.current_device()
        _module.set_device(self.index)

    def __exit__(self, *_: object) -> None:
        _module.set_device(self._previous)


class DeviceModule:
    """`torch.ort`."""

    device = _DeviceContext

    def is_available(self) -> bool:
        """Return True."""
        return True

    def is_initialized(self) -> bool:
        """Return True: there is nothing to initialize."""
        return True

    def device_count(self) -> int:
        """Return the number of devices: one, and those added by `sardonyx.eager.set_device`."""
        return len(PLANS.devices)

    def current_device(self) -> int:
        """Return the index of the current device."""
        return 0 if State.core is None else State.core.current

    def set_device(self, device: Any) -> None:
        """Set the current device of this thread."""
        index = device if isinstance(device, int) else torch.device(device).index or 0
        if not 0 <= index < self.device_count():
            raise ValueError(f"there is no device ort:{index}; add it with sardonyx.eager.set_device")
        if State.core is not None:
            State.core.current = index
        elif index:
            raise SardonyxError(
                "with executor='python' the current device is always ort:0", hint=f"pass ort:{index} explicitly"
            )

    def get_device_name(self, device: Any = None) -> str:
        """Return the engine and provider of a device."""
        index = self.current_device() if device is None else torch.device(device).index or 0
        return PLANS.devices[index].name

    def synchronize(self, device: Any = None) -> None:
        """Do nothing: calls are synchronous."""

    def manual_seed(self, seed: int) -> None:
        """Seed torch's CPU generator, which draws the random numbers."""
        torch.default_generator.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Do nothing: `manual_seed` covers it."""

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """Return the state of the CPU generator."""
        return torch.default_generator.get_state()

    def set_rng_state(self, new_state: torch.Tensor, device: Any = None) -> None:
        """Restore the state of the CPU generator."""
        torch.default_generator.set_state(new_state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Return the dtypes that autocast may use."""
        return [torch.float16, torch.bfloat16]

    def _is_in_bad_fork(self) -> bool:
        return False


_module = DeviceModule()
