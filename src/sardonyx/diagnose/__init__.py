"""Seeing what happened: reports, dumps, comparisons."""

from sardonyx.diagnose.bisect import bisect_rules

__all__ = ["bisect_rules"]
