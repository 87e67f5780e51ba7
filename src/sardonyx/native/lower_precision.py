"""Lower precision for a model before its kernels are compiled; the function that does it is above this stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import onnx_ir as ir

from sardonyx.errors import OptionError
from sardonyx.model_files import UserModel
from sardonyx.options import Options

LowerPrecision: TypeAlias = Callable[[UserModel, Iterable[Any], Options], ir.Model]
"""Takes a model, calls to calibrate it by, and options; returns the model with layers in lower precision."""
_registered: list[LowerPrecision] = []


def lower_precision_by(function: LowerPrecision) -> LowerPrecision:
    """Register the function that lowers the precision of a model."""
    _registered[:] = [function]
    return function


def lower_precision(model: UserModel, calibration: Iterable[Any], options: Options) -> ir.Model:
    """Return a model with layers in the precision of the options."""
    if not _registered:
        raise OptionError(f"precision={options.precision!r} needs sardonyx.optimize", hint="import sardonyx")
    return _registered[0](model, calibration, options)
