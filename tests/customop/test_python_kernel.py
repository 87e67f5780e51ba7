"""Kernels that are Python functions: the same operator, slower, in torch and in ONNX Runtime."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

import sardonyx
from sardonyx.customop import CustomOp

from .operators import model, node, run, session, value


@pytest.fixture(scope="module")
def mixed() -> CustomOp:
    """Everything that a signature can have, given back as numbers."""

    def function(**given: Any) -> Any:
        bias, more = given["bias"], given["more"]
        total = sum(more, torch.zeros_like(more[0])) if bias is None else sum(more, bias)
        told = [given["i"], given["f"], given["b"], len(given["s"]), sum(given["l"]), sum(given["r"])]
        return total, torch.tensor(told, dtype=torch.float64), total[total > 0]

    return sardonyx.custom_op(
        "python::Mixed(Tensor? bias, Tensor[] more, *, int i=1, float f=0.5, bool b=False, str s='', int[] l=[], "
        "float[] r=[0.25]) -> (Tensor total, Tensor<float64, 1> told, Tensor positive)",
        python=function,
        shape=lambda more: (more[0], (6,), (None,)),
        dtypes=["float32", "int64", "bool"],
    )


def mixing(mixed: CustomOp, *inputs: str, dtype: int = 1, **attributes: Any) -> onnx.ModelProto:
    outputs = [value("a", None, dtype), value("b", None, 11), value("c", None, dtype)]
    given = [value(name, None, dtype) for name in dict.fromkeys(n for n in inputs if n)]
    return model([node(mixed, list(inputs), ["a", "b", "c"], **attributes)], given, outputs)


@pytest.mark.parametrize(("number", "dtype"), [(1, torch.float32), (7, torch.int64)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_session_gives_what_torch_gives(mixed: CustomOp, number: int, dtype: torch.dtype, bias: bool) -> None:
    x, y = torch.tensor([[1, -2, 3]]).to(dtype), torch.tensor([[5, -6, 7]]).to(dtype)
    attributes = {"i": -3, "f": 0.125, "b": 1, "s": "zwölf", "l": [4, 5], "r": [0.5, 8.0]}
    proto = mixing(mixed, "y" if bias else "", "x", "y" if bias else "x", dtype=number, **attributes)
    expected = mixed(y if bias else None, [x, y if bias else x], **(attributes | {"b": True}))
    found = run(proto, *([y, x] if bias else [x]))
    assert [t.tolist() for t in found] == [t.tolist() for t in expected]
    assert expected[1].tolist() == [-3, 0.125, 1, 5, 9, 8.5]


def test_defaults_empty_tensors_and_tensors_without_dimensions(mixed: CustomOp) -> None:
    for x in (torch.zeros(0, 2), torch.tensor(3.0)):
        found, expected = run(mixing(mixed, "", "x"), x), mixed(None, [x])
        assert [t.shape for t in found] == [t.shape for t in expected]
        assert found[1].tolist() == [1, 0.5, 0, 0, 0, 0.25]


def test_torchs_own_check_finds_nothing_wrong(mixed: CustomOp) -> None:
    found = torch.library.opcheck(mixed.operator, (None, [torch.randn(3)]))
    assert set(found.values()) == {"SUCCESS"}


def test_compiled_and_exported(mixed: CustomOp) -> None:
    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return mixed(x, [x * 2])[0] + 1

    x = torch.randn(4)
    compiled = torch.compile(Module(), backend="sardonyx", fullgraph=True, options={"fallback": "error"})
    torch.testing.assert_close(compiled(x), x * 3 + 1)
    torch.testing.assert_close(sardonyx.export(Module(), (x,), dynamic_shapes=({0: "n"},))(x[:2]), x[:2] * 3 + 1)


def test_from_four_threads_at_once(mixed: CustomOp) -> None:
    made = session(mixing(mixed, "", "x"))
    wrong: list[int] = []

    def work(number: int) -> None:
        x = torch.full((5,), float(number))
        results = [made.run(None, {"x": x.numpy()})[0] for _ in range(50)]
        wrong.extend(number for result in results if result.tolist() != x.tolist())

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_names_such_as_self_are_no_trouble() -> None:
    op = sardonyx.custom_op(
        "python::Names(Tensor self, Tensor g, *, int dtype=2, int domain=3) -> Tensor",
        python=lambda self, g, dtype, domain: self * dtype + g * domain,
        backward=lambda grad, dtype, domain: (grad * dtype, grad * domain),
    )
    x = torch.ones(2)
    assert op(self=x, g=x, dtype=5).tolist() == [8.0, 8.0]
    compiled = torch.compile(lambda x: op(self=x, g=x * 2), backend="sardonyx", options={"fallback": "error"})
    assert compiled(x).tolist() == [8.0, 8.0]
    with torch.enable_grad():
        leaf = torch.ones(2, requires_grad=True)
        op(leaf, leaf).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [5.0, 5.0]
    op.close()


def test_what_it_was_given_it_gives_as_a_copy() -> None:
    op = sardonyx.custom_op(
        "python::Same(Tensor x) -> (Tensor, Tensor, Tensor)",
        python=lambda x: (x, x.view(-1), x[1:]),
        shape=lambda x: (x, x, (1,)),
    )
    x = torch.ones(2)
    results = op(x)
    for result in results:
        result.zero_()
    assert x.tolist() == [1.0, 1.0]
    assert [r.tolist() for r in results] == [[0.0, 0.0], [0.0, 0.0], [0.0]]
    op.close()


# What goes wrong


def fails(x: torch.Tensor) -> torch.Tensor:
    raise KeyError("ö" * 5000)


WRONG = {
    "raises": (lambda x: x.unheard, "no attribute 'unheard'"),
    "says a lot": (fails, "KeyError: 'öööö"),
    "another shape": (lambda x: x[:-1], r"returns output with shape \(2,\), and the shape rule says \(3,\)"),
    "another rank": (lambda x: x[None], r"returns output with shape \(1, 3\), and the shape rule says \(3,\)"),
    "another dtype": (lambda x: x.double(), "returns output as torch.float64, and the signature says torch.float32"),
    "no tensor": (lambda x: 3.0, "does not return 1 tensors"),
    "two tensors": (lambda x: (x, x), "does not return 1 tensors"),
}


@pytest.fixture(params=WRONG)
def wrong(request: pytest.FixtureRequest) -> Iterator[tuple[CustomOp, str, str]]:
    function, message = WRONG[request.param]
    op = sardonyx.custom_op("python::Wrong(Tensor<float32> x) -> Tensor<float32>", python=function)
    yield op, request.param, message
    op.close()


def test_a_function_that_goes_wrong_in_torch(wrong: tuple[CustomOp, str, str]) -> None:
    op, name, message = wrong
    raised: Any = {"raises": AttributeError, "says a lot": KeyError}.get(name, RuntimeError)
    with pytest.raises(raised, match=message.removeprefix("KeyError: ")):
        op(torch.ones(3))


def test_a_function_that_goes_wrong_in_onnx_runtime(wrong: tuple[CustomOp, str, str]) -> None:
    op, _, message = wrong
    made = session(model([node(op, ["x"], ["y"])], [value("x", [3])], [value("y")]))
    for _ in range(2):
        with pytest.raises(Exception, match=f"python::Wrong: .*{message}"):
            made.run(None, {"x": torch.ones(3).numpy()})


def test_tensors_of_a_wrong_type_do_not_reach_it(mixed: CustomOp) -> None:
    with pytest.raises(TypeError, match="python::Mixed: more is float64, and can be float32, int64, bool"):
        mixed(None, [torch.ones(2).double()])
    with pytest.raises(TypeError, match="python::Mixed: more is int64, and can be float32"):
        mixed(torch.ones(2), [torch.ones(2).long()])
    with pytest.raises(IndexError):  # of the shape rule, which asks for the first
        mixed(torch.ones(2), [])


def test_a_process_that_has_not_declared_it_is_told(mixed: CustomOp, tmp_path: Path) -> None:
    onnx.save(mixing(mixed, "", "x"), tmp_path / "model.onnx")
    program = f"""
import numpy, onnxruntime
options = onnxruntime.SessionOptions()
options.log_severity_level = 4
options.register_custom_ops_library({str(mixed.library)!r})
session = onnxruntime.InferenceSession({str(tmp_path / "model.onnx")!r}, options)
session.run(None, {{"x": numpy.ones(3, numpy.float32)}})
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "python::Mixed: its kernel is a Python function, and it is not declared in this process" in done.stderr
    assert done.returncode == 1
