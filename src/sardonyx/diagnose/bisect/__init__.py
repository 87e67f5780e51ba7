"""Which of the things that change a model on its way to the engine changes its result, or its time."""

from sardonyx.diagnose.bisect.bisecting import Bisection, Found, bisect
from sardonyx.diagnose.bisect.delta import smallest
from sardonyx.diagnose.bisect.rules import Culprit, RuleBisection, bisect_rules

__all__ = ["Bisection", "Culprit", "Found", "RuleBisection", "bisect", "bisect_rules", "smallest"]
