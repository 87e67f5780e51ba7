"""Declarations other than a kernel alone: compositions, operators that torch has already, and several in one model."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import onnx
import onnxruntime
import pytest
import torch

import sardonyx
from sardonyx.customop import CustomOp, library
from sardonyx.customop.shapes import ShapeRule
from sardonyx.customop.signature import parse

PLUS = """
static float shift() {{ return {shift}; }}
template <class T>
void {name}(In<T> x, Out<T> y, Parallel) {{
  for (int64_t i = 0; i < x.size(); ++i) y[i] = x[i] + shift();
}}
"""


def plus(name: str, shift: int) -> CustomOp:
    cpp = PLUS.format(name=name, shift=shift)
    return sardonyx.custom_op(f"declared::{name}(Tensor x) -> Tensor", cpp=cpp, dtypes=["float32"])


@pytest.fixture(scope="module")
def one() -> CustomOp:
    return plus("PlusOne", 1)


@pytest.fixture(scope="module")
def two() -> CustomOp:
    return plus("PlusTwo", 2)


@pytest.fixture(scope="module")
def gate() -> CustomOp:
    def backward(grad: torch.Tensor, x: torch.Tensor, slope: float) -> torch.Tensor:
        t = torch.tanh(slope * x)
        return grad * (t + slope * x * (1 - t * t))

    return sardonyx.custom_op(
        "declared::Gate(Tensor x, *, float slope=1.5) -> Tensor",
        onnx=lambda op, x, slope: op.Mul(x, op.Tanh(op.Mul(x, slope))),
        backward=backward,
    )


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    return torch.compile(function, backend="sardonyx", options={"fallback": "error", **options})


# Compositions


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_a_composition_computes_in_torch(gate: CustomOp, dtype: torch.dtype) -> None:
    x = torch.randn(3, 8).to(dtype)[:, ::2]
    expected = x.double() * torch.tanh(x.double() * 1.3)
    torch.testing.assert_close(gate(x, slope=1.3).double(), expected, atol=torch.finfo(dtype).eps * 4, rtol=0)


def test_a_composition_passes_opcheck_and_gradcheck(gate: CustomOp) -> None:
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(gate.operator, (x,))
    with torch.enable_grad():
        assert torch.autograd.gradcheck(gate, (x,))


def test_a_model_has_the_parts_of_a_composition(gate: CustomOp) -> None:
    x = torch.randn(2, 3)
    program = sardonyx.export(lambda x: gate(x), (x,), optimize="none", domains=())
    assert [node.op_type for node in program.model.graph] == ["Mul", "Tanh", "Mul"]
    torch.testing.assert_close(program(x), gate(x))
    torch.testing.assert_close(compiled(lambda x: gate(x) + 1)(x), gate(x) + 1)


def test_or_a_function_for_all_its_calls() -> None:
    kept = sardonyx.custom_op(
        "declared::Kept(Tensor x) -> Tensor", onnx=lambda op, x: op.Add(op.Sqrt(op.Abs(x)), 1.0), inline=False
    )
    x = torch.randn(2, 3)
    program = sardonyx.export(lambda x: kept(x) * kept(x * 2), (x,))
    assert [node.op_type for node in program.model.graph].count("Kept") == 2
    assert [(f.domain, f.name) for f in program.model.functions.values()] == [("declared", "Kept")]
    onnx.checker.check_model(program.proto(), full_check=True)
    session = onnxruntime.InferenceSession(program.proto().SerializeToString())
    torch.testing.assert_close(torch.from_numpy(session.run(None, {"x": x.numpy()})[0]), kept(x) * kept(x * 2))


def test_a_composition_has_no_library(gate: CustomOp) -> None:
    with pytest.raises(sardonyx.DeclarationError, match="declared::Gate is composed of ONNX operators"):
        gate.library  # noqa: B018


def test_a_composition_of_several_results_and_constants() -> None:
    op = sardonyx.custom_op(
        "declared::Halves(Tensor x, *, int axis=0) -> (Tensor a, Tensor b)",
        onnx=lambda op, x, axis: op.Split(op.Sub(x, op.constant([1.0])), axis=axis, num_outputs=2, outputs=2),
        shape=lambda x: ((x[0] // 2, *x[1:]), (x[0] // 2, *x[1:])),
        dtypes=["float32"],
    )
    x = torch.randn(4, 3)
    for got, expected in zip(op(x), (x - 1).chunk(2), strict=True):
        torch.testing.assert_close(got, expected)


# Operators of torch


def test_an_operator_of_torch_gets_a_side_in_onnx() -> None:
    foreign = torch.library.Library("foreign", "DEF")
    foreign.define("thrice(Tensor x, float more=0.0) -> Tensor")
    foreign.impl("thrice", lambda x, more=0.0: x * 3 + more, "CompositeExplicitAutograd")
    torch.library.register_fake("foreign::thrice", lambda x, more=0.0: torch.empty_like(x), lib=foreign)
    cpp = """
    template <class T> void thrice(In<T> x, Out<T> y, double more, Parallel) {
      for (int64_t i = 0; i < x.size(); ++i) y[i] = x[i] * 3 + more;
    }
    """
    op = sardonyx.custom_op(torch.ops.foreign.thrice, cpp=cpp, dtypes=["float32"])
    x = torch.randn(4)
    assert op.operator is torch.ops.foreign.thrice.default
    torch.testing.assert_close(compiled(lambda x: torch.ops.foreign.thrice(x, 2.0))(x), x * 3 + 2)
    op.close()
    torch.testing.assert_close(torch.ops.foreign.thrice(x), x * 3)  # torch keeps what was its own
    with pytest.raises(sardonyx.DeclarationError, match="has its own gradient"):
        sardonyx.custom_op(torch.ops.foreign.thrice, cpp=cpp, backward=lambda grad: grad)


# Several


def test_operators_of_one_domain_whose_kernels_share_a_name(one: CustomOp, two: CustomOp) -> None:
    x = torch.randn(5)
    torch.testing.assert_close(compiled(lambda x: two(one(x) * 2))(x), (x + 1) * 2 + 2)


def test_a_plain_session_takes_one_library_for_both(one: CustomOp, two: CustomOp) -> None:
    x = torch.randn(5)
    program = sardonyx.export(lambda x: two(one(x) * 2), (x,))
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(library(one, two)))
    session = onnxruntime.InferenceSession(program.proto().SerializeToString(), options)
    torch.testing.assert_close(torch.from_numpy(session.run(None, {"x": x.numpy()})[0]), (x + 1) * 2 + 2)


def test_the_wrapper_runs_it_for_many_sizes(one: CustomOp) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = one(self.linear(x))
            return result

    model = Model().eval()
    wrapped = sardonyx.compile(model, fallback="error")
    for rows in (2, 3, 4):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(wrapped(x), model(x))


def test_an_engine_without_custom_operators_leaves_it_to_torch(one: CustomOp, caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(3)
    run = torch.compile(lambda x: one(x) * 2, backend="sardonyx", options={"engine": "reference"})
    torch.testing.assert_close(run(x), (x + 1) * 2)
    assert "the engine 'reference' does not load custom operators" in caplog.text
    assert "test_declaration.py" in caplog.text  # the caller's line, and not one of this package


def test_a_name_that_onnx_has_too_leaves_its_reference_evaluator_alone() -> None:
    program = """
import sardonyx
sardonyx.custom_op("mine::MatMul(Tensor x) -> Tensor", python=lambda x: x + 0)
sardonyx.custom_op("yours::Same(Tensor x) -> Tensor", python=lambda x: x + 0)
sardonyx.custom_op("theirs::Same(Tensor x) -> Tensor", python=lambda x: x + 0)
import onnx.reference
print("imported")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "imported"


# Refusals


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "needs exactly one of cpp, python and onnx"),
        ({"cpp": "x", "python": lambda x: x}, "needs exactly one of cpp, python and onnx"),
        ({"python": lambda x: x, "cuda": "x"}, "has a kernel for the GPU and none for the CPU"),
        ({"onnx": lambda x: x}, "does not take op first"),
        ({"onnx": lambda op, z: z}, "takes 'z'"),
        ({"python": lambda x: x, "backward": lambda z: z}, "takes 'z'"),
        ({"cpp": "no_such_file.cpp"}, "cannot be read"),
    ],
)
def test_what_a_declaration_lacks_is_said(given: dict[str, Any], said: str) -> None:
    with pytest.raises(sardonyx.DeclarationError, match=said):
        sardonyx.custom_op("declared::Refused(Tensor x) -> Tensor", **given)
    assert not hasattr(torch.ops.declared, "Refused")


def test_an_operator_that_is_no_signature_is_refused() -> None:
    with pytest.raises(sardonyx.DeclarationError, match="the signature is a function"):
        sardonyx.custom_op(lambda x: x, python=lambda x: x)


# Names that are taken


def test_a_name_that_other_code_has_in_torch_is_refused_each_time_and_then_free() -> None:
    theirs = torch.library.Library("taken", "FRAGMENT")
    theirs.define("Op(Tensor x) -> Tensor")
    for _ in range(2):
        with pytest.raises(sardonyx.SardonyxError, match="torch rejects taken::Op"):
            sardonyx.custom_op("taken::Op(Tensor x) -> Tensor", python=lambda x: x + 1)
    assert not onnx.defs.has("Op", "taken")
    theirs._destroy()
    op = sardonyx.custom_op("taken::Op(Tensor x) -> Tensor", python=lambda x: x + 1)
    assert op(torch.ones(1)) == 2
    op.close()


def test_in_another_domain_it_replaces_the_one_of_its_name_in_torch() -> None:
    sardonyx.custom_op("taken::Moved(Tensor x) -> Tensor", python=lambda x: x + 1)
    op = sardonyx.custom_op("taken::Moved(Tensor x) -> Tensor", python=lambda x: x + 2, domain="elsewhere")
    assert torch.ops.taken.Moved(torch.ones(1)) == 3
    assert not onnx.defs.has("Moved", "taken")
    assert onnx.defs.has("Moved", "elsewhere")
    op.close()


def test_threads_that_declare_the_same_at_once_all_succeed() -> None:
    def declare(number: int) -> CustomOp:
        return sardonyx.custom_op("taken::Raced(Tensor x) -> Tensor", python=lambda x: x + number)

    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(declare, range(12)))
    assert float(torch.ops.taken.Raced(torch.zeros(1))) in range(12)
    for op in made:
        op.close()
    assert not hasattr(torch.ops.taken, "Raced")


@pytest.mark.parametrize("domain", ["дом", "house😀", 'a"b\\c'])
def test_a_domain_may_have_any_letters(domain: str) -> None:
    op = sardonyx.custom_op(
        "taken::Spelled(Tensor x) -> Tensor",
        cpp=PLUS.format(name="Spelled", shift=1),
        dtypes=["float32"],
        domain=domain,
    )
    program = sardonyx.export(lambda x: op(x), (torch.ones(2),))
    assert {node.domain for node in program.model.graph} == {domain}
    assert program(torch.ones(2)).tolist() == [2, 2]
    op.close()


# Modules that hold it


class _Holding(torch.nn.Module):
    def __init__(self, op: CustomOp) -> None:
        super().__init__()
        self.op = op

    def forward(self, x: torch.Tensor) -> Any:
        return self.op(x)


def test_a_module_that_holds_it_can_be_pickled_where_it_is_declared(one: CustomOp) -> None:
    again = pickle.loads(pickle.dumps(_Holding(one)))
    assert again.op is one
    assert again(torch.ones(1)) == 2


def test_elsewhere_it_is_named() -> None:
    op = sardonyx.custom_op("taken::Gone(Tensor x) -> Tensor", python=lambda x: x)
    written = pickle.dumps(op)
    op.close()
    with pytest.raises(
        sardonyx.SardonyxError, match=r"taken::Gone is not declared in this process\n.*import the module"
    ):
        pickle.loads(written)


# How much is written


def test_a_rule_over_lists_and_ranks_does_not_repeat_sizes() -> None:
    def joined(xs: Any) -> Any:
        rows = 0
        for x in xs:
            rows = rows + x[0]
        return (rows, *xs[0][1:])

    op = sardonyx.custom_op(
        "taken::Joined(Tensor[] xs) -> Tensor",
        cpp="""
        template <class T>
        void Joined(Ins<T> xs, Out<T> y, Parallel) {
          T* to = y.data();
          for (int64_t k = 0; k < xs.size(); ++k) to = std::copy(xs[k].begin(), xs[k].end(), to);
        }
        """,
        dtypes=["float32"],
        shape=joined,
    )
    rule = ShapeRule(parse("taken::Joined(Tensor[] xs) -> Tensor", ["float32"]), joined).cpp()
    assert max(map(len, rule.splitlines())) < 200, "a size is computed once, and named where it is used"
    xs = [torch.randn(n, 2, 3) for n in (1, 4, 2)]
    torch.testing.assert_close(op(xs), torch.cat(xs), rtol=0, atol=0)
    op.close()


def test_without_a_rule_tensors_that_may_be_absent_are_not_asked_for() -> None:
    op = sardonyx.custom_op(
        f"taken::Many(Tensor x, {', '.join(f'Tensor? x{i}' for i in range(14))}) -> Tensor",
        cpp=f"""
        template <class T>
        void Many(In<T> x, {", ".join(f"In<T> x{i}" for i in range(14))}, Out<T> y, Parallel) {{
          std::copy(x.begin(), x.end(), y.begin());
        }}
        """,
        dtypes=["float32"],
    )
    assert op(torch.ones(2)).tolist() == [1, 1]
    op.close()
