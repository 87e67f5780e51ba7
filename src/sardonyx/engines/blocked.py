"""Whether this ONNX Runtime, on this processor, has convolutions over blocks of channels, and how wide a block is.

It tells neither, so both are tried: rewritten convolutions must give what plain ones give.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import numpy as np
import onnx_ir as ir

from sardonyx import opsets
from sardonyx.optimize import optimize
from sardonyx.optimize.rules.blocked import NCHWC
from sardonyx.translate.builder import Builder

log = logging.getLogger(__name__)

OPERATORS = frozenset({"Conv", "ConvTranspose"})
"""What would be rewritten."""
_X, _W = (1, 16, 32, 32), (16, 16, 3, 3)


@cache
def domain(ort: Any) -> str | None:
    """The domain of blocked convolutions with the width of a block, as `Engine.local_domains` names it."""
    draw = np.random.default_rng(0)
    feeds = {name: draw.standard_normal(dims, dtype=np.float32) for name, dims in (("x", _X), ("w", _W))}
    expected = _run(ort, _model(), feeds)
    for width in (16, 8):
        model, name = _model(), f"{NCHWC}/{width}"
        optimize(model, domains=[name])
        try:
            if np.allclose(_run(ort, model, feeds), expected, rtol=1e-3, atol=1e-3):
                return name
        except Exception as error:
            log.info("no convolutions over blocks of %d channels: %s", width, error)
    return None


def _model() -> ir.Model:
    """A convolution and a transposed one."""
    g = Builder(opsets.CHANNEL_SCALES)
    x, w = (ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT)) for name in ("x", "w"))
    g.shaped(x, _X), g.shaped(w, _W)
    y = g.shaped(g.Conv(x, w, pads=[1, 1, 1, 1]), _X)
    y = g.shaped(g.ConvTranspose(y, w, pads=[1, 1, 1, 1]), _X)
    graph = ir.Graph([x, w], [y], nodes=g.nodes, opset_imports={"": opsets.CHANNEL_SCALES})
    return ir.Model(graph, ir_version=opsets.IR_VERSION)


def _run(ort: Any, model: ir.Model, feeds: dict[str, np.ndarray]) -> np.ndarray:
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    proto = ir.to_proto(model).SerializeToString()
    session = ort.InferenceSession(proto, options, providers=["CPUExecutionProvider"])
    result: np.ndarray = session.run(None, feeds)[0]
    return result
