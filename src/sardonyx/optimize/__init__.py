"""Stage three: rewrite rules, indexed by operator and driven by a worklist."""

from sardonyx.optimize.optimizer import optimize

__all__ = ["optimize"]
