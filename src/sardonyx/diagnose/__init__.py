"""Seeing what happened: reports, dumps, comparisons, calls."""

from sardonyx.diagnose.bisect import bisect_rules
from sardonyx.diagnose.intercept import intercepting, restore
from sardonyx.diagnose.recording import record, replay

__all__ = ["bisect_rules", "intercepting", "record", "replay", "restore"]
