"""Rewrite rules, indexed by operator and driven by a worklist, and passes over ONNX models."""

from sardonyx.optimize.optimizer import optimize

__all__ = ["optimize"]
