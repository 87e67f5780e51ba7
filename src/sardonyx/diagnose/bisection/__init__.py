"""Which of the things that change a model on its way to the engine changes its result, or its time."""

from sardonyx.diagnose.bisection.bisecting import Bisection, Found, bisect
from sardonyx.diagnose.bisection.delta import smallest
from sardonyx.diagnose.bisection.rules import Culprit, RuleBisection, bisect_rules

__all__ = ["Bisection", "Culprit", "Found", "RuleBisection", "bisect", "bisect_rules", "smallest"]
