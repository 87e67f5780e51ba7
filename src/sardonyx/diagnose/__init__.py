"""Debugging tools: compare, bisect, reduce, profile, explain, intercept, HTML reports."""

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
"""Names by module. A module is imported when a name of it is first used, to keep `import sardonyx` fast."""


def __getattr__(name: str) -> Any:
    for module, names in _IN.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
