"""The device `ort`: what torch wants to know of one, and which calls it hands over."""

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
from sardonyx.eager.bodies import cast as cast_body
from sardonyx.eager.core import MOST_DEVICES, Core, CoreEngine, load
from sardonyx.eager.dispatch import BODIES, Fallback, Kernel, State, called
from sardonyx.eager.memory import DEVICE, by_the_core, on_device, on_host
from sardonyx.eager.plans import PLANS, Device
from sardonyx.eager.variants import COMPOSED, is_view, variant_of
from sardonyx.engines.onnxruntime import checked_provider
from sardonyx.engines.registry import register as register_engine
from sardonyx.errors import SardonyxError
from sardonyx.run import cpu_backed
from sardonyx.translate import table

log = logging.getLogger(__name__)

Executor: TypeAlias = Literal["auto", "native", "python"]

_registered: list[Any] = []

_MEMORY = frozenset(
    {
        *("_to_copy", "clone", "contiguous", "lift_fresh", "lift_fresh_copy", "copy", "_unsafe_view", "alias"),
        *("empty_like", "empty_permuted", "new_empty", "new_empty_strided"),
    }
)
"""Operators of the table that are a matter of memory on a device: torch composes them of copies and views."""

_IN_CORE = frozenset(
    {
        *("empty.memory_format", "empty_strided", "copy_", "_copy_from", "_local_scalar_dense", "set_"),
        *("view", "as_strided", "_reshape_alias", "resize_"),
    }
)
"""Operators whose bodies the core has in C++."""
_AS_ON_CPU = frozenset({"set_.source_Storage", "set_.source_Storage_storage_offset", "set_.source_Tensor"})
"""Operators for which the core calls the CPU's kernels."""


def enable(*, fallback: Fallback = "warn", executor: Executor = "auto") -> None:
    """Make `torch.device("ort")` a device, on which ONNX Runtime computes.

    An operator that has no ONNX model runs on the CPU over the same memory, with `fallback` "warn" said once, with
    "quiet" only counted; with "error" it is an error.

    `executor` is what stands between torch and ONNX Runtime: "native" a core in C++ that is built on first use,
    "python" one that needs no compiler and takes some microseconds more for every call, "auto" the first if it can be
    built. The environment variable SARDONYX_EAGER says what "auto" is. A process has one.

    >>> enable()
    >>> torch.ones(3, device="ort") + 1
    tensor([2., 2., 2.], device='ort:0')
    """
    if fallback not in ("warn", "error", "quiet"):
        raise ValueError(f"fallback is {fallback!r}; use 'warn', 'error' or 'quiet'")
    if executor == "auto":
        executor = os.environ.get("SARDONYX_EAGER", "auto")  # type: ignore[assignment]  # looked at below
    if executor not in ("auto", "native", "python"):
        raise ValueError(f"executor is {executor!r}; use 'auto', 'native' or 'python'")
    if _registered:
        if executor not in ("auto", _running()):
            raise SardonyxError(f"the device is there already, with the executor {_running()!r}")
        State.fallback = fallback
        _need_autograd()
        return
    name = torch._C._get_privateuse1_backend_name()
    if name not in ("privateuseone", DEVICE):
        raise SardonyxError(f"torch has room for one device of this kind, and it is {name!r} already")
    State.core = _core(executor)
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
    _need_autograd()


def _need_autograd() -> None:
    """Refuse a device that autograd does not know, for it asks only once: at the first backward of a process.

    The core makes itself known later, too.
    """
    if State.core is None and not _is_known_to_autograd():
        raise SardonyxError(
            "a backward of this process came before the device, so that none can be on the device",
            hint="call sardonyx.eager.enable() before the first backward, or take executor='native'",
        )


@functools.cache
def _is_known_to_autograd() -> bool:
    """Whether a backward on the device works: there is no other way to ask from Python."""
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


def _running() -> str:
    return "python" if State.core is None else "native"


def _core(executor: str) -> Core | None:
    """The core, started; None where it is not wanted, or cannot be had and need not."""
    if executor == "python":
        return None
    try:
        core = load(torch.get_num_threads())
    except (SardonyxError, OSError) as error:
        if executor == "native":
            raise
        log.warning("the device ort runs without its core, and slower: %s", error)
        return None
    register_engine(CoreEngine(core))
    PLANS.devices[0] = Device(CoreEngine.name, threads=True)
    PLANS.current = lambda: core.current
    by_the_core()
    return core


def _register(core: Core | None) -> None:
    """Hand torch the kernels; with a core, those in Python have a key of their own, from which it calls them."""
    key = "PrivateUse1" if core is None else "PrivateUse2"
    rest: Any = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
    for each in {"PrivateUse1", key}:
        rest.fallback(called, each)
    own: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of kernels that say there is none for such devices
        for operator in _operators():
            name = operator.name().removeprefix("aten::")
            if core is None:
                own.impl(name, _kernel(operator), key)
            elif name in _AS_ON_CPU:
                core.register(operator, "view")
            elif name in _IN_CORE:
                continue
            elif _is_computed(operator):
                own.impl(name, functools.partial(called, operator), key)
                core.register(operator, variant_of(operator).kind)  # type: ignore[union-attr]  # it has one
            else:
                own.impl(name, functools.partial(called, operator), "PrivateUse1")
        if core is not None:
            _register_rest(core, own)
        own.impl("_has_compatible_shallow_copy_type", _can_replace_data, "PrivateUse1")
    _registered.extend((rest, own, *autocast.install()))


def _register_rest(core: Core, own: Any) -> None:
    """Everything else that torch does not compose: as views, by plans, or as Python decides."""
    known = {operator.name() for operator in _operators()}
    for name in torch._C._dispatch_get_all_op_names():
        operator = None if name in known else _operator(name)
        if operator is None or _is_composed(operator) or name.removeprefix("aten::") in _IN_CORE:
            continue
        if is_view(operator):
            core.register(operator, "view")
        elif _is_computed(operator):
            core.register(operator, variant_of(operator).kind)  # type: ignore[union-attr]  # it has one
    cast = torch.ops.sardonyx_eager.cast.default
    own_cast: Any = torch.library.Library("sardonyx_eager", "IMPL")  # type: ignore[no-untyped-call]
    own_cast.impl("cast", cast_body, "PrivateUse2")
    core.register(cast, "functional")
    _registered.append(own_cast)


def _can_replace_data(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether `tensor.data = other` is allowed, by which `module.to("ort")` keeps parameters what they are.

    torch allows it only among its own devices: a move to another makes new parameters, and tied ones come apart.
    """
    devices = {tensor.device.type, other.device.type}
    return tensor.layout == other.layout == torch.strided and devices <= {*_DENSE, DEVICE}


_DENSE = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia")
"""Devices whose tensors torch lets replace each other's data."""


def _is_computed(operator: Any) -> bool:
    """Whether a call is a plan and nothing else."""
    by_hand = operator.name() in BODIES or torch.Tag.nondeterministic_seeded in operator.tags
    return not by_hand and variant_of(operator) is not None


def _kernel(operator: Any) -> Callable[..., Any]:
    """What torch calls: with a table of its own for an operator that only computes."""
    variant = variant_of(operator)
    if variant is None or variant.kind != "functional" or not _is_computed(operator):
        return functools.partial(called, operator)
    return Kernel(operator).__call__


def _operators() -> Iterator[Any]:
    """Operators that torch would compose of others, or refuse, where they are better left whole."""
    for name in sorted(table.names() | BODIES.keys() | COMPOSED.keys()):
        operator = _operator(name)
        if operator is None or _is_implicit(operator) or (is_view(operator) and name not in BODIES):
            continue
        if name.partition("::")[2].partition(".")[0] in _MEMORY:
            continue
        yield operator


def _operator(name: str) -> Any:
    return table.find_operator(name) if name.startswith("aten::") else None


def forget() -> None:
    """Forget how calls are run, which is found out again: what operators are, or who runs them, has changed."""
    PLANS.clear()
    variant_of.cache_clear()
    for kernel in Kernel.every:
        kernel.forget()
    if State.core is not None:
        State.core.have(len(PLANS.devices))


def add(operator: Any) -> None:
    """Let the device have an operator declared after it was enabled: with a body, or one torch has for every device.

    Of others torch calls the `out=` variant, which finds a translation by itself.
    """
    name, has = operator.name(), torch._C._dispatch_has_kernel_for_dispatch_key
    is_called = name in BODIES or has(name, "CompositeExplicitAutograd")
    if not _registered or has(name, "PrivateUse1") or not is_called:
        return
    space, _, rest = name.partition("::")
    own: Any = torch.library.Library(space, "IMPL")  # type: ignore[no-untyped-call]
    own.impl(rest, functools.partial(called, operator), "PrivateUse1")
    _registered.append(own)


def hindrance(operator: Any) -> str | None:
    """Why the device never runs the translation of an operator; None if it does."""
    name = operator.name()
    plain = name.removeprefix("aten::")
    if _is_implicit(operator):
        return "torch composes it of other operators before the device sees it"
    if is_view(operator):
        return "views are torch's on the device"
    if name in BODIES:
        return "its body on the device is written by hand"
    if plain.partition(".")[0] in _MEMORY or plain in _IN_CORE or plain in _AS_ON_CPU:
        return "on the device it is a matter of memory"
    if torch.Tag.nondeterministic_seeded in operator.tags:
        return "random numbers are torch's on the device"
    return None


def _is_implicit(operator: Any) -> bool:
    """Whether autograd sees only what an operator is composed of."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CompositeImplicitAutograd")


def _is_composed(operator: Any) -> bool:
    """Whether torch has the operator for every device."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    keys = ("CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
    return any(has(operator.name(), key) for key in keys)


def set_device(index: int, provider: str = "CPUExecutionProvider", options: Mapping[str, Any] | None = None) -> None:
    """Let `torch.device("ort", index)` compute by one of ONNX Runtime's execution providers.

    Tensors stay in the memory of the host, from which ONNX Runtime hands them to the provider.

    >>> enable()
    >>> set_device(1, "CPUExecutionProvider", {})
    >>> torch.ones(2, device="ort:1") * 2
    tensor([2., 2.], device='ort:1')
    """
    if not _registered:
        raise SardonyxError("there is no device ort", hint="sardonyx.eager.enable() makes it")
    count = len(PLANS.devices)
    if not 0 <= index <= count or index >= MOST_DEVICES:
        raise ValueError(f"the device is {index}, and there are {count} of at most {MOST_DEVICES}; the next is {count}")
    provided = checked_provider((provider, dict(options or {})))
    PLANS.devices[index] = Device(providers=[provided, *_BESIDE[provider != "CPUExecutionProvider"]])
    forget()


_BESIDE = ((), ("CPUExecutionProvider",))
"""What takes the operators that a provider lacks."""


class _Chosen:
    """`with torch.ort.device(1):`."""

    def __init__(self, device: Any) -> None:
        self.index = device if isinstance(device, int) else torch.device(device).index or 0

    def __enter__(self) -> None:
        """Let it be the one that is meant where none is said."""
        self._before = _module.current_device()
        _module.set_device(self.index)

    def __exit__(self, *_: object) -> None:
        """Go back to the one before."""
        _module.set_device(self._before)


class Module:
    """`torch.ort`."""

    device = _Chosen

    def is_available(self) -> bool:
        """It is."""
        return True

    def is_initialized(self) -> bool:
        """Nothing has to be."""
        return True

    def device_count(self) -> int:
        """How many there are: one, and those that `sardonyx.eager.set_device` added."""
        return len(PLANS.devices)

    def current_device(self) -> int:
        """The index of the one that is meant where none is said."""
        return 0 if State.core is None else State.core.current

    def set_device(self, device: Any) -> None:
        """Choose that, for this thread."""
        index = device if isinstance(device, int) else torch.device(device).index or 0
        if not 0 <= index < self.device_count():
            raise ValueError(f"there is no device ort:{index}; sardonyx.eager.set_device makes one")
        if State.core is not None:
            State.core.current = index
        elif index:
            raise SardonyxError("the executor in Python has no current device but the first", hint=f"say ort:{index}")

    def get_device_name(self, device: Any = None) -> str:
        """What computes on it."""
        index = self.current_device() if device is None else torch.device(device).index or 0
        return PLANS.devices[index].name

    def synchronize(self, device: Any = None) -> None:
        """Calls are done when they return."""

    def manual_seed(self, seed: int) -> None:
        """Random numbers are drawn by torch's generator of the CPU."""
        torch.default_generator.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """As `manual_seed`, of which torch's own makes a part."""

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """The state of that generator."""
        return torch.default_generator.get_state()

    def set_rng_state(self, new_state: torch.Tensor, device: Any = None) -> None:
        """Put it back."""
        torch.default_generator.set_state(new_state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """What autocast may cast to."""
        return [torch.float16, torch.bfloat16]

    def _is_in_bad_fork(self) -> bool:
        return False


_module = Module()
