"""Corners that kernels once had wrong: sizes that are nothing or unknown, places that are no memory, and others."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import sardonyx
from sardonyx import native
from sardonyx.native import select
from tests.memory import growth
from tests.native.held import holds, numbers, with_weights


def same_as_onnxruntime(model: onnx.ModelProto, choice: str = "all", **feeds: np.ndarray) -> native.NativeModel:
    """Compile a model, and compare what it computes."""
    compiled = native.compile(model, select=choice)
    expected = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    for found, wanted in zip(compiled.session().run(None, feeds), expected.run(None, feeds), strict=True):
        assert found.dtype == wanted.dtype
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    return compiled


@pytest.mark.parametrize(("depth", "columns"), [(0, 8), (8, 0)])
def test_weights_of_no_elements_are_held_too(depth: int, columns: int) -> None:
    text = f"(float[1,{depth}] x) => (float[1,{columns}] y) {{ z = MatMul(x, w) y = Relu(z) }}"
    compiled = same_as_onnxruntime(with_weights(text, w=numbers(depth, columns)), x=numbers(1, depth))
    assert holds(compiled)


def test_a_row_that_lies_in_steps_of_a_symbolic_size_meets_held_weights() -> None:
    text = """(float[8,S] x) => (float[1,5] y) <float[8,1] a, float[1,8] t> {
        a = Slice(x, start, end, axis)
        t = Transpose<perm = [1, 0]>(a)
        y = MatMul(t, w)
    }"""
    where = {name: np.array([value]) for name, value in {"start": 0, "end": 1, "axis": 1}.items()}
    compiled = same_as_onnxruntime(with_weights(text, w=numbers(8, 5), **where), x=numbers(8, 7))
    assert holds(compiled)


def test_a_product_of_unknown_sizes_is_left_alone() -> None:
    text = "(float[A] x, int64[R] s) => (float[B,5] y) { q = Reshape(x, s) z = MatMul(q, w) y = Relu(z) }"
    (left, *_) = [
        left for left in native.generate(with_weights(text, w=numbers(8, 5))).report.left if left.operator == "MatMul"
    ]
    assert "sizes" in left.why


def test_an_operator_of_another_domain_with_the_name_of_a_product_is_left_alone() -> None:
    model = with_weights("(float[1,8] x) => (float[1,8] y) { a = Exp(x) b = Tanh(a) y = foo.Gemm(b) }")
    model.opset_import.append(onnx.helper.make_opsetid("foo", 1))
    (left,) = native.generate(model).report.left
    assert (left.operator, left.why) == ("Gemm", "foo::Gemm has no lowering")


def test_weights_of_constant_nodes_count_as_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "_MAX_WEIGHT_BYTES", 100)
    model = with_weights("(float[1,48] x) => (float[1,96] y) { y = MatMul(x, w) }")
    weights = onnx.numpy_helper.from_array(numbers(48, 96))
    model.graph.node.insert(0, onnx.helper.make_node("Constant", [], ["w"], value=weights))
    left = next(left for left in native.generate(model).report.left if left.operator == "MatMul")
    assert left.why.endswith("GB of weights would be held twice")


@pytest.mark.parametrize(
    ("body", "constants"),
    [
        ("q = Pad(i, p)", {"p": np.array([0, 0, 1, 1, 0, 0, 1, 1])}),
        ("q = Gather<axis = 1>(i, p)", {"p": np.array([1])}),
    ],
    ids=["Pad", "Gather"],
)
def test_places_that_are_no_memory_can_be_padded_and_looked_up(body: str, constants: dict[str, np.ndarray]) -> None:
    text = f"""(float[1,2,4,4] x) => (float[1,2,4,4] y, int64[a,b,c,d] q) {{
        y, i = MaxPool<kernel_shape = [1, 1]>(x)
        {body}
    }}"""
    same_as_onnxruntime(with_weights(text, **constants), x=numbers(1, 2, 4, 4))


@pytest.mark.parametrize("dilation", [1, 2])
def test_the_index_of_a_window_of_negative_infinity_is_in_the_image_and_not_in_the_padding(dilation: int) -> None:
    how = f"kernel_shape = [3, 3], strides = [2, 1], pads = [1, 1, 1, 1], dilations = [{dilation}, {dilation}]"
    model = with_weights(f"(float[2,3,n,m] x) => (float[2,3,a,b] y, int64[2,3,a,b] i) {{ y, i = MaxPool<{how}>(x) }}")
    compiled = native.compile(model, select="all")
    assert [taken.operators for taken in compiled.report.kernels] == [["MaxPool"]]
    x = torch.full((2, 3, 7, 8), -torch.inf)
    x[1, 1, 2, 3], x[1, 2, 4:6, 5] = 1.0, torch.nan
    found = compiled.session().run(None, {"x": x.numpy()})
    y, index = torch.nn.functional.max_pool2d(x, 3, (2, 1), 1, dilation, return_indices=True)
    np.testing.assert_array_equal(found[0], y)
    np.testing.assert_array_equal(found[1], index + (torch.arange(6) * 56).view(2, 3, 1, 1))


@pytest.mark.parametrize("side", ["SAME_UPPER", "SAME_LOWER"])
def test_padding_that_a_pool_finds_by_itself_counts_where_that_is_asked_for(side: str) -> None:
    how = f'kernel_shape = [3, 3], strides = [2, 2], auto_pad = "{side}", count_include_pad = 1'
    model = with_weights(f"(float[1,2,7,8] x) => (float[1,2,4,4] y) {{ y = AveragePool<{how}>(x) }}")
    same_as_onnxruntime(model, x=numbers(1, 2, 7, 8))


@pytest.mark.parametrize("outside", [True, False], ids=["outer", "inner"])
def test_a_branch_holds_weights_of_its_own_and_of_the_graph_around_it(outside: bool) -> None:
    text = """(float[1,8] x, bool c) => (float[1,8] y) {
        y = If (c) <
            then_branch = t () => (float[1,8] a) { z = MatMul(x, w) a = Relu(z) },
            else_branch = e () => (float[1,8] b) { b = Exp(x) }
        >
    }"""
    model, weights = with_weights(text), onnx.numpy_helper.from_array(numbers(8, 8), "w")
    graph = model.graph if outside else model.graph.node[0].attribute[0].g
    graph.initializer.append(weights)
    assert holds(same_as_onnxruntime(model, "auto", x=numbers(1, 8), c=np.array(True)))


def test_sessions_come_and_go_in_several_threads() -> None:
    weights, x = numbers(64, 96), numbers(1, 64)
    compiled = native.compile(with_weights("(float[1,64] x) => (float[1,96] y) { y = MatMul(x, w) }", w=weights))
    wrong: list[float] = []

    def work() -> None:
        for _ in range(8):
            session = compiled.session()
            wrong.extend(np.abs(session.run(None, {"x": x})[0] - x @ weights).max() for _ in range(4))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wrong) == 4 * 8 * 4
    assert max(wrong) < 1e-4


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is told by /proc")
def test_a_session_that_is_gone_gives_its_weights_back() -> None:
    weights = numbers(2048, 1024)  # 8 MB
    compiled = native.compile(with_weights("(float[1,2048] x) => (float[1,1024] y) { y = MatMul(x, w) }", w=weights))

    def use() -> None:
        for _ in range(8):
            compiled.session().run(None, {"x": numbers(1, 2048)})

    assert growth(use) < 3 * weights.nbytes


def test_kernels_that_are_asked_for_of_an_engine_that_takes_none_are_an_error() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), torch.randn(2, 4)
    with pytest.raises(Exception, match="supports no kernels"), torch.no_grad():
        torch.compile(model, backend="sardonyx", options={"native": True, "engine": "reference"})(x)
    with pytest.raises(sardonyx.OptionError, match="supports no kernels"), torch.no_grad():
        sardonyx.compile(model, native=True, engine="reference")(x)
