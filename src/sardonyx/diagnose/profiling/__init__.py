"""Where the time of a call goes."""

from sardonyx.diagnose.profiling.measuring import profile
from sardonyx.diagnose.profiling.result import Profile

__all__ = ["Profile", "profile"]
