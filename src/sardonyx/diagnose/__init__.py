"""Seeing what happened: reports, dumps, comparisons, calls, times."""

from sardonyx.diagnose.bisect import Bisection, bisect, bisect_rules
from sardonyx.diagnose.compare import Comparison, Way, compare, find_nonfinite
from sardonyx.diagnose.intercept import intercepting, restore
from sardonyx.diagnose.profile import Profile, profile
from sardonyx.diagnose.recording import record, replay
from sardonyx.diagnose.reduce import Reduction, reduce

__all__ = [
    "Bisection",
    "Comparison",
    "Profile",
    "Reduction",
    "Way",
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
