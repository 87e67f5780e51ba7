"""Two ways of running a model, compared value by value."""

from sardonyx.diagnose.compare.comparing import Nonfinite, compare, find_nonfinite
from sardonyx.diagnose.compare.comparison import Comparison, Row
from sardonyx.diagnose.compare.subject import Place
from sardonyx.diagnose.compare.way import Way

__all__ = ["Comparison", "Nonfinite", "Place", "Row", "Way", "compare", "find_nonfinite"]
