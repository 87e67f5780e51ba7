"""Profile calls: time by module, operator and source line, and overhead outside kernels."""

from sardonyx.diagnose.profiling.measuring import profile
from sardonyx.diagnose.profiling.result import Profile

__all__ = ["Profile", "profile"]
