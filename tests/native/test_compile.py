"""`sardonyx.native.compile`: what it takes, what it gives, and that the numbers stay ONNX Runtime's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper

import sardonyx
from sardonyx import native
from sardonyx.errors import MissingDependency, OptionError, SardonyxError
from sardonyx.native import compile_model, measure
from sardonyx.toolchain import compiler
from tests.native.running import model_of, run, session_of

F = TensorProto.FLOAT
N = helper.make_node


def _model() -> onnx.ModelProto:
    nodes = [
        N("MatMul", ["x", "w"], ["p"], name="product"),
        N("Add", ["p", "b"], ["s"], name="sum"),
        N("Sigmoid", ["s"], ["g"], name="gate"),
        N("Mul", ["s", "g"], ["y"], name="silu"),
    ]
    draw = np.random.default_rng(1)
    weights = {"w": draw.standard_normal((8, 6)).astype("f"), "b": draw.standard_normal(6).astype("f")}
    return model_of(nodes, {"x": (F, ["n", 8])}, ["y"], weights, opset=18)


def _x(rows: int) -> np.ndarray:
    return np.random.default_rng(rows).standard_normal((rows, 8)).astype("f")


def _agree(compiled: native.NativeModel, model: onnx.ModelProto) -> None:
    session = compiled.session()
    for rows in (1, 5):
        feeds = {"x": _x(rows)}
        np.testing.assert_allclose(session.run(None, feeds)[0], run(session_of(model), feeds)[0], rtol=1e-5, atol=1e-6)


# What is taken


def test_a_model_is_taken_in_every_form(tmp_path: Path) -> None:
    model = _model()
    onnx.save(model, str(tmp_path / "m.onnx"))
    forms = [model, model.SerializeToString(), tmp_path / "m.onnx", str(tmp_path / "m.onnx"), ir.from_proto(model)]
    for form in forms:
        compiled = native.compile(form)
        assert [taken.operators for taken in compiled.report.kernels] == [["Add", "Sigmoid", "Mul"]]
        _agree(compiled, model)


def test_a_program_is_compiled() -> None:
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.LayerNorm(6), torch.nn.GELU()).eval(), _x(3)
    program = sardonyx.export(model, (torch.from_numpy(x),))
    compiled = native.compile(program)
    assert compiled.report.nodes_after < compiled.report.nodes_before
    found = compiled.session().run(None, {"input": x})[0]
    np.testing.assert_allclose(found, model(torch.from_numpy(x)).numpy(), rtol=1e-4, atol=1e-6)


def test_weights_in_a_file_of_their_own_stay_there_until_the_model_is_saved(tmp_path: Path) -> None:
    model = _model()
    onnx.save(_model(), str(tmp_path / "m.onnx"), save_as_external_data=True, location="m.bin", size_threshold=0)
    compiled = native.compile(tmp_path / "m.onnx")
    assert isinstance(compiled.model.graph.initializers["w"].const_value, ir.ExternalTensor)
    _agree(compiled, model)
    folder = compiled.save(tmp_path / "compiled")
    for name in ("m.onnx", "m.bin"):
        (tmp_path / name).unlink()
    _agree(native.load(folder), model)


def test_what_is_given_stays_as_it_is() -> None:
    given = ir.from_proto(_model())
    native.compile(given)
    assert [node.op_type for node in given.graph] == ["MatMul", "Add", "Sigmoid", "Mul"]


def test_functions_of_a_model_are_inlined() -> None:
    silu = helper.make_function(
        "own",
        "Silu",
        ["a"],
        ["c"],
        [N("Sigmoid", ["a"], ["b"]), N("Mul", ["a", "b"], ["c"])],
        [helper.make_opsetid("", 18)],
    )
    graph = helper.make_graph(
        [N("Silu", ["x"], ["y"], domain="own")],
        "g",
        [helper.make_tensor_value_info("x", F, [None, 8])],
        [helper.make_tensor_value_info("y", F, [None, 8])],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
    model = helper.make_model(graph, functions=[silu], opset_imports=opsets, ir_version=10)
    compiled = native.compile(model)
    assert [taken.operators for taken in compiled.report.kernels] == [["Sigmoid", "Mul"]]
    _agree(compiled, model)


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.onnx").write_text("no model")
    with pytest.raises(SardonyxError, match=r"text\.onnx cannot be read as an ONNX model"):
        native.compile(tmp_path / "text.onnx")
    with pytest.raises(SardonyxError, match="8 bytes are not an ONNX model"):
        native.compile(b"no model")
    with pytest.raises(FileNotFoundError, match="absent"):
        native.compile(tmp_path / "absent.onnx")
    with pytest.raises(TypeError, match="not int"):
        native.compile(3)


def test_a_model_without_anything_to_compile_runs_as_it_is(tmp_path: Path) -> None:
    model = model_of([N("MatMul", ["x", "x"], ["y"])], {"x": (F, [8, 8])}, ["y"])
    compiled = native.compile(model)
    assert compiled.library is None
    assert compiled.report.left[0].why == "faster in onnxruntime"
    loaded = native.load(compiled.save(tmp_path / "m"))
    np.testing.assert_allclose(loaded.session().run(None, {"x": _x(8)})[0], _x(8) @ _x(8), rtol=1e-4, atol=1e-5)


def test_an_unknown_target_and_processor_are_refused() -> None:
    with pytest.raises(OptionError, match="target is 'abacus'"):
        native.compile(_model(), target="abacus")
    with pytest.raises(OptionError, match="processor is 'z80'"):
        native.compile(_model(), processor="z80")


def _branching() -> onnx.ModelProto:
    """Two nodes before an If, which both branches read, and two in each of them."""

    def branch(name: str, op: str) -> onnx.GraphProto:
        nodes = [N(op, ["b"], [f"{name}1"]), N("Mul", [f"{name}1", "x"], [f"{name}2"])]
        return helper.make_graph(nodes, name, [], [helper.make_tensor_value_info(f"{name}2", F, ["n", 8])])

    nodes = [
        *(N("Exp", ["x"], ["a"]), N("Sqrt", ["a"], ["b"])),
        N("If", ["c"], ["y"], then_branch=branch("t", "Tanh"), else_branch=branch("e", "Abs")),
    ]
    return model_of(nodes, {"x": (F, ["n", 8]), "c": (TensorProto.BOOL, [])}, ["y"])


@pytest.mark.parametrize("measured", [False, True])
def test_branches_have_kernels_of_their_own(measured: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(measure, "_rounds", lambda calls, least=1: [[2.0, 1.0]])
    model = _branching()
    compiled = native.compile(model, measure=measured)
    operators = sorted(list(taken.operators) for taken in compiled.report.kernels)
    assert operators == [["Abs", "Mul"], ["Exp", "Sqrt"], ["Tanh", "Mul"]]
    assert (compiled.report.nodes_before, compiled.report.nodes_after) == (7, 4)
    session = native.load(compiled.save(tmp_path / "m")).session()
    for given in (True, False):
        feeds = {"x": _x(3), "c": np.array(given)}
        np.testing.assert_allclose(session.run(None, feeds)[0], run(session_of(model), feeds)[0], rtol=1e-5)


# The three steps


def test_generate_gives_the_source_and_what_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "find", lambda: pytest.fail("a compiler was asked for"))
    made = native.generate(_model())
    assert made.domain in made.source
    assert "RegisterCustomOps" in made.source
    assert [taken.nodes for taken in made.report.kernels] == [["sum", "gate", "silu"]]


def test_convert_graph_gives_the_model_that_calls_them() -> None:
    converted, made = native.convert_graph(_model()), native.generate(_model())
    product, kernel = converted.graph
    assert (product.op_type, kernel.domain, kernel.name) == ("MatMul", made.domain, made.report.kernels[0].node)
    assert set(converted.graph.initializers) == {"w", "b"}


def test_compile_is_both_steps_and_a_build() -> None:
    compiled = native.compile(_model())
    assert compiled.source == native.generate(_model()).source
    assert [n.op_type for n in compiled.model.graph] == [n.op_type for n in native.convert_graph(_model()).graph]


# The report


def test_the_report_says_what_became_of_every_node() -> None:
    report = native.compile(_model()).report
    (taken,), (left,) = report.kernels, report.left
    assert (report.nodes_before, report.nodes_after) == (4, 2)
    assert (taken.kernel, taken.nodes, taken.operators) == (
        "Kernel0",
        ["sum", "gate", "silu"],
        ["Add", "Sigmoid", "Mul"],
    )
    assert (left.node, left.operator, left.why) == ("product", "MatMul", "faster in onnxruntime")
    assert str(report).splitlines() == [
        "4 nodes → 2: 1 kernel in the place of 3 nodes",
        "kernels",
        "   1 × Kernel0: Add Sigmoid Mul",
        "left to onnxruntime",
        "   1 × MatMul: faster in onnxruntime",
    ]


# Measured


def test_measuring_tells_both_times_of_each_kernel_and_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        measure, "_rounds", lambda calls, least=1: [[len(call()) and 2e-3 / (i + 1) for i, call in enumerate(calls)]]
    )
    report = native.compile(_model(), measure={"x": _x(4)}).report
    assert [(taken.seconds_before, taken.seconds_after) for taken in report.kernels] == [(2e-3, 1e-3)]
    assert (report.seconds_before, report.seconds_after) == (2e-3, 1e-3)
    assert "2 ms → 1 ms, ×2.00" in str(report)


def test_a_kernel_that_is_slower_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_rounds", lambda calls, least=1: [[1e-3 * (i + 1) for i, _ in enumerate(calls)]])
    compiled = native.compile(_model(), measure=True)
    (taken,) = compiled.report.put_back
    assert (taken.operators, taken.why_not) == (["Add", "Sigmoid", "Mul"], "slower than the nodes")
    assert [node.op_type for node in compiled.model.graph] == ["MatMul", "Add", "Sigmoid", "Mul"]
    assert compiled.report.nodes_after == 4
    _agree(compiled, _model())


def test_one_slower_kernel_of_two_is_put_back_and_the_other_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [
        *(N("Exp", ["x"], ["a"]), N("Neg", ["a"], ["b"]), N("MatMul", ["b", "w"], ["c"])),
        *(N("Tanh", ["c"], ["d"]), N("Abs", ["d"], ["y"])),
    ]
    model = model_of(nodes, {"x": (F, ["n", 8])}, ["y"], {"w": np.eye(8, dtype="f")})
    times = iter([[1.0, 2.0], [2.0, 1.0], [2.0, 1.0], [2.0, 1.0]])
    monkeypatch.setattr(measure, "_rounds", lambda calls, least=1: [next(times)])
    compiled = native.compile(model, measure=True)
    assert [taken.operators for taken in compiled.report.kernels] == [["Tanh", "Abs"]]
    assert [taken.operators for taken in compiled.report.put_back] == [["Exp", "Neg"]]
    assert [left.operator for left in compiled.report.left] == ["MatMul"]
    assert (compiled.report.nodes_before, compiled.report.nodes_after) == (5, 4)
    _agree(compiled, model)


@pytest.mark.parametrize(
    ("alone", "shared"),
    [([2.0, 1.0], [1.0, 1.5]), ([2.0, 2.1], [1.0, 0.5]), ([1.0, 0.995], [1.0, 0.995])],
    ids=["slower with all threads", "slower with one", "as fast"],
)
def test_kernels_by_which_the_whole_model_does_not_gain_are_put_back(
    alone: list[float], shared: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([[2.0, 1.0], alone, shared])
    monkeypatch.setattr(measure, "_rounds", lambda calls, least=1: [next(times)])
    report = native.compile(_model(), measure=True).report
    assert report.put_back[0].why_not == compile_model._NOT_FASTER
    assert (report.kernels, report.seconds_after) == ([], 1.0)


def test_a_model_is_not_slower_for_what_disturbs_both_of_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = [[1.0, 0.9], [9.0, 8.9], [1.0, 9.0]]
    monkeypatch.setattr(measure, "_rounds", lambda calls, least=0: rounds if least else [[2.0, 1.0]])
    report = native.compile(_model(), measure=True).report
    assert [taken.operators for taken in report.kernels] == [["Add", "Sigmoid", "Mul"]]
    assert (report.seconds_before, report.seconds_after) == (1.0, 8.9)


def test_a_kernel_with_other_results_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "close", lambda found, expected: False)
    report = native.compile(_model(), measure=True).report
    assert report.put_back[0].why_not.startswith("y differs from onnxruntime by ")


def test_equal_kernels_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, last = [], "x"
    for i in range(3):
        nodes += [N("MatMul", [last, "w"], [f"a{i}"]), N("Exp", [f"a{i}"], [f"b{i}"]), N("Neg", [f"b{i}"], [f"c{i}"])]
        last = f"c{i}"
    model = model_of(nodes, {"x": (F, ["n", 8])}, [last], {"w": np.eye(8, dtype="f") / 8})
    lines: list[str] = []
    report = native.compile(model, measure=True, progress=lines.append).report
    assert len(report.kernels) + len(report.put_back) == 3
    assert [line for line in lines if line.startswith("measuring kernel")] == ["measuring kernel 1 of 3"]


def test_inputs_to_measure_with_are_checked() -> None:
    with pytest.raises(OptionError, match="measure has no input 'x'"):
        native.compile(_model(), measure={"z": _x(4)})
    with pytest.raises(OptionError, match="onnxruntime cannot run the model to measure it"):
        native.compile(_model(), measure={"x": _x(4).T})


# Without a compiler


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CXX", "/no/such/compiler")
    compiler.find.cache_clear()
    yield
    compiler.find.cache_clear()


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_compile_says_what_to_install() -> None:
    with pytest.raises(MissingDependency, match=r"no C\+\+ compiler found: CXX is '/no/such/compiler'") as caught:
        native.compile(_model())
    assert caught.value.hint == "install g++ or clang++, or set CXX"


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_auto_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    options = sardonyx.Options.of({"native": "auto"})
    for _ in range(2):
        assert native.native(ir.from_proto(_model()), options) is None
    assert len([record for record in caplog.records if "no native kernels" in record.message]) == 1


# Several in one process


def test_two_compiled_models_live_in_one_process() -> None:
    other = model_of([N("Exp", ["x"], ["a"]), N("Neg", ["a"], ["y"])], {"x": (F, ["n", 8])}, ["y"])
    first, second = native.compile(_model()), native.compile(other)
    assert first.report.kernels[0].kernel == second.report.kernels[0].kernel
    domains = [{node.domain for node in compiled.model.graph} - {""} for compiled in (first, second)]
    assert not domains[0] & domains[1]
    sessions = [first.session(), second.session()]
    for _ in range(2):
        for session, model in zip(sessions, (_model(), other), strict=True):
            feeds = {"x": _x(5)}
            np.testing.assert_allclose(session.run(None, feeds)[0], run(session_of(model), feeds)[0], rtol=1e-5)
