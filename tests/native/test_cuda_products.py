"""Matrix products on CUDA: which nodes become one of our own; tests/run/test_cuda.py runs them."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
import pytest

from sardonyx.native import cuda_matrix_products, cuda_products
from sardonyx.options import Options
from tests.optimize.rewriting import model_of

QKV = """g (float16[2,4,64] x, float16[64,32] a, float16[64,32] b, float16[64,16] c, float16[32] d, float16[16] e)
    => (float16[2,4,32] q, float16[2,4,32] k, float16[2,4,16] v)
    { p = MatMul(x, a) q = Add(p, d) k = MatMul(x, b) r = MatMul(x, c) v = Add(e, r) }"""


def replaced(text: str) -> ir.Model:
    model = model_of(text)
    cuda_matrix_products(model, Options.of({"native": True}))
    return model


def operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


def names(values: Sequence[ir.Value | None]) -> list[str | None]:
    return [value.name if value is not None else None for value in values]


def test_products_of_one_operand_become_one_node_with_their_biases() -> None:
    model = replaced(QKV)
    (node,) = model.graph
    assert (node.domain, node.op_type) == ("sardonyx.cuda", "ProductsFloat16")
    assert names(node.inputs) == ["x", "a", "d", "b", "c", "e"]
    assert names(node.outputs) == names(model.graph.outputs) == ["q", "k", "v"]
    assert list(node.attributes["transposed"].as_ints()) == [0, 0, 0]
    assert list(node.attributes["biased"].as_ints()) == [1, 0, 1]
    assert model.graph.opset_imports["sardonyx.cuda"] == 1


def test_a_gemm_takes_its_own_bias_and_a_transposed_weight() -> None:
    (node,) = replaced(
        """g (bfloat16[4,64] x, bfloat16[32,64] w, bfloat16[32] b) => (bfloat16[4,32] y)
        { y = Gemm<transB=1>(x, w, b) }"""
    ).graph
    assert node.op_type == "ProductsBfloat16"
    assert list(node.attributes["transposed"].as_ints()) == list(node.attributes["biased"].as_ints()) == [1]


def test_more_products_than_a_node_takes_become_two() -> None:
    weights = ", ".join(f"float16[64,8] w{i}" for i in range(5))
    results = ", ".join(f"float16[4,8] y{i}" for i in range(5))
    products = " ".join(f"y{i} = MatMul(x, w{i})" for i in range(5))
    model = replaced(f"g (float16[4,64] x, {weights}) => ({results}) {{ {products} }}")
    assert [len(node.outputs) for node in model.graph] == [4, 1]


def test_a_product_that_is_cast_to_float32_is_not_rounded_first() -> None:
    model = replaced(
        """g (float16[4,64] x, float16[64,32] a, float16[64,32] b) => (float[4,32] y, float16[4,32] z)
        { p = MatMul(x, a) y = Cast<to=1>(p) z = MatMul(x, b) }"""
    )
    wide, narrow = model.graph
    assert (wide.op_type, narrow.op_type) == ("ProductsFloat16ToFloat32", "ProductsFloat16")
    assert (names(wide.outputs), names(narrow.outputs)) == (["y"], ["z"])


def test_a_product_whose_result_is_read_elsewhere_is_added_to_by_its_own_node() -> None:
    model = replaced(
        """g (float16[4,64] x, float16[64,32] w, float16[32] b) => (float16[4,32] p, float16[4,32] y)
        { p = MatMul(x, w) y = Add(p, b) }"""
    )
    assert operators(model) == ["ProductsFloat16", "Add"]


@pytest.mark.parametrize(
    "text",
    [
        "g (float[4,64] x, float[64,32] w) => (float[4,32] y) { y = MatMul(x, w) }",
        "g (float16[4,60] x, float16[60,32] w) => (float16[4,32] y) { y = MatMul(x, w) }",
        "g (float16[2,4,64] x, float16[2,64,32] w) => (float16[2,4,32] y) { y = MatMul(x, w) }",
        "g (float16[64,4] x, float16[64,32] w) => (float16[4,32] y) { y = Gemm<transA=1>(x, w) }",
        "g (float16[4,64] x, float16[64,32] w) => (float16[4,32] y) { y = Gemm<alpha=2.0>(x, w) }",
        "g (float16[4,64] x, float16[64,32] w, float16[4,32] c) => (float16[4,32] y) { y = Gemm(x, w, c) }",
        "g (float16[4,64] x, float16[64,32] w) => (float16[4,32] y) { v = Neg(w) y = MatMul(x, v) }",
        "g (float16[64] x, float16[64,32] w) => (float16[32] y) { y = MatMul(x, w) }",
    ],
    ids=["float32", "size", "batches", "transposed", "scaled", "addend", "computed weight", "vector"],
)
def test_other_products_stay(text: str) -> None:
    model = replaced(text)
    assert not any(node.domain for node in model.graph)


def test_an_addend_that_is_no_row_stays_an_addition() -> None:
    model = replaced(
        """g (float16[4,64] x, float16[64,32] w, float16[4,32] z) => (float16[4,32] y)
        { p = MatMul(x, w) y = Add(p, z) }"""
    )
    assert operators(model) == ["ProductsFloat16", "Add"]


def test_without_a_compiler_the_model_stays_and_only_a_request_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(options: Options) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(cuda_products, "_build", missing)
    model = model_of(QKV)
    assert cuda_matrix_products(model, Options.of({})) is None
    assert operators(model) == operators(model_of(QKV))
    with pytest.raises(RuntimeError, match="no compiler"):
        cuda_matrix_products(model, Options.of({"native": True}))
