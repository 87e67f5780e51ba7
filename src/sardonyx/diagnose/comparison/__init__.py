"""Two ways of running a model, compared value by value."""

from sardonyx.diagnose.comparison.comparing import Nonfinite, compare, find_nonfinite
from sardonyx.diagnose.comparison.result import Comparison, Row
from sardonyx.diagnose.comparison.subject import Place
from sardonyx.diagnose.comparison.way import Way

__all__ = ["Comparison", "Nonfinite", "Place", "Row", "Way", "compare", "find_nonfinite"]
