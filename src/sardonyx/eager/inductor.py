"""What `torch.compile` says of the device where no backend is named: inductor generates no code for it."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

from sardonyx.errors import SardonyxError

_GENERATORS = ("Scheduling", "PythonWrapperCodegen", "CppWrapperCodegen", "WrapperFxCodegen")
"""What inductor looks for in a device's module, to register it as it registers those it knows."""
_COMMON = "torch._inductor.codegen.common"


class Refusal:
    """Stands for each of inductor's code generators, and raises as soon as inductor asks for anything."""

    def __init__(self, device: str) -> None:
        self._device = device

    @property
    def supports_caching(self) -> NoReturn:
        """The first that inductor asks of a graph's devices, before it compiles anything."""
        raise self._error()

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        """Make a generator."""
        raise self._error()

    def _error(self) -> SardonyxError:
        return SardonyxError(
            f"torch.compile's default backend, inductor, generates no code for the device {self._device!r}",
            hint='torch.compile(model, backend="sardonyx"), which compiles graphs on this device too',
        )


def install(device: str, module: Any) -> None:
    """Let inductor find the refusal: in the device's module, and at once where it has looked there already."""
    refusal = Refusal(device)
    for name in _GENERATORS:
        setattr(module, name, refusal)
    common = sys.modules.get(_COMMON)
    if common is not None:
        common.register_backend_for_device(device, *(refusal for _ in _GENERATORS))
