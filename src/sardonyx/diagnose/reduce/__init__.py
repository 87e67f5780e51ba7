"""A failing model cut down to the smallest part that still fails."""

from sardonyx.diagnose.reduce.case import Case
from sardonyx.diagnose.reduce.reducing import Reduction, reduce

__all__ = ["Case", "Reduction", "reduce"]
