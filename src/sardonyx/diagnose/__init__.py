"""Seeing what happened: reports, dumps, comparisons, calls, times."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sardonyx.diagnose.bisection import Bisection, bisect, bisect_rules
    from sardonyx.diagnose.comparison import Comparison, RunConfig, compare, find_nonfinite
    from sardonyx.diagnose.profiling import Profile, profile
    from sardonyx.diagnose.reduction import Reduction, reduce
    from sardonyx.telemetry.intercept import intercepting, restore
    from sardonyx.telemetry.recording import record, replay

__all__ = [
    "Bisection",
    "Comparison",
    "Profile",
    "Reduction",
    "RunConfig",
    "bisect",
    "bisect_rules",
    "compare",
    "find_nonfinite",
    "intercepting",
    "profile",
    "record",
    "reduce",
    "replay",
    "restore",
]

_IN = {
    "sardonyx.diagnose.bisection": ("Bisection", "bisect", "bisect_rules"),
    "sardonyx.diagnose.comparison": ("Comparison", "RunConfig", "compare", "find_nonfinite"),
    "sardonyx.telemetry.intercept": ("intercepting", "restore"),
    "sardonyx.diagnose.profiling": ("Profile", "profile"),
    "sardonyx.telemetry.recording": ("record", "replay"),
    "sardonyx.diagnose.reduction": ("Reduction", "reduce"),
}
"""Which module has a name. It is loaded when the name is first used: `import sardonyx` has no need of it."""


def __getattr__(name: str) -> Any:
    for module, names in _IN.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
