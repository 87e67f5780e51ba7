"""Bad input: an exception that names the operator and the cause, in torch and in ONNX Runtime. The process lives."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import helper

import sardonyx
from sardonyx.customop import CustomOp
from sardonyx.errors import DeclarationError, SardonyxError

from .operators import faulty, mix, model, node, run, scale, session, value, weigh


@pytest.fixture(autouse=True)
def alive() -> Iterator[None]:
    """After every failure the operators still work."""
    yield
    assert scale()(torch.ones(2)).tolist() == [2.0, 2.0]


# In torch

X, W = torch.randn(2, 3), torch.randn(3)
REFUSED: list[tuple[Callable[[], CustomOp], tuple[Any, ...], dict[str, Any], str]] = [
    (weigh, (X.half(), W.half()), {}, "tried::Weigh: x is float16, and can be float32, float64"),
    (weigh, (X, W.double()), {}, "tried::Weigh: weight is float64, and with what comes before it can be float32"),
    (weigh, (X, W[None]), {}, "tried::Weigh: weight has 2 dimensions, and must have 1"),
    (weigh, (X, W[:2]), {}, "tried::Weigh: there must be a weight for each column"),
    (weigh, (torch.zeros(()), W), {}, "tried::Weigh: it reads dimension -1 of a tensor of rank 0"),
    (weigh, (X,), {}, "missing value for argument 'weight'"),
    (weigh, (X, W, W), {}, "expected at most 2 argument"),
    (weigh, (X.to(torch.complex64), W), {}, "tried::Weigh: x is of a type that has no kernels"),
    (weigh, (torch.zeros([1] * 17), W), {}, "tried::Weigh: a tensor has more than 16 dimensions"),
    (mix, (W, 2, []), {}, "tried::Mix: its shape rule reads tensor 0 of a list of 0"),
    (mix, (None, 2, [W, W.double()]), {}, "tried::Mix: more has tensors of different types"),
    (mix, (None, 2, [W, W]), {"unheard": 1}, "Unknown keyword argument 'unheard'"),
    (mix, (None, "two", [W]), {}, "argument 'by'"),
    (mix, (None, 2, [W], "product"), {}, "tried::Mix: the mode product is unknown"),
    (scale, (X,), {"factor": "much"}, "argument 'factor'"),
]


@pytest.mark.parametrize(("op", "args", "kwargs", "message"), REFUSED)
def test_torch_refuses_a_bad_call(op: Callable[[], CustomOp], args: Any, kwargs: Any, message: str) -> None:
    with pytest.raises(RuntimeError) as caught:
        op()(*args, **kwargs)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((X.half(), W.half()), "tried::Weigh: x is float16, and can be float32, float64"),
        ((X, W.double()), "tried::Weigh: weight is float64, and can be float32"),
        ((X, W[None]), "tried::Weigh: weight has 2 dimensions, and must have 1"),
    ],
)
def test_a_bad_call_is_refused_while_it_is_traced_too(args: Any, message: str) -> None:
    with torch._subclasses.FakeTensorMode() as mode, pytest.raises((TypeError, ValueError), match=message):
        weigh()(*(mode.from_tensor(x) for x in args))


# In ONNX Runtime


def mixing(*inputs: str, **attributes: Any) -> onnx.ModelProto:
    nodes = [node(mix(), list(inputs), ["s", "f", "c"], **attributes)]
    return model(nodes, [value("x", ["n"])], [value("s"), value("f"), value("c", None, 7)])


NO_LIST = onnx.AttributeProto(name="axes", type=onnx.AttributeProto.FLOATS, floats=[1.5])
IN_A_MODEL: list[tuple[Callable[[], onnx.ModelProto], str]] = [
    (lambda: mixing("", "x"), "tried::Mix: the attribute by is missing"),
    (lambda: mixing("", "x", by=2.5), "tried::Mix: the attribute by is not of type int"),
    (lambda: mixing("", "x", by="2"), "tried::Mix: the attribute by is not of type int"),
    (lambda: mixing("", "x", by=[2]), "tried::Mix: the attribute by is not of type int"),
    (lambda: mixing("", "x", by=2, mode=3), "tried::Mix: the attribute mode is not of type string"),
    (lambda: mixing("", "x", by=2, flip=1.0), "tried::Mix: the attribute flip is not of type int"),
    (lambda: mixing("", "x", by=2, axes=4), "tried::Mix: the attribute axes is not of type list of ints"),
    (lambda: mixing("", "x", by=2, axes=NO_LIST), "tried::Mix: the attribute axes is not of type list of ints"),
    (lambda: mixing("", "x", by=2, offsets=[1, 2]), "tried::Mix: the attribute offsets is not of type list of floats"),
    (lambda: mixing("", "x", by=2, offsets="none"), "tried::Mix: the attribute offsets is not of type list of floats"),
    (lambda: mixing("", by=2), "Mix"),
    (lambda: mixing("x", "", by=2), "Mix"),
    (lambda: weighing(10, 10), "Weigh"),
    (lambda: weighing(1, 11), "Weigh"),
]


def weighing(x: int, weight: int, shape: Any = None) -> onnx.ModelProto:
    nodes = [node(weigh(), ["x", "w"], ["y"])]
    return model(nodes, [value("x", shape, x), value("w", None, weight)], [value("y", None, x)])


@pytest.mark.parametrize(("make", "message"), IN_A_MODEL)
def test_a_session_refuses_a_bad_model(make: Callable[[], onnx.ModelProto], message: str) -> None:
    with pytest.raises(Exception, match="ONNXRuntimeError") as caught:
        run(make(), W)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("proto", "given", "message"),
    [
        (lambda: weighing(1, 1), (X, W[None]), "tried::Weigh: weight has 2 dimensions, and must have 1"),
        (lambda: weighing(1, 1), (X, W[:2]), "tried::Weigh: there must be a weight for each column"),
        (lambda: weighing(1, 1), (torch.zeros([1] * 17), W), "dimensions"),
        (lambda: mixing("", "x", by=2, mode="product"), (W,), "tried::Mix: the mode product is unknown"),
        (lambda: mixing("", *["x"] * 64, by=2), (W,), "tried::Mix: it has 65 tensors, more than 64"),
    ],
)
def test_a_session_refuses_a_bad_call(proto: Callable[[], onnx.ModelProto], given: Any, message: str) -> None:
    with pytest.raises(Exception, match="ONNXRuntimeError") as caught:
        run(proto(), *given)
    assert message in str(caught.value)


# Kernels that fail

FAULTS = {
    "text": "it says so",
    "exception": "thrown on purpose",
    "int": "the kernel threw something that is not a std::exception",
    "failed": "failed on purpose",
    "dimension": "it reads dimension 9 of a tensor of rank 1",
    "in parallel": "thrown inside",
    "int in parallel": "the kernel threw something that is not a std::exception",
    "not resized": "the kernel did not resize open, whose sizes the shape rule leaves to it",
    "resized to another rank": "result 1 is resized to (1, 2), and the shape rule says (?)",
    "resized to another size": "result 0 is resized to (77), and the shape rule says (3)",
    "resized to less than nothing": "result 1 is resized to (-5), and the shape rule says (?)",
}


def faults(how: str, size: int = 3) -> onnx.ModelProto:
    return model([node(faulty(), ["x"], ["y", "z"], how=how, size=size)], [value("x", ["n"])], [value("y"), value("z")])


@pytest.mark.parametrize("how", FAULTS)
def test_a_kernel_that_fails_in_torch(how: str) -> None:
    for _ in range(3):
        with pytest.raises(RuntimeError) as caught:
            faulty()(torch.ones(3), how)
        assert str(caught.value).splitlines()[0] == f"tried::Faulty: {FAULTS[how]}"
    assert faulty()(torch.ones(3), "not")[0].tolist() == [1.0] * 3


@pytest.mark.parametrize("how", FAULTS)
def test_a_kernel_that_fails_in_onnx_runtime(how: str) -> None:
    made = session(faults(how))
    for _ in range(3):
        with pytest.raises(Exception, match="ONNXRuntimeError") as caught:
            made.run(None, {"x": torch.ones(3).numpy()})
        assert f"tried::Faulty: {FAULTS[how]}" in str(caught.value)
    assert run(faults("not"), torch.ones(3))[0].tolist() == [1.0] * 3


def test_every_dtype_that_would_do_is_listed() -> None:
    op = sardonyx.custom_op(
        "faulty::Whole(Tensor x) -> Tensor",
        cpp="template <class T> void Whole(In<T> x, Out<T> y, Parallel) { y[0] = x[0]; }",
        dtypes=["uint8", "int8", "bfloat16", "float16"],
    )
    with pytest.raises(RuntimeError, match="x is int64, and can be uint8, int8, bfloat16, float16"):
        op(torch.ones(1, dtype=torch.int64))
    op.close()


def test_a_kernel_in_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kernel.cpp").write_bytes(b"// \xff\n")
    with pytest.raises(sardonyx.SardonyxError, match="faulty::File: the kernel's source cannot be read"):
        sardonyx.custom_op("faulty::File(Tensor x) -> Tensor", cpp=tmp_path / "kernel.cpp")


def test_a_shape_rule_that_gives_a_negative_size() -> None:
    message = "tried::Faulty: its shape rule gives y the size -1 in dimension 0"
    with pytest.raises(RuntimeError, match=message):
        faulty()(torch.ones(3), "not", size=-1)
    with pytest.raises(Exception, match=message):
        run(faults("not", -1), torch.ones(3))
    with pytest.raises(ValueError, match=message):
        faulty()(torch.ones(3, device="meta"), "not", size=-1)


def test_sizes_that_no_memory_has() -> None:
    with pytest.raises(RuntimeError, match="tried::Faulty"):
        faulty()(torch.ones(3), "not", size=2**60)
    with pytest.raises(Exception, match="Faulty"):
        run(faults("not", 2**60), torch.ones(3))


# Declarations

COPY = "template <class T> void Op(In<T> x, Out<T> y, Parallel) { std::copy(x.begin(), x.end(), y.begin()); }"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "needs exactly one of cpp, python and onnx"),
        ({"cpp": COPY, "python": lambda x: x}, "needs exactly one of cpp, python and onnx"),
        ({"cpp": COPY, "shape": lambda y: y}, "the shape rule takes 'y'"),
        ({"cpp": COPY, "shape": lambda x: (x[0] / 2,)}, "bad::Op: the shape rule cannot be translated to C++"),
        ({"cpp": COPY, "backward": lambda grad, z: grad}, "the backward of bad::Op takes 'z'"),
        ({"cpp": COPY, "dtypes": ["complex64"]}, "is not a dtype that kernels support"),
        ({"cpp": Path("/nowhere/kernel.cpp")}, "bad::Op: the kernel's source cannot be read"),
    ],
)
def test_a_declaration_that_cannot_be_used(given: dict[str, Any], message: str) -> None:
    with pytest.raises(DeclarationError) as caught:
        sardonyx.custom_op("bad::Op(Tensor x) -> Tensor", **given)
    assert message in str(caught.value)
    assert not hasattr(torch.ops.bad, "Op")


def test_a_tensor_by_name_alone_cannot_have_a_gradient() -> None:
    with pytest.raises(DeclarationError, match="put them before the star"):
        sardonyx.custom_op(
            "bad::Named(Tensor x, *, Tensor? y=None) -> Tensor",
            python=lambda x, y: x,
            backward=lambda grad: (grad, None),
        )
    assert not hasattr(torch.ops.bad, "Named")


@pytest.mark.parametrize(
    ("backward", "message"),
    [
        (lambda grad: grad, "its backward returns 1 of 2 gradients"),
        (lambda grad: (grad, grad, grad), "its backward returns 3 of 2 gradients"),
        (lambda grad: {"z": grad}, r"its backward returns gradients for unknown tensors \['z'\]"),
    ],
)
def test_a_backward_that_gives_too_few_or_too_many(backward: Any, message: str) -> None:
    op = sardonyx.custom_op("bad::Sum(Tensor x, Tensor y) -> Tensor", python=lambda x, y: x + y, backward=backward)
    with torch.enable_grad(), pytest.raises(RuntimeError, match=message):
        op(torch.ones(2, requires_grad=True), torch.ones(2)).sum().backward()
    op.close()


# C++ that does not compile


def compiler_says(**given: Any) -> str:
    with pytest.raises(SardonyxError) as caught:
        sardonyx.custom_op("bad::Op(Tensor<float32> x) -> Tensor<float32>", **given)
    return str(caught.value)


def test_an_error_in_a_string_is_shown_at_its_line_of_the_python_file() -> None:
    line = sys._getframe().f_lineno + 4
    said = compiler_says(
        cpp="""
        void Op(In<float> x, Out<float> y, Parallel) {
          y[0] = undeclared;
        }
        """
    )
    assert f"{__file__}:{line}:" in said
    assert "undeclared" in said


def test_an_error_in_a_file_is_shown_at_its_line(tmp_path: Path) -> None:
    (tmp_path / "kernel.cpp").write_text("\n\nvoid Op(In<float> x, Out<float> y, Parallel) { y[0] = undeclared; }\n")
    for given in (tmp_path / "kernel.cpp", str(tmp_path / "kernel.cpp")):
        assert f"{tmp_path / 'kernel.cpp'}:3:" in compiler_says(cpp=given)


def test_an_error_in_a_string_from_nowhere_is_shown_at_its_line_of_the_kernel() -> None:
    made = "\n".join(["void Op(In<float> x, Out<float> y, Parallel) {", "  y[0] = un" + "declared;", "}"])
    assert "the kernel of bad::Op:2:" in compiler_says(cpp=made)


@pytest.mark.parametrize(
    "kernel", ["void Op(In<float> x, Out<float> y) {}", "void Other(In<float> x, Out<float> y) {}"]
)
def test_a_kernel_of_other_parameters_is_told_what_is_expected(kernel: str) -> None:
    assert "void Op(In<float> x, Out<float> output, Parallel parallel)" in compiler_says(cpp=kernel)


def test_names_that_c_has_too_are_no_trouble() -> None:
    op = sardonyx.custom_op(
        'bad::round(Tensor<float32> x, *, int[] inputs=[1], int[] fields=[2], str order="a\'\\"b") -> Tensor<float32>',
        cpp="""
        void round(In<float> x, Out<float> y, List<int64_t> inputs, List<int64_t> fields, std::string_view order,
                   Parallel) { y[0] = x[0] + inputs[0] * 10 + fields[0] * 100 + order.size() * 1000; }
        """,
    )
    assert op(torch.ones(1)).tolist() == [4211.0]
    proto = model([node(op, ["x"], ["y"])], [value("x", [1])], [value("y")])
    assert run(proto, torch.ones(1))[0].tolist() == [4211.0]
    op.close()


def test_a_model_with_an_operator_that_is_not_declared_names_it() -> None:
    unheard = helper.make_node("Unheard", ["x"], ["y"], domain="tried")
    with pytest.raises(Exception, match="Unheard"):
        session(model([unheard], [value("x", [1])], [value("y")]))
