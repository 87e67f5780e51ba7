"""A list of tensors may be empty: in torch, in ONNX, in sessions and compiled."""

from __future__ import annotations

from typing import Any

import onnx
import pytest
import torch

import sardonyx
from sardonyx.customop import CustomOp
from sardonyx.errors import DeclarationError

from .operators import model, node, run, value

DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "bool")


@pytest.fixture(scope="module")
def total() -> CustomOp:
    """The sum of tensors, to which a first one that may be absent is added."""
    return sardonyx.custom_op(
        "listed::Total(Tensor? x, Tensor[] more, *, int size=2) -> (Tensor sum, Tensor<int64> count)",
        cpp="""
        template <class T>
        void Total(In<T> x, Ins<T> more, Out<T> sum, Out<int64_t> count, int64_t, Parallel) {
          for (int64_t i = 0; i < sum.size(); ++i) {
            Wide<T> total = x ? Wide<T>(x[i]) : Wide<T>(0);
            for (int64_t k = 0; k < more.size(); ++k) total = total + Wide<T>(more[k][i]);
            sum[i] = T(total);
          }
          count[0] = more.size();
        }
        """,
        shape=lambda x, more, size: (more[0] if more else (size,) if x is None else x, (1,)),
        dtypes=DTYPES,
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_in_torch_in_every_dtype(total: CustomOp, dtype: str) -> None:
    x = torch.ones(3).to(getattr(torch, dtype))
    found, count = total(x, [])
    assert (found.tolist(), found.dtype, count.tolist()) == (x.tolist(), x.dtype, [0])
    assert total(None, [x, x])[1].tolist() == [2]


def test_without_any_tensor_the_first_dtype_is_taken(total: CustomOp) -> None:
    found, _ = total(None, [], size=4)
    assert (found.tolist(), found.dtype) == ([0.0] * 4, torch.float32)


@pytest.mark.parametrize("args", [(torch.ones(3), []), (None, []), (None, [torch.ones(3)])])
def test_torchs_own_check_finds_nothing_wrong(total: CustomOp, args: tuple[Any, ...]) -> None:
    assert set(torch.library.opcheck(total.operator, args).values()) == {"SUCCESS"}


@pytest.mark.parametrize("count", [0, 1])
def test_in_a_session(total: CustomOp, count: int) -> None:
    names = [f"m{i}" for i in range(count)]
    nodes = [node(total, ["x", *names], ["s", "n"])]
    proto = model(nodes, [value(name, ["k"]) for name in ("x", *names)], [value("s", ["k"]), value("n", [1], 7)])
    onnx.checker.check_model(proto, full_check=True)
    found = run(proto, *[torch.ones(3)] * (count + 1))
    assert [x.tolist() for x in found] == [[1.0 + count] * 3, [count]]


def test_exported_and_compiled(total: CustomOp) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return total(x, [])[0] + total(None, [], size=3)[0] + total(x, [x])[0]

    x, expected = torch.ones(3), [3.0] * 3
    assert sardonyx.export(Model(), (x,))(x).tolist() == expected
    assert torch.compile(Model(), backend="sardonyx", options={"fallback": "error"})(x).tolist() == expected


def test_by_torchs_exporter(total: CustomOp) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return total(x, [])[0] + total(x, [x])[0]

    x = torch.ones(3)
    made = torch.onnx.export(Model(), (x,), dynamo=True, custom_translation_table=total.translations, verbose=False)
    assert made is not None
    assert run(made.model_proto, x)[0].tolist() == [3.0] * 3


def test_a_composition_and_a_python_function_are_given_an_empty_list() -> None:
    def composed(op: Any, x: Any, more: Any) -> Any:
        return op.Sum(x, *more)

    composition = sardonyx.custom_op("listed::Composed(Tensor x, Tensor[] more) -> Tensor", onnx=composed)
    function = sardonyx.custom_op(
        "listed::Called(Tensor x, Tensor[] more) -> Tensor", python=lambda x, more: sum(more, x + 0)
    )
    x = torch.ones(2)
    for op in (composition, function):
        assert op(x, []).tolist() == [1.0, 1.0]
        assert sardonyx.export(lambda x, op=op: op(x, []) + op(x, [x]), (x,))(x).tolist() == [3.0, 3.0]


def test_gradients_of_an_empty_list() -> None:
    op = sardonyx.custom_op(
        "listed::Scaled(Tensor x, Tensor[] more) -> Tensor",
        python=lambda x, more: sum(more, x * 3),
        backward=lambda grad, more: (grad * 3, [grad for _ in more]),
    )
    with torch.enable_grad():
        for more in ([], [torch.ones(2, requires_grad=True)]):
            x = torch.ones(2, requires_grad=True)
            op(x, more).sum().backward()
            assert x.grad is not None
            assert x.grad.tolist() == [3.0, 3.0]
            assert all(y.grad.tolist() == [1.0, 1.0] for y in more)


def test_a_list_of_tensors_that_may_be_absent_is_refused() -> None:
    with pytest.raises(DeclarationError, match=r"xs has the type 'Tensor\?\[\]'"):
        sardonyx.custom_op("listed::Refused(Tensor?[] xs) -> Tensor", python=lambda xs: xs[0], shape=lambda xs: xs[0])
