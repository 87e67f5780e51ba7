"""The error of `torch.compile` on the device with its default backend: inductor has no code generator for it."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

from sardonyx.errors import SardonyxError

_GENERATORS = ("Scheduling", "PythonWrapperCodegen", "CppWrapperCodegen", "WrapperFxCodegen")
"""Attributes that inductor looks up in a device's module to register its code generators."""
_COMMON = "torch._inductor.codegen.common"


class UnsupportedCodegen:
    """Stands for inductor's code generators, and raises on any use."""

    def __init__(self, device: str) -> None:
        self._device = device

    @property
    def supports_caching(self) -> NoReturn:
        """Raise; inductor reads it first, before it compiles anything."""
        raise self._error()

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        """Raise."""
        raise self._error()

    def _error(self) -> SardonyxError:
        return SardonyxError(
            f"torch.compile's default backend, inductor, generates no code for the device {self._device!r}",
            hint='use torch.compile(model, backend="sardonyx"), which supports this device',
        )


def install(device: str, module: Any) -> None:
    """Make inductor find it: in the device's module, and directly if inductor has already looked there."""
    unsupported = UnsupportedCodegen(device)
    for name in _GENERATORS:
        setattr(module, name, unsupported)
    common = sys.modules.get(_COMMON)
    if common is not None:
        common.register_backend_for_device(device, *(unsupported for _ in _GENERATORS))
