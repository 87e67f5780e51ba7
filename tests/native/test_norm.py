"""Layer norm and RMS norm by our own operator, against float64."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from sardonyx.native import norm
from sardonyx.options import Options
from tests.native.running import run

FLOAT, BFLOAT16 = ir.DataType.FLOAT, ir.DataType.BFLOAT16
EPSILON = 1e-3


def session(
    *, centered: bool = True, shifted: bool = True, result: ir.DataType = FLOAT, threads: int = 1
) -> onnxruntime.InferenceSession:
    x, *rows = (
        ir.Value(name=name, type=ir.TensorType(FLOAT), shape=ir.Shape(sizes))
        for name, sizes in (("x", ["a", "b", "c"]), ("scale", ["c"]), ("shift", ["c"]))
    )
    rows = rows[: 1 + shifted]
    node = norm.norm_node(x, rows[0], rows[1] if shifted else None, epsilon=EPSILON, centered=centered)
    norm.set_types(node, FLOAT, result)
    node.outputs[0].name = "y"
    graph = ir.Graph([x, *rows], node.outputs, nodes=[node], opset_imports={"": 21, node.domain: 1}, name="g")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    options.register_custom_ops_library(str(norm.build(Options.of())))
    model = ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def operands(rows: int, columns: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng((rows, columns))
    x = rng.standard_normal((2, rows, columns), dtype=np.float32) * 3 + 100  # far from zero: squares would cancel
    return {"x": x, **{name: rng.standard_normal(columns, dtype=np.float32) for name in ("scale", "shift")}}


def expected(x: np.ndarray, scale: np.ndarray, shift: np.ndarray | float = 0.0, *, centered: bool) -> np.ndarray:
    x = x.astype(np.float64)
    x = x - (x.mean(-1, keepdims=True) if centered else 0)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPSILON) * scale + shift


@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("columns", [1, 5, 16, 31, 32, 50, 768])
@pytest.mark.parametrize("rows", [1, 7])
def test_rows_are_normalized(rows: int, columns: int, centered: bool) -> None:
    feeds = operands(rows, columns)
    (found,) = run(session(centered=centered, threads=2), feeds)
    np.testing.assert_allclose(found, expected(**feeds, centered=centered), rtol=1e-5, atol=3e-4)


def test_there_may_be_no_shift() -> None:
    feeds = operands(7, 50)
    del feeds["shift"]
    (found,) = run(session(shifted=False), feeds)
    np.testing.assert_allclose(found, expected(**feeds, centered=True), rtol=1e-5, atol=3e-4)


def test_results_may_be_in_bfloat16() -> None:
    feeds = operands(7, 50)
    (found,) = run(session(result=BFLOAT16), feeds)
    assert found.dtype == np.dtype(ml_dtypes.bfloat16)
    np.testing.assert_allclose(found.astype(np.float64), expected(**feeds, centered=True), rtol=2**-8, atol=3e-4)


def test_infinity_and_nan_stay_in_their_rows() -> None:
    feeds = operands(7, 50)
    feeds["x"][0, 2, 5], feeds["x"][1, 6, 49] = np.inf, np.nan
    (found,) = run(session(), feeds)
    assert np.isnan(found[0, 2]).all()
    assert np.isnan(found[1, 6]).all()
    assert np.isfinite(found).sum() == found.size - 100


def test_there_may_be_no_rows() -> None:
    (found,) = run(session(), operands(0, 50))
    assert found.shape == (2, 0, 50)


def test_rows_of_another_size_are_an_error() -> None:
    feeds = operands(7, 50)
    feeds["scale"] = feeds["scale"][:49]
    with pytest.raises(Exception, match="another size"):
        run(session(), feeds)
