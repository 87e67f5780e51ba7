"""Libraries in one process: several of them, one of them twice, and from several threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from tests.native.running import Together, model_of, run, session_of

F = TensorProto.FLOAT
N = helper.make_node


def _model(op: str) -> onnx.ModelProto:
    nodes = [N(op, ["x"], ["a"]), N("Mul", ["a", "x"], ["b"]), N("Softmax", ["b"], ["y"])]
    return model_of(nodes, {"x": (F, ["n", "m"])}, ["y"])


def _compiled(op: str) -> Together:
    together = Together()
    assert together.add("m", _model(op)) is None
    together.build(quickly=True)
    return together


def _x(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def _expected(op: str, x: np.ndarray) -> np.ndarray:
    return run(session_of(_model(op)), {"x": x})[0]


def test_two_models_with_libraries_of_their_own_live_in_one_process() -> None:
    sessions = {op: _compiled(op).session("m") for op in ("Tanh", "Sigmoid")}
    for op, session in sessions.items():
        np.testing.assert_allclose(run(session, {"x": _x(5, 33)})[0], _expected(op, _x(5, 33)), rtol=1e-5)


def test_one_library_serves_two_sessions_and_every_size() -> None:
    compiled = _compiled("Tanh")
    first, second = compiled.session("m"), compiled.session("m")
    for rows, columns in ((1, 1), (3, 70), (64, 8), (0, 5), (1000, 1)):
        x = _x(rows, columns)
        for session in (first, second):
            np.testing.assert_allclose(run(session, {"x": x})[0], _expected("Tanh", x), rtol=1e-5)


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_may_call_one_session_at_once(threads: int) -> None:
    session = _compiled("Tanh").session("m", threads=threads)
    inputs = [_x(200 + 7 * i, 301, seed=i) for i in range(8)]
    wanted = [_expected("Tanh", x) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            for found, expected in zip(pool.map(lambda x: run(session, {"x": x})[0], inputs), wanted, strict=True):
                np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_work_is_the_same_however_many_threads_share_it() -> None:
    compiled = _compiled("Sigmoid")
    x = _x(700, 301)
    one, two = (compiled.run("m", {"x": x}, threads=threads)[0] for threads in (1, 2))
    np.testing.assert_array_equal(one, two)


# Sizes and indices that do not fit


def test_other_sizes_than_a_kernel_was_made_for_are_an_error() -> None:
    together = Together()
    nodes = [N("Exp", ["x"], ["a"]), N("Mul", ["a", "y"], ["z"])]
    assert together.add("m", model_of(nodes, {"x": (F, ["n", 3]), "y": (F, ["n", 3])}, ["z"])) is None
    together.build(quickly=True)
    with pytest.raises(onnxruntime.capi.onnxruntime_pybind11_state.Fail, match="has an unexpected shape"):
        together.run("m", {"x": _x(4, 3), "y": _x(5, 3)})


def test_an_index_beyond_the_end_is_an_error() -> None:
    together = Together()
    nodes = [N("Exp", ["x"], ["a"]), N("Gather", ["a", "i"], ["y"])]
    model = model_of(nodes, {"x": (F, ["n", 3]), "i": (TensorProto.INT64, ["k"])}, ["y"])
    assert together.add("m", model) is None
    together.build(quickly=True)
    feeds = {"x": _x(4, 3), "i": np.array([3, -4, 0])}
    np.testing.assert_allclose(together.run("m", feeds)[0], np.exp(feeds["x"])[[3, 0, 0]], rtol=1e-5)
    for index in (4, -5):
        with pytest.raises(onnxruntime.capi.onnxruntime_pybind11_state.Fail, match="an index is out of range"):
            together.run("m", {**feeds, "i": np.array([0, index])})
