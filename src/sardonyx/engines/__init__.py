"""What runs a model: a registry of engines behind one small interface."""

from sardonyx.engines.engine import Availability, Engine, Job, Runner
from sardonyx.engines.registry import engines, find, register

__all__ = ["Availability", "Engine", "Job", "Runner", "engines", "find", "register"]
