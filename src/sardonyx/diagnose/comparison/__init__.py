"""Compare two ways of running a model value by value."""

from sardonyx.diagnose.comparison.comparing import Nonfinite, compare, find_nonfinite
from sardonyx.diagnose.comparison.result import Comparison, Row
from sardonyx.diagnose.comparison.run_config import RunConfig
from sardonyx.diagnose.comparison.subject import Place

__all__ = ["Comparison", "Nonfinite", "Place", "Row", "RunConfig", "compare", "find_nonfinite"]
