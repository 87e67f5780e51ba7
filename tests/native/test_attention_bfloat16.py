"""Attention in bf16 by our own operator, against float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from sardonyx.errors import EngineError, OptionError
from sardonyx.native import attention
from sardonyx.native.attention import attention_node
from sardonyx.native.processor import Processor
from sardonyx.options import Options
from tests.native.running import run

FLOAT, BFLOAT16 = ir.DataType.FLOAT, ir.DataType.BFLOAT16
NUMPY = {FLOAT: np.dtype(np.float32), BFLOAT16: np.dtype(ml_dtypes.bfloat16)}
LARGEST_ERROR = {FLOAT: 2.0**-7, BFLOAT16: 2.0**-6}
"""Relative to the largest value: exponentials are rounded to bfloat16, and then the result may be."""

pytestmark = pytest.mark.skipif(bool(attention.BFLOAT16.missing()), reason="no AVX512 for bfloat16")


def session(
    rank: int = 4,
    bias: int = 0,
    *,
    x_type: ir.DataType = FLOAT,
    result: ir.DataType = FLOAT,
    threads: int = 1,
    scale: float = 0.5,
    causal: bool = False,
    heads: int = 0,
    key_heads: int = 0,
    has_past: bool = False,
) -> onnxruntime.InferenceSession:
    operands = [_operand(name, rank, x_type) for name in "qkv"]
    added = _operand("bias", bias, FLOAT) if bias else None
    past = (_operand("past_k", 4, x_type), _operand("past_v", 4, x_type)) if has_past else None
    numbers = {"heads": heads, "key_heads": key_heads}
    node = attention_node(*operands, added, past, scale=scale, causal=causal, result=result, **numbers)
    node.outputs[0].name = "y"
    inputs = [x for x in node.inputs if x is not None]
    graph = ir.Graph(inputs, node.outputs, nodes=[node], opset_imports={"": 21, node.domain: 1}, name="g")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    options.register_custom_ops_library(str(attention.build(Options.of())))
    model = ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _operand(name: str, rank: int, dtype: ir.DataType) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape([f"{name}{axis}" for axis in range(rank)]))


def operands(
    batch: int, heads: int, queries: int, keys: int, size: int, *, key_heads: int = 0, value_size: int = 0
) -> dict[str, np.ndarray]:
    rng = np.random.default_rng((batch, heads, queries, keys, size))
    shapes = {"q": (heads, queries, size), "k": (key_heads or heads, keys, size)}
    shapes["v"] = (key_heads or heads, keys, value_size or size)
    drawn = {name: rng.standard_normal((batch, *shape), dtype=np.float32) for name, shape in shapes.items()}
    return {name: x.astype(ml_dtypes.bfloat16).astype(np.float32) for name, x in drawn.items()}


def expected(
    feeds: Mapping[str, np.ndarray], scale: float = 0.5, bias: np.ndarray | float = 0.0, *, causal: bool = False
) -> np.ndarray:
    q, k, v = (feeds[name].astype(ml_dtypes.bfloat16).astype(np.float64) for name in "qkv")
    k, v = (x.repeat(q.shape[1] // max(k.shape[1], 1), axis=1) for x in (k, v))
    scores = q @ k.swapaxes(-1, -2) * scale + np.asarray(bias, np.float64)
    if causal:
        scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf)
    largest = scores.max(-1, keepdims=True, initial=-np.inf)
    powers = np.exp(scores - np.where(np.isneginf(largest), 0, largest))
    total = powers.sum(-1, keepdims=True)
    return powers / np.where(total == 0, 1, total) @ v


def assert_near(found: np.ndarray, wanted: np.ndarray, dtype: ir.DataType = FLOAT) -> None:
    assert found.shape == wanted.shape
    assert found.dtype == NUMPY[dtype]
    np.testing.assert_allclose(
        found.astype(np.float64), wanted, rtol=0, atol=LARGEST_ERROR[dtype] * np.abs(wanted).max(initial=1e-9)
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [1, 5, 32, 33, 64, 70])
@pytest.mark.parametrize(
    ("queries", "keys"), [(1, 1), (1, 40), (1, 600), (3, 33), (11, 7), (12, 32), (13, 33), (37, 600), (25, 1030)]
)
def test_it_is_softmax_of_scores_by_values(queries: int, keys: int, size: int, causal: bool) -> None:
    feeds = operands(1, 2, queries, keys, size)
    (found,) = run(session(causal=causal), feeds)
    assert_near(found, expected(feeds, causal=causal))


@pytest.mark.parametrize("result", [FLOAT, BFLOAT16])
@pytest.mark.parametrize("x_type", [FLOAT, BFLOAT16])
def test_operands_and_results_may_be_in_bfloat16(x_type: ir.DataType, result: ir.DataType) -> None:
    feeds = operands(2, 3, 20, 45, 24, value_size=40)
    (found,) = run(session(x_type=x_type, result=result), {name: x.astype(NUMPY[x_type]) for name, x in feeds.items()})
    assert_near(found, expected(feeds), result)


@pytest.mark.parametrize("queries", [1, 2, 15])
def test_a_head_of_keys_serves_several_of_queries(queries: int) -> None:
    feeds = operands(2, 6, queries, 20, 8, key_heads=2)
    (found,) = run(session(threads=2), feeds)
    assert_near(found, expected(feeds))


@pytest.mark.parametrize("queries", [1, 14])
def test_heads_may_lie_side_by_side(queries: int) -> None:
    feeds = operands(2, 4, queries, 35, 16, key_heads=2, value_size=72)
    flat = {name: x.swapaxes(1, 2).reshape(2, x.shape[2], -1) for name, x in feeds.items()}
    (found,) = run(session(3, heads=4, key_heads=2), flat)
    assert_near(found.reshape(2, queries, 4, 72).swapaxes(1, 2), expected(feeds))


@pytest.mark.parametrize("x_type", [FLOAT, BFLOAT16])
@pytest.mark.parametrize("queries", [1, 14])
@pytest.mark.parametrize("past", [0, 1, 40, 64, 599, 600])
def test_the_first_keys_and_values_may_be_elsewhere(past: int, queries: int, x_type: ir.DataType) -> None:
    feeds = operands(2, 4, queries, 600, 40, key_heads=2, value_size=72)
    bias = np.random.default_rng(0).standard_normal((queries, 600)).astype(np.float32)
    parts = {name: x.astype(NUMPY[x_type]) for name, x in _split(feeds, past).items()}
    (found,) = run(session(bias=2, x_type=x_type, has_past=True), {**parts, "bias": bias})
    assert_near(found, expected(feeds, bias=bias))


@pytest.mark.parametrize("queries", [1, 14])
def test_only_keys_and_values_after_the_past_may_lie_side_by_side(queries: int) -> None:
    feeds = operands(2, 4, queries, 35, 16, key_heads=2, value_size=72)
    parts = _split(feeds, 20)
    flat = {name: x.swapaxes(1, 2).reshape(2, x.shape[2], -1) for name, x in parts.items() if len(name) == 1}
    (found,) = run(session(3, heads=4, key_heads=2, has_past=True, causal=True), {**parts, **flat})
    assert_near(found.reshape(2, queries, 4, 72).swapaxes(1, 2), expected(feeds, causal=True))


def _split(feeds: Mapping[str, np.ndarray], past: int) -> dict[str, np.ndarray]:
    """Give the first keys and values apart from the others."""
    parts = {f"past_{name}": feeds[name][:, :, :past] for name in "kv"}
    return {"q": feeds["q"], **{name: feeds[name][:, :, past:] for name in "kv"}, **parts}


@pytest.mark.parametrize("shape", [(13, 600), (1, 600), (3, 13, 600), (2, 1, 1, 600), (2, 3, 13, 600), (2, 1, 2, 600)])
def test_a_bias_broadcasts_and_may_mask(shape: Sequence[int]) -> None:
    feeds = operands(2, 3, max(shape[-2], 2), 600, 8)
    rng = np.random.default_rng(0)
    bias = rng.standard_normal(shape).astype(np.float32)
    bias[..., 100:420] = -np.inf  # whole panels of keys
    bias[rng.random(shape) < 0.3] = -np.inf
    (found,) = run(session(bias=len(shape)), {**feeds, "bias": bias})
    assert_near(found, expected(feeds, bias=bias))


@pytest.mark.parametrize("queries", [13, 3])
def test_rows_that_are_masked_entirely_are_zero(queries: int) -> None:
    feeds = operands(1, 1, queries, 40, 8)
    bias = np.zeros((queries, 40), np.float32)
    bias[2] = -np.inf
    (found,) = run(session(bias=2), {**feeds, "bias": bias})
    assert (found[0, 0, 2] == 0).all()
    assert_near(found, expected(feeds, bias=bias))


def test_rows_with_the_lowest_number_throughout_are_uniform_as_in_torch() -> None:
    feeds = operands(1, 1, 2, 4, 8)
    bias = np.full((2, 4), np.finfo(np.float32).min)
    (found,) = run(session(bias=2), {**feeds, "bias": bias})
    assert_near(found, np.broadcast_to(feeds["v"].mean(-2, keepdims=True), found.shape))


@pytest.mark.parametrize("queries", [13, 1])
def test_scores_far_apart_do_not_overflow(queries: int) -> None:
    feeds = operands(1, 1, queries, 1100, 16)
    feeds["q"] *= 128
    feeds["k"][..., 1050, :] *= 16  # the largest scores come in a later block
    (found,) = run(session(), feeds)
    assert np.isfinite(found).all()
    assert_near(found, expected(feeds))


@pytest.mark.parametrize("queries", [15, 4])
def test_nan_stays_in_its_row(queries: int) -> None:
    feeds = operands(1, 1, queries, 40, 8)
    feeds["q"][0, 0, 3, 5] = np.nan
    (found,) = run(session(), feeds)
    assert np.isnan(found[0, 0, 3]).all()
    assert np.isfinite(np.delete(found, 3, axis=2)).all()


@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_sizes_may_be_zero(batch: int, queries: int, keys: int) -> None:
    feeds = operands(batch, 2, queries, keys, 8)
    (found,) = run(session(), feeds)
    assert found.shape == (batch, 2, queries, 8)
    assert (found == 0).all()


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_operands_that_do_not_fit_are_an_error(name: str) -> None:
    feeds = operands(2, 2, 3, 4, 8)
    feeds[name] = feeds[name][:1]
    with pytest.raises(Exception, match="do not fit together"):
        run(session(), feeds)


@pytest.mark.parametrize("name", ["past_k", "past_v"])
def test_a_past_that_does_not_fit_is_an_error(name: str) -> None:
    feeds = _split(operands(2, 2, 3, 8, 8), 4)
    for wrong in (feeds[name][:1], feeds[name][:, :1], feeds[name][..., :3], feeds[name][:, :, :2]):
        with pytest.raises(Exception, match=r"another size|do not fit together"):
            run(session(has_past=True), {**feeds, name: wrong})


def test_a_bias_of_another_size_is_an_error() -> None:
    feeds = operands(2, 2, 3, 4, 8)
    with pytest.raises(Exception, match="bias of attention has another size"):
        run(session(bias=2), {**feeds, "bias": np.zeros((3, 5), np.float32)})


def test_other_types_are_an_error() -> None:
    with pytest.raises(OptionError, match="cannot take"):
        session(x_type=ir.DataType.FLOAT16)


def test_without_the_instructions_it_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sardonyx.native.linear.processor", lambda: Processor("native", "x86_64", ["avx512f"]))
    with pytest.raises(EngineError, match="avx512_bf16"):
        attention.build(Options.of())
