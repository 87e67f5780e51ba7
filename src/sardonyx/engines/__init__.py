"""What runs a model: a registry of engines behind one small interface."""

from sardonyx.engines.registry import Availability, Engine, Job, Runner, engines, find

__all__ = ["Availability", "Engine", "Job", "Runner", "engines", "find"]
