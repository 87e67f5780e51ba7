"""Engines: the interface behind which runtimes load and run ONNX models, and the registry of them."""

from sardonyx.engines.engine import Availability, Engine, Job, Runner
from sardonyx.engines.registry import engines, find, register

__all__ = ["Availability", "Engine", "Job", "Runner", "engines", "find", "register"]
