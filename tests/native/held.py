"""Models with constant weights, and whether their kernels hold these."""

from __future__ import annotations

import numpy as np
import onnx

from sardonyx import native


def numbers(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)


def with_weights(text: str, **weights: np.ndarray) -> onnx.ModelProto:
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]> g {text}')
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in weights.items())
    return model


def holds(compiled: native.NativeModel) -> bool:
    return "call.held->" in compiled.source
