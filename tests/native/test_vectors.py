"""One row times constant weights: held by the kernel, in the order it reads them."""

from __future__ import annotations

import re

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

import sardonyx
from sardonyx import native
from sardonyx.native import select
from tests.native.held import holds, numbers, with_weights
from tests.native.running import Together

KINDS = {np.float32: "float", np.float64: "double", np.float16: "float16"}
BOUND = {np.float32: 1e-5, np.float64: 1e-13, np.float16: 2e-3}


SIZES = [(64, 64), (7, 5), (2, 1), (33, 130), (512, 257)]


@pytest.fixture(scope="module")
def products() -> Together:
    together = Together(choice="auto")
    for dtype, kind in KINDS.items():
        for depth, columns in SIZES:
            text = f"({kind}[1,1,{depth}] x) => ({kind}[1,1,{columns}] y) {{ y = MatMul(x, w) }}"
            model = with_weights(text, w=numbers(depth, columns, dtype=dtype))
            assert together.add(f"{depth} {columns} {kind}", model) is None
    together.build()
    return together


@pytest.mark.parametrize("dtype", BOUND, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize(("depth", "columns"), SIZES)
def test_is_what_double_precision_gives(products: Together, depth: int, columns: int, dtype: type) -> None:
    weights, x = numbers(depth, columns, dtype=dtype), numbers(1, 1, depth, dtype=dtype)
    assert "call.held->" in products.library.source
    found = products.run(f"{depth} {columns} {KINDS[dtype]}", {"x": x})[0]
    exact = x.astype(np.float64) @ weights.astype(np.float64)
    assert found.shape == exact.shape
    assert np.abs(found - exact).max() <= BOUND[dtype] * np.abs(exact).max()


@pytest.mark.parametrize(
    "body",
    [
        "y = Gemm<transB = 1, alpha = 0.5, beta = 2.0>(x, turned, b)",
        "y = Gemm(x, w, b)",
        "y = com.microsoft.FusedMatMul<alpha = 0.5, transB = 1>(x, turned)",
        "h = Relu(x) z = MatMul(h, w) s = Sigmoid(z) y = Mul(z, s)",
    ],
    ids=["Gemm turned", "Gemm", "FusedMatMul", "among others"],
)
def test_reads_weights_either_way_with_what_is_around(body: str) -> None:
    weights = numbers(48, 96)
    constants = {"w": weights, "turned": weights.T.copy(), "b": numbers(96)}
    used = {name: array for name, array in constants.items() if re.search(rf"\b{name}\b", body)}
    model = with_weights(f"(float[1,48] x) => (float[1,96] y) {{ {body} }}", **used)
    compiled = native.compile(model)
    assert holds(compiled)
    assert len(compiled.model.graph) == 1
    feeds = {"x": numbers(1, 48)}
    expected = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)[0]
    np.testing.assert_allclose(compiled.session().run(None, feeds)[0], expected, rtol=1e-5, atol=1e-5)


def test_several_threads_share_the_columns() -> None:
    weights, x = numbers(256, 2048), numbers(1, 256)
    compiled = native.compile(with_weights("(float[1,256] x) => (float[1,2048] y) { y = MatMul(x, w) }", w=weights))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    session = compiled.session(options)
    for _ in range(20):
        np.testing.assert_allclose(session.run(None, {"x": x})[0], x @ weights, rtol=1e-4, atol=1e-4)


def test_numbers_that_are_none_stay_so() -> None:
    weights = numbers(8, 70)
    weights[3, 69], weights[2, 5] = np.nan, np.inf
    compiled = native.compile(with_weights("(float[1,8] x) => (float[1,70] y) { y = MatMul(x, w) }", w=weights))
    found = compiled.session().run(None, {"x": np.ones((1, 8), np.float32)})[0]
    assert np.isnan(found[0, 69])
    assert found[0, 5] == np.inf
    assert np.isfinite(np.delete(found, [5, 69])).all()


@pytest.mark.parametrize(
    ("rows", "why"), [("2,48", "faster in onnxruntime"), ("N,48", "faster in onnxruntime")], ids=["two", "any"]
)
def test_more_rows_are_left_to_onnxruntime(rows: str, why: str) -> None:
    model = with_weights(
        f"(float[{rows}] x) => (float[{rows.split(',')[0]},96] y) {{ y = MatMul(x, w) }}", w=numbers(48, 96)
    )
    report = native.compile(model).report
    assert [(left.operator, left.why) for left in report.left] == [("MatMul", why)]


def test_weights_that_are_inputs_are_not_held() -> None:
    compiled = native.compile(
        with_weights("(float[1,8] x, float[8,4] w) => (float[1,4] y) { y = MatMul(x, w) }"), select="all"
    )
    assert not holds(compiled)


def test_a_large_model_does_not_hold_its_weights_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "_MAX_WEIGHT_BYTES", 100)
    model = with_weights("(float[1,48] x) => (float[1,96] y) { y = MatMul(x, w) }", w=numbers(48, 96))
    (left,) = native.compile(model).report.left
    assert left.why.endswith("GB of weights would be held twice")


def test_sessions_of_one_library_hold_weights_of_their_own() -> None:
    text = "(float[1,48] x) => (float[1,96] y) { y = MatMul(x, w) }"
    first, second = numbers(48, 96), 2 * numbers(48, 96)
    compiled = [native.compile(with_weights(text, w=weights)) for weights in (first, second)]
    assert compiled[0].library == compiled[1].library
    x = numbers(1, 48)
    sessions = [each.session() for each in compiled]
    for session, weights in zip(sessions, (first, second), strict=True):
        np.testing.assert_allclose(session.run(None, {"x": x})[0], x @ weights, rtol=1e-4, atol=1e-4)
    del sessions[0], session
    np.testing.assert_allclose(sessions[0].run(None, {"x": x})[0], x @ second, rtol=1e-4, atol=1e-4)


@torch.enable_grad()
def test_an_edited_weight_is_noticed_by_torch_compile() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 16)).eval(), torch.randn(1, 32)
    fast = torch.compile(model, backend="sardonyx", options={"native": True})
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
        model[2].weight.mul_(3)
        torch.testing.assert_close(fast(x), model(x))
    model.train()
    fast(x).sum().backward()
    ours = model[0].weight.grad.clone()
    model.zero_grad()
    model(x).sum().backward()
    torch.testing.assert_close(ours, model[0].weight.grad)


def test_a_wrapped_module_holds_them_too() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 16)).eval(), torch.randn(1, 32)
    with torch.no_grad():
        torch.testing.assert_close(sardonyx.compile(model, native=True)(x), model(x))
