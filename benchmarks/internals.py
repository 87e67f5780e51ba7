"""What the suites that `benchmarks.against` measures use of sardonyx besides its public names.

An earlier revision is measured by the present benchmarks, and some of these modules had other names.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

_HOME = "sardonyx.telemetry" if find_spec("sardonyx.telemetry") else "sardonyx.diagnose"  # 0.2.0 had the latter

collecting: Callable[[], AbstractContextManager[Any]] = import_module(f"{_HOME}.report").collecting
difference: Callable[..., float] = import_module(f"{_HOME}.verify").difference
