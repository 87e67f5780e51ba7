"""Find the rule, kernel, optimizer or option that changes a model's result or time."""

from sardonyx.diagnose.bisection.bisecting import Bisection, Culprit, bisect
from sardonyx.diagnose.bisection.delta import minimal_subset
from sardonyx.diagnose.bisection.rules import RuleBisection, RuleCulprit, bisect_rules

__all__ = ["Bisection", "Culprit", "RuleBisection", "RuleCulprit", "bisect", "bisect_rules", "minimal_subset"]
