"""Matrix products on CUDA: which nodes become one of our own, and what these compute, on the CPU.

They run under an imitation of cuBLASLt; tests/run/test_cuda.py runs them on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from sardonyx.errors import MissingDependency
from sardonyx.native import cuda_matrix_products, cuda_products
from sardonyx.native.partition import Library, plan_kernels
from sardonyx.native.targets import TARGETS
from sardonyx.optimize.optimizer import optimize
from sardonyx.options import Options
from sardonyx.toolchain import compiler
from sardonyx.toolchain.headers import read_header
from tests.native.running import Feeds, run, session_of
from tests.optimize.rewriting import CUDA_DOMAINS, model_of

QKV = """g (float16[2,4,64] x, float16[64,32] a, float16[64,32] b, float16[64,16] c, float16[32] d, float16[16] e)
    => (float16[2,4,32] q, float16[2,4,32] k, float16[2,4,16] v)
    { p = MatMul(x, a) q = Add(p, d) k = MatMul(x, b) r = MatMul(x, c) v = Add(e, r) }"""


def replaced(text: str, *, kernels: bool = False, native: bool | str = True) -> ir.Model:
    model = model_of(text)
    for node in model.graph:
        node.name = node.outputs[0].name
    cuda_matrix_products(model, Options.of({"native": native}), kernels=kernels)
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
    assert list(node.attributes["added"].as_ints()) == [0, 0, 0]
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
        "g (float16[4,64] x, float16[64,32] w, float16[4,1] c) => (float16[4,32] y) { y = Gemm(x, w, c) }",
        "g (float16[4,64] x, float16[64,32] w) => (float16[4,32] y) { v = Neg(w) y = MatMul(x, v) }",
        "g (float16[64] x, float16[64,32] w) => (float16[32] y) { y = MatMul(x, w) }",
    ],
    ids=["float32", "size", "batches", "transposed", "scaled", "addend", "computed weight", "vector"],
)
def test_other_products_stay(text: str) -> None:
    model = replaced(text)
    assert not any(node.domain for node in model.graph)


# Residuals


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("addition", ["y = Add(p, z)", "y = Add(z, p)"])
def test_a_product_takes_a_residual_along(dtype: str, addition: str) -> None:
    (node,) = replaced(
        f"""g ({dtype}[2,4,64] x, {dtype}[64,32] w, {dtype}[2,4,32] z) => ({dtype}[2,4,32] y)
        {{ p = MatMul(x, w) {addition} }}"""
    ).graph
    assert node.op_type == f"Products{dtype.capitalize()}"
    assert names(node.inputs) == ["x", "w", "z"]
    assert names(node.outputs) == ["y"]
    assert (flags(node, "biased"), flags(node, "added")) == ([0], [1])


def flags(node: ir.Node, name: str) -> list[int]:
    return list(node.attributes[name].as_ints())


@pytest.mark.parametrize("biased", ["p = Gemm(x, w, b)", "q = MatMul(x, w) p = Add(b, q)"])
def test_a_product_takes_its_bias_and_a_residual_along(biased: str) -> None:
    (node,) = replaced(
        f"""g (float16[4,64] x, float16[64,64] w, float16[64] b) => (float16[4,64] y)
        {{ {biased} y = Add(x, p) }}"""
    ).graph
    assert names(node.inputs) == ["x", "w", "b", "x"]
    assert (flags(node, "biased"), flags(node, "added")) == ([1], [1])


def test_a_gemm_may_have_a_residual_for_its_addend() -> None:
    (node,) = replaced(
        """g (float16[4,64] x, float16[32,64] w, float16[4,32] z) => (float16[4,32] y)
        { y = Gemm<transB = 1>(x, w, z) }"""
    ).graph
    assert names(node.inputs) == ["x", "w", "z"]
    assert (flags(node, "transposed"), flags(node, "biased"), flags(node, "added")) == ([1], [0], [1])


def test_a_product_with_a_residual_is_a_node_of_its_own() -> None:
    """Its residual may depend on the other products of the operand."""
    model = replaced(
        """g (float16[4,64] x, float16[64,32] a, float16[64,32] b, float16[64,32] c)
        => (float16[4,32] y, float16[4,32] v)
        { p = MatMul(x, a) k = MatMul(x, b) v = MatMul(x, c) n = Neg(k) y = Add(p, n) }"""
    )
    assert operators(model) == ["ProductsFloat16", "Neg", "ProductsFloat16"]
    first, _, last = model.graph
    assert names(first.outputs) == ["k", "v"]
    assert names(last.inputs) == ["x", "a", "n"]


def test_a_sum_of_two_products_is_added_by_one_of_them() -> None:
    model = replaced(
        """g (float16[4,64] x, float16[64,32] a, float16[4,8] z, float16[8,32] b) => (float16[4,32] y)
        { p = MatMul(x, a) q = MatMul(z, b) y = Add(p, q) }"""
    )
    first, last = model.graph
    assert (names(first.inputs), names(first.outputs)) == (["z", "b"], ["q"])
    assert (names(last.inputs), names(last.outputs)) == (["x", "a", "q"], ["y"])


def test_a_residual_may_be_the_sum_of_another_product() -> None:
    model = replaced(
        """g (float16[4,64] x, float16[64,64] a, float16[64,64] b) => (float16[4,64] y)
        { p = MatMul(x, a) s = Add(p, x) r = Relu(s) q = MatMul(r, b) y = Add(s, q) }"""
    )
    first, _, last = model.graph
    assert names(first.inputs) == ["x", "a", "x"]
    assert names(last.inputs) == ["r", "b", "s"]
    assert last.inputs[2] is first.outputs[0]


@pytest.mark.parametrize(
    "text",
    [
        """g (float16[4,64] x, float16[64,32] w, float16[1,32] z) => (float16[4,32] y)
        { p = MatMul(x, w) y = Add(p, z) }""",
        """g (float16[4,64] x, float16[64,32] w, float16[2,4,32] z) => (float16[2,4,32] y)
        { p = MatMul(x, w) y = Add(p, z) }""",
        """g (float16[4,64] x, float16[64,32] w, float16[4,32] z) => (float16[4,32] p, float16[4,32] y)
        { p = MatMul(x, w) y = Add(p, z) }""",
        """g (float16[4,64] x, float16[64,32] w, float16[4,32] z) => (float16[4,32] r, float16[4,32] y)
        { p = MatMul(x, w) r = Relu(p) y = Add(p, z) }""",
        "g (float16[4,64] x, float16[64,32] w) => (float16[4,32] y) { p = MatMul(x, w) y = Add(p, p) }",
        """g (float16[4,64] x, float16[64,32] w, float16[4,32] z) => (float16[4,32] y)
        { p = MatMul(x, w) y = Mul(p, z) }""",
    ],
    ids=["broadcast", "broadcasts the product", "graph output", "read twice", "to itself", "no sum"],
)
def test_other_addends_stay_additions(text: str) -> None:
    model = replaced(text)
    product = next(iter(model.graph))
    assert flags(product, "added") == [0]
    assert operators(model)[-1] == operators(model_of(text))[-1]


# Norms of a sum


@pytest.fixture
def compilers() -> Iterator[None]:
    """As on a machine that can compile native kernels for a GPU."""
    with mock.patch.dict(TARGETS, cuda=replace(TARGETS["cuda"], compiler_version=lambda: "")):
        yield


ROWS = "float16[32,64]"


def normalized(body: str, *, results: str = f"{ROWS} y", kernels: bool = True, native: bool | str = True) -> ir.Model:
    """The model after the rules for CUDA, which join the sum and its norm, and after the products are replaced."""
    inputs = f"{ROWS} x, float16[64,64] w, {ROWS} z, float16[64] s, float16[64] t, float16[64] b, float16[64,64] v"
    model = model_of(f"g ({inputs}) => ({results}) {{ {body} }}")
    assert any(name.startswith("Skip") for name in optimize(model, domains=CUDA_DOMAINS))
    cuda_matrix_products(model, Options.of({"native": native}), kernels=kernels)
    return model


LAYER_NORM = "p = Gemm(x, w) a = Add(p, z) y = LayerNormalization<epsilon = 0.5>(a, s, t)"


@pytest.mark.usefixtures("compilers")
@pytest.mark.parametrize(
    ("body", "taken"),
    [
        (LAYER_NORM, ["x", "w", "z"]),
        (LAYER_NORM.replace("p, z", "z, p"), ["x", "w", "z"]),
        (LAYER_NORM.replace("a = Add(p, z)", "q = Add(p, b) a = Add(q, z)"), ["x", "w", "b", "z"]),
        (LAYER_NORM.replace("a = Add(p, z)", "q = Add(z, b) a = Add(q, p)"), ["x", "w", "b", "z"]),
    ],
    ids=["product first", "product last", "bias", "bias of the residual"],
)
def test_a_product_takes_the_residual_and_bias_of_a_layer_norm(body: str, taken: list[str]) -> None:
    product, norm = normalized(body).graph
    assert names(product.inputs) == taken
    assert (norm.domain, norm.op_type) == ("", "LayerNormalization")
    assert norm.inputs[0] is product.outputs[0]
    assert (names(norm.inputs[1:]), names(norm.outputs)) == (["s", "t"], ["y"])
    assert (norm.attributes["axis"].as_int(), norm.attributes["epsilon"].as_float()) == (-1, 0.5)
    assert (product.outputs[0].meta["dims"], product.outputs[0].dtype) == ((32, 64), ir.DataType.FLOAT16)


@pytest.mark.usefixtures("compilers")
def test_the_sum_in_a_norm_that_is_used_elsewhere_is_the_result_of_the_product() -> None:
    model = normalized(
        f"{LAYER_NORM} q = Gemm(y, v) u = Add(a, q)",
        results=f"{ROWS} a, {ROWS} u",
    )
    first, norm, last = model.graph
    assert names(model.graph.outputs) == ["a", "u"]
    assert norm.inputs[0] is first.outputs[0] is model.graph.outputs[0]
    assert last.inputs[2] is first.outputs[0]
    assert last.inputs[0] is norm.outputs[0]


@pytest.mark.usefixtures("compilers")
def test_a_product_takes_the_residual_of_an_rms_norm() -> None:
    product, norm = normalized("p = Gemm(x, w) a = Add(z, p) y = RMSNormalization<epsilon = 0.5>(a, s)").graph
    assert names(product.inputs) == ["x", "w", "z"]
    assert (norm.domain, norm.op_type, norm.attributes["epsilon"].as_float()) == ("", "RMSNormalization", 0.5)
    assert names(norm.inputs[1:]) == ["s"]


@pytest.mark.usefixtures("compilers")
@pytest.mark.parametrize(
    ("body", "results"),
    [
        (LAYER_NORM, f"{ROWS} y, {ROWS} p"),
        (f"{LAYER_NORM} u = Neg(p)", f"{ROWS} y, {ROWS} u"),
        ("c = Neg(b) p = MatMul(x, w) q = Add(p, c) a = Add(q, z) y = LayerNormalization(a, s, t)", f"{ROWS} y"),
        ("p = Gemm(x, w, z) a = Add(p, x) y = LayerNormalization(a, s, t)", f"{ROWS} y"),
        ("p = Neg(x) a = Add(p, z) y = LayerNormalization(a, s, t) q = MatMul(y, w)", f"{ROWS} q"),
    ],
    ids=["graph output", "read twice", "computed bias", "second residual", "no product"],
)
def test_other_norms_stay(body: str, results: str) -> None:
    assert "SkipLayerNormalization" in operators(normalized(body, results=results))


@pytest.mark.usefixtures("compilers")
def test_norms_stay_without_native_kernels_for_them() -> None:
    fused = ["ProductsFloat16", "SkipLayerNormalization"]
    assert operators(normalized(LAYER_NORM, kernels=False)) == fused
    with mock.patch.dict(TARGETS, cuda=replace(TARGETS["cuda"], compiler_version=missing)):
        assert operators(normalized(LAYER_NORM, native="auto")) == fused
    with mock.patch.dict(TARGETS, cuda=replace(TARGETS["cuda"], min_elements=4096)):
        assert operators(normalized(LAYER_NORM, native="auto")) == fused
        assert operators(normalized(LAYER_NORM)) != fused


def missing() -> str:
    raise MissingDependency("NVRTC was not found", hint="install it")


@pytest.mark.usefixtures("compilers")
@pytest.mark.parametrize(
    "norm", ["LayerNormalization(a, s, t)", "RMSNormalization(a, s)"], ids=["layer norm", "RMS norm"]
)
def test_a_norm_without_its_sum_is_a_native_kernel(norm: str) -> None:
    model = normalized(f"p = Gemm(x, w) a = Add(z, p) y = {norm}", native="auto")
    plan = plan_kernels(model, min_elements=TARGETS["cuda"].min_elements, library=Library(TARGETS["cuda"]))
    assert plan.groups == [[norm.partition("(")[0]]]


# What products compute


@pytest.fixture(scope="module")
def library() -> Path:
    """The library for the CPU, over an imitation of cuBLASLt."""
    imitation = Path(__file__).with_name("cublaslt_on_cpu.h").read_text()
    imitation = imitation.replace('#include "narrow.h"', read_header("sardonyx.toolchain", "narrow.h"))
    source = cuda_products.library_source().replace('"CUDAExecutionProvider"', '"CPUExecutionProvider"')
    with mock.patch.object(compiler, "FLAGS", ("-std=c++17", "-O0", "-fvisibility=hidden", "-fPIC")):
        return compiler.build_library(f"{imitation}\n{source}", Options.of())


SUMS = """g (@[2,3,16] x, @[16,24] w, @[24] b, @[2,3,24] z, @[6,16] r, @[24,16] t, @[6,24] u)
    => (@[2,3,24] plain, @[2,3,24] added, @[2,3,24] both, @[6,24] transposed)
    { plain = MatMul(x, w) p = MatMul(x, w) added = Add(p, z) q = MatMul(x, w) c = Add(q, b) both = Add(z, c)
      f = Gemm<transB = 1>(r, t, b) transposed = Add(f, u) }"""


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_products_with_residuals_are_rounded_once(dtype: type, library: Path) -> None:
    """Also from the second call on, which measures algorithms; none of the operands is aligned."""
    model = replaced(SUMS.replace("@", np.dtype(dtype).name))
    assert {node.domain for node in model.graph} == {"sardonyx.cuda"}
    generator = np.random.default_rng(0)
    feeds = {str(x.name): unaligned(generator.standard_normal(x.meta["dims"]), dtype) for x in model.graph.inputs}
    session = session_of(ir.to_proto(model), library=library)
    for _ in range(3):
        for found, exact in zip(run(session, feeds), exact_sums(feeds), strict=True):
            np.testing.assert_allclose(found.astype(np.float64), exact, rtol=float(ml_dtypes.finfo(dtype).eps) / 2)


def unaligned(numbers: np.ndarray, dtype: type) -> np.ndarray:
    """The numbers in memory that begins at another address than algorithms assume."""
    memory = np.empty(numbers.size + 8, dtype)
    start = next(i for i in range(8) if (memory.ctypes.data + i * memory.itemsize) % 16)
    memory[start : start + numbers.size] = numbers.ravel()
    return memory[start : start + numbers.size].reshape(numbers.shape)


def exact_sums(feeds: Feeds) -> list[np.ndarray]:
    x, w, b, z, r, t, u = (feeds[name].astype(np.float64) for name in "xwbzrtu")
    return [x @ w, x @ w + z, x @ w + b + z, r @ t.T + b + u]


def test_a_residual_of_another_shape_is_an_error(library: Path) -> None:
    model = replaced(
        """g (float16[2,16] x, float16[16,8] w, float16[2,8] z) => (float16[2,8] y)
        { p = MatMul(x, w) y = Add(p, z) }"""
    )
    model.graph.inputs[-1].shape = ir.Shape(["n", 8])
    feeds = {name: np.ones(dims, np.float16) for name, dims in (("x", (2, 16)), ("w", (16, 8)), ("z", (1, 8)))}
    with pytest.raises(Exception, match="residual of Products has another shape"):
        run(session_of(ir.to_proto(model), library=library), feeds)


def test_without_a_compiler_the_model_stays_and_only_a_request_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(options: Options) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(cuda_products, "_build", missing)
    model = model_of(QKV)
    assert cuda_matrix_products(model, Options.of({})) is None
    assert operators(model) == operators(model_of(QKV))
    with pytest.raises(RuntimeError, match="no compiler"):
        cuda_matrix_products(model, Options.of({"native": True}))
