"""The core in C++: an allocator, a device guard, and one kernel for every operator. It is built on first use."""

from __future__ import annotations

from sardonyx.eager.core.library import MOST_DEVICES, Core, CoreEngine, load

__all__ = ["MOST_DEVICES", "Core", "CoreEngine", "load"]
