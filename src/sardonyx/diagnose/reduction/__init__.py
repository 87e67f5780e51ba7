"""Reduce a failing model to the smallest part that still fails."""

from sardonyx.diagnose.reduction.case import Case
from sardonyx.diagnose.reduction.reducing import Reduction, reduce

__all__ = ["Case", "Reduction", "reduce"]
