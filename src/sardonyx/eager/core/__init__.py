"""The native executor in C++: allocator, device guard, and one kernel for every operator; built on first use."""

from __future__ import annotations

from sardonyx.eager.core.library import MAX_DEVICES, Core, CoreEngine, load

__all__ = ["MAX_DEVICES", "Core", "CoreEngine", "load"]
