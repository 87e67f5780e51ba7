"""Whether this ONNX Runtime has NCHWc convolutions (channels in blocks) on this processor, and the block size.

Its API tells neither, so both are found by trial: rewritten convolutions must match plain ones.
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
"""Operators that would be rewritten."""
_X, _W = (1, 16, 32, 32), (16, 16, 3, 3)


@cache
def domain(ort: Any) -> str | None:
    """Return the domain of NCHWc convolutions with the block size, in the format of `Engine.local_domains`."""
    generator = np.random.default_rng(0)
    feeds = {name: generator.standard_normal(dims, dtype=np.float32) for name, dims in (("x", _X), ("w", _W))}
    expected = _run(ort, _model(), feeds)
    for width in (16, 8):
        model, name = _model(), f"{NCHWC}/{width}"
        optimize(model, domains=[name])
        try:
            if np.allclose(_run(ort, model, feeds), expected, rtol=1e-3, atol=1e-3):
                return name
        except Exception as error:
            log.info("no NCHWc convolutions with blocks of %d channels: %s", width, error)
    return None


def _model() -> ir.Model:
    """Return a model with a Conv and a ConvTranspose."""
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
