"""Fold what follows a convolution into its constants."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from sardonyx.optimize.pattern import P, array_of
from sardonyx.optimize.rule import Match, rule

_STATISTICS = ("scale", "shift", "mean", "var")


@rule(
    P.BatchNormalization(P.Conv("x", "weight", _name="conv"), *_STATISTICS),
    P.BatchNormalization(P.Conv("x", "weight", "bias", _name="conv"), *_STATISTICS),
)
def batch_norm_into_conv(m: Match) -> ir.Value:
    """BatchNormalization(Conv(x, w, b)) = Conv(x, w·s, (b − mean)·s + shift), where s = scale / √(var + ε).

    Only for constants in the model. Weights in torch may change, and ONNX Runtime folds those itself.
    """
    m.require(len(m.node.outputs) == 1 and not m.attribute(m.result, "training_mode", 0), "in training mode")
    weight, *statistics = (array_of(value) for value in (m.weight, m.scale, m.shift, m.mean, m.var))
    m.require(weight is not None and all(s is not None for s in statistics), "its values are not constants")
    m.require(weight.dtype in (np.float32, np.float64), "no kernel for the dtype")
    scale, shift, mean, var = (s.astype(np.float64) for s in statistics)
    factor = scale / np.sqrt(var + m.attribute(m.result, "epsilon", 1e-5))
    m.require(bool(np.isfinite(factor).all()), "a variance is zero")
    bias = _bias(m)
    folded = weight * factor.reshape(-1, *[1] * (weight.ndim - 1))
    inputs = [m.g.constant(a.astype(weight.dtype)) for a in (folded, (bias - mean) * factor + shift)]
    conv = m.conv.producer()
    assert conv is not None
    attributes = {name: attribute.value for name, attribute in conv.attributes.items()}
    return m.g.shaped(m.g.Conv(m.x, *inputs, **attributes), m.dims(m.result))


def _bias(m: Match) -> np.ndarray | float:
    conv = m.conv.producer()
    value = conv.inputs[2] if conv is not None and len(conv.inputs) > 2 else None
    if value is None:
        return 0.0
    bias: np.ndarray | None = array_of(value)
    m.require(bias is not None, "its values are not constants")
    assert bias is not None
    return bias.astype(np.float64)
