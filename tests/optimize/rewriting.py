"""Write a small ONNX model as text, rewrite it, and run both versions on the same numbers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import torch

from sardonyx.engines.onnxruntime import OnnxRuntime
from sardonyx.native import images
from sardonyx.native.session import register
from sardonyx.optimize.legalize import legalize
from sardonyx.optimize.optimizer import all_rules, optimize
from sardonyx.optimize.rules.channels_last import CHANNELS_LAST
from sardonyx.optimize.rules.cuda import CUDA, CUDA_KERNELS
from sardonyx.optimize.rules.images import IMAGES
from sardonyx.options import Options
from tests.optimize.channels_last import expand_channels_last

HEADER = '<ir_version: 10, opset_import: ["": 23, "com.microsoft": 1]>\n'
_CHANNELS_LAST = frozenset({CHANNELS_LAST, IMAGES})
"""As between convolutions in lower precision."""
DOMAINS = OnnxRuntime().domains | OnnxRuntime().local_domains(torch.device("cpu"), {"Conv"}) | _CHANNELS_LAST
CUDA_DOMAINS = OnnxRuntime().domains | OnnxRuntime().local_domains(torch.device("cuda"), set()) | {CUDA_KERNELS}
CUDA_RULES = frozenset(rule.name for rule in all_rules() if rule.needs.startswith(CUDA))
"""Rules for kernels on CUDA; the CPU has kernels of the same operators in float32, but for those with channels last."""
TOLERANCE = {"float16": 2e-2, "float32": 1e-5, "float64": 1e-9}


def model_of(text: str) -> ir.Model:
    """The model, with every shape that inference finds where rules look for it."""
    proto = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(HEADER + text), data_prop=True)
    model = ir.from_proto(proto)
    for graph in (model.graph, *model.graph.subgraphs()):
        for value in (*graph.inputs, *graph.initializers.values(), *(o for node in graph for o in node.outputs)):
            if value.shape is not None and all(isinstance(dim, int) for dim in value.shape):
                value.meta["dims"] = tuple(value.shape)
    return model


def rewritten(
    text: str, *, seed: int = 0, special: tuple[float, ...] = (), names: Any = None, cuda: bool = False
) -> tuple[Counter[str], list[str]]:
    """Which rules applied and which operators remain; the results are checked to be the same.

    Some of the numbers that the model is run on are the `special` ones.
    """
    before, after = model_of(text), model_of(text)
    hits = optimize(after, domains=CUDA_DOMAINS if cuda else DOMAINS, names=names)
    feeds = numbers_for(before, seed, special)
    for expected, result in zip(run(before, feeds), run(after, feeds), strict=True):
        assert result.dtype == expected.dtype
        assert result.shape == expected.shape
        assert_same(result, expected)
    return hits, [node.op_type for node in after.graph]


def assert_same(result: Any, expected: Any) -> None:
    """Equal up to rounding, relative to the largest number expected, with NaN and infinities in the same places."""
    if expected.dtype.kind != "f":
        np.testing.assert_array_equal(result, expected)
        return
    finite = np.abs(expected[np.isfinite(expected)].astype(np.float64))
    tolerance = TOLERANCE[expected.dtype.name]
    scale = max(1.0, finite.max(initial=0.0))
    np.testing.assert_allclose(result, expected, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def numbers_for(model: ir.Model, seed: int, special: tuple[float, ...]) -> dict[str, Any]:
    generator = np.random.default_rng(seed)
    return {str(x.name): _numbers(x, generator, special) for x in model.graph.inputs}


def _numbers(value: ir.Value, generator: np.random.Generator, special: tuple[float, ...]) -> Any:
    shape = tuple(int(dim) for dim in value.shape or ())
    assert value.dtype is not None
    dtype = value.dtype.numpy()
    if dtype.kind in "bi":
        return generator.integers(0 if dtype.kind == "b" else -3, 2, shape).astype(dtype)
    array = np.array(generator.normal(size=shape), dtype=dtype)
    if special:
        array[generator.random(shape) < 0.1] = generator.choice(special)
    return array


def run(model: ir.Model, feeds: dict[str, Any]) -> Any:
    """What ONNX Runtime computes, with no rewrites of its own."""
    kernels = OnnxRuntime().kernels(torch.device("cpu"))
    assert kernels is not None
    expand_channels_last(model)
    legalize(model, kernels)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    if any(node.domain == IMAGES for node in model.graph):
        register(options, images.build(Options.of()))
    session = onnxruntime.InferenceSession(
        ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return session.run(None, feeds)
