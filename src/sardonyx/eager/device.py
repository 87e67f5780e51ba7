"""The device `ort`: what torch wants to know of one, and which calls it hands over."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from sardonyx.eager import autocast, storage
from sardonyx.eager import bodies as _bodies  # noqa: F401  # registers them
from sardonyx.eager.dispatch import BODIES, Fallback, Kernel, State, called
from sardonyx.eager.memory import DEVICE
from sardonyx.eager.variants import is_view, variant_of
from sardonyx.errors import SardonyxError
from sardonyx.translate import table

_registered: list[Any] = []

_MEMORY = frozenset(
    {"_to_copy", "clone", "contiguous", "lift_fresh", "lift_fresh_copy", "copy", "_unsafe_view", "alias"}
)
"""Operators of the table that are a matter of memory on a device: torch composes them of copies and views."""


def enable(*, fallback: Fallback = "warn") -> None:
    """Make `torch.device("ort")` a device, on which ONNX Runtime computes.

    An operator that has no ONNX model runs on the CPU over the same memory, with `fallback` "warn" said once, with
    "quiet" only counted; with "error" it is an error.

    >>> enable()
    >>> torch.ones(3, device="ort") + 1
    tensor([2., 2., 2.], device='ort:0')
    """
    if fallback not in ("warn", "error", "quiet"):
        raise ValueError(f"fallback is {fallback!r}; use 'warn', 'error' or 'quiet'")
    State.fallback = fallback
    if _registered:
        return
    name = torch._C._get_privateuse1_backend_name()
    if name not in ("privateuseone", DEVICE):
        raise SardonyxError(f"torch has room for one device of this kind, and it is {name!r} already")
    _setup_privateuseone_for_python_backend(DEVICE, backend_module=Module())
    storage.install()
    _register()


def _register() -> None:
    rest: Any = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
    rest.fallback(called, "PrivateUse1")
    own: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of kernels that say there is none for such devices
        for operator in _operators():
            own.impl(operator.name().removeprefix("aten::"), _kernel(operator), "PrivateUse1")
    _registered.extend((rest, own, *autocast.install()))


def _kernel(operator: Any) -> Callable[..., Any]:
    """What torch calls: with a table of its own for an operator that only computes."""
    variant = variant_of(operator)
    written = operator.name() in BODIES or torch.Tag.nondeterministic_seeded in operator.tags
    if written or variant is None or variant.kind != "functional":
        return functools.partial(called, operator)
    return Kernel(operator).__call__


def _operators() -> Iterator[Any]:
    """Operators that torch would compose of others, or refuse, where they are better left whole."""
    for name in sorted(table.names() | BODIES.keys()):
        operator = _operator(name)
        if operator is None or _is_composite(operator) or (is_view(operator) and name not in BODIES):
            continue
        if name.partition("::")[2].partition(".")[0] in _MEMORY:
            continue
        yield operator


def _operator(name: str) -> Any:
    space, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    if space != "aten" or not hasattr(torch.ops.aten, packet):
        return None
    return getattr(getattr(torch.ops.aten, packet), overload or "default", None)


def _is_composite(operator: Any) -> bool:
    """Whether autograd sees only what an operator is composed of."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CompositeImplicitAutograd")


class _Chosen:
    """`with torch.ort.device(0):`."""

    def __init__(self, device: Any) -> None:
        self.index = device

    def __enter__(self) -> None:
        """There is one."""

    def __exit__(self, *_: object) -> None:
        """There is one."""


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
        """How many there are."""
        return 1

    def current_device(self) -> int:
        """The index of the one that is used where none is said."""
        return 0

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
