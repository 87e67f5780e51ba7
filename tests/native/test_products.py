"""Products of matrices and convolutions inside kernels: any size, type and stride gives what double precision gives."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from torch import nn

import sardonyx
from sardonyx import native
from sardonyx.native.partition import plan_kernels
from tests.native.node_tests import cases, symbolic
from tests.native.node_tests import compare as compare_cases
from tests.native.running import Together, compare, difference, model_of

N = helper.make_node
FLOAT, DOUBLE, HALF, BFLOAT = TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16
DTYPES: Mapping[int, type] = {
    FLOAT: np.float32,
    DOUBLE: np.float64,
    HALF: np.float16,
    BFLOAT: ml_dtypes.bfloat16,
    TensorProto.INT32: np.int32,
    TensorProto.INT64: np.int64,
    TensorProto.UINT32: np.uint32,
    TensorProto.UINT64: np.uint64,
}
REAL = (FLOAT, DOUBLE, HALF, BFLOAT)
SIZES = st.sampled_from([0, 1, 2, 3, 5, 7, 13, 16, 17, 33, 64, 97, 193, 260])
"""None, one, odd ones, and more than fit into a tile, a block, and so much of k as is taken at once."""
FEW = settings(
    max_examples=25, deadline=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)

MATRICES: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    "matrices": (["m", "k"], ["k", "n"]),
    "batches": (["p", "q", "m", "k"], ["p", "q", "k", "n"]),
    "a batch and one": (["p", "m", "k"], ["k", "n"]),
    "one and a batch": (["m", "k"], ["p", "k", "n"]),
    "broadcast": (["q", "m", "k"], ["p", 1, "k", "n"]),
    "row": (["k"], ["p", "k", "n"]),
    "column": (["p", "m", "k"], ["k"]),
    "vectors": (["k"], ["q", "k", 1]),
}


def _some(named: Mapping[str, object], kind: int) -> list[str]:
    """What is built for a type: all in single precision, and some in others."""
    return list(named) if kind == FLOAT else list(named)[1:5:2]


def _one(named: Mapping[str, object], kind: int, which: int) -> str:
    some = _some(named, kind)
    return some[which % len(some)]


def _array(shape: Sequence[int], kind: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if kind in REAL:
        return rng.standard_normal(shape).astype(DTYPES[kind])
    return rng.integers(0, 2**31, shape).astype(DTYPES[kind])


def _fed(shapes: Mapping[str, Sequence[int | str]], sizes: Mapping[str, int], kind: int) -> dict[str, np.ndarray]:
    """Arrays for inputs whose sizes are numbers and names."""
    told = ([d if isinstance(d, int) else sizes[d] for d in dims] for dims in shapes.values())
    return {name: _array(shape, kind, seed) for seed, (name, shape) in enumerate(zip(shapes, told, strict=True))}


def _exact(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64) if array.dtype.kind in "fV" else array


@pytest.fixture(scope="module")
def matrices() -> Together:
    """MatMul of every type and way to multiply, all sizes symbols."""
    made = Together()
    for kind in DTYPES:
        for name in _some(MATRICES, kind):
            a, b = MATRICES[name]
            model = model_of([N("MatMul", ["a", "b"], ["y"])], {"a": (kind, a), "b": (kind, b)}, ["y"])
            assert made.add(f"{name} {kind}", model) is None
    made.build(quickly=True)
    return made


@pytest.mark.parametrize("kind", DTYPES)
@FEW
@given(
    st.integers(0, 99),
    st.fixed_dictionaries({"m": SIZES, "k": SIZES, "n": SIZES, "p": st.integers(0, 3), "q": st.integers(1, 2)}),
    st.integers(1, 2),
)
def test_products_of_any_size(matrices: Together, kind: int, which: int, sizes: dict[str, int], threads: int) -> None:
    name = _one(MATRICES, kind, which)
    a, b = MATRICES[name]
    feeds = _fed({"a": a, "b": b}, sizes, kind)
    (found,) = matrices.run(f"{name} {kind}", feeds, threads=threads)
    wanted = np.asarray(_exact(feeds["a"]) @ _exact(feeds["b"])).astype(DTYPES[kind])
    assert difference(found, wanted) is None


GEMMS: Mapping[str, tuple[Mapping[str, Sequence[int | str]], Mapping[str, float]]] = {
    "plain": ({"a": ["m", "k"], "b": ["k", "n"]}, {}),
    "row": ({"a": ["m", "k"], "b": ["k", "n"], "c": ["n"]}, {"alpha": 0.5, "beta": 2.0}),
    "column": ({"a": ["k", "m"], "b": ["k", "n"], "c": ["m", 1]}, {"transA": 1, "beta": -1.5}),
    "whole": ({"a": ["m", "k"], "b": ["n", "k"], "c": ["m", "n"]}, {"transB": 1, "alpha": 3.0}),
    "number": ({"a": ["k", "m"], "b": ["n", "k"], "c": [1]}, {"transA": 1, "transB": 1}),
    "none of it": ({"a": ["m", "k"], "b": ["k", "n"], "c": ["n"]}, {"beta": 0.0}),
}


@pytest.fixture(scope="module")
def gemms() -> Together:
    made = Together()
    for kind in REAL:
        for name in _some(GEMMS, kind):
            shapes, attributes = GEMMS[name]
            model = model_of(
                [N("Gemm", list(shapes), ["y"], **attributes)], {k: (kind, dims) for k, dims in shapes.items()}, ["y"]
            )
            assert made.add(f"{name} {kind}", model) is None
    made.build(quickly=True)
    return made


@pytest.mark.parametrize("kind", REAL)
@FEW
@given(st.integers(0, 99), st.fixed_dictionaries({"m": SIZES, "k": SIZES, "n": SIZES}), st.integers(1, 2))
def test_gemm_of_any_size(gemms: Together, kind: int, which: int, sizes: dict[str, int], threads: int) -> None:
    name = _one(GEMMS, kind, which)
    shapes, said = GEMMS[name]
    feeds = _fed(shapes, sizes, kind)
    (found,) = gemms.run(f"{name} {kind}", feeds, threads=threads)
    a, b = (_exact(feeds[x]).T if said.get(f"trans{x.upper()}") else _exact(feeds[x]) for x in ("a", "b"))
    wanted = said.get("alpha", 1.0) * (a @ b)
    if "c" in feeds:
        wanted = wanted + said.get("beta", 1.0) * _exact(feeds["c"])
    assert difference(found, wanted.astype(DTYPES[kind]), least=1.0) is None


CONVOLUTIONS: Mapping[str, tuple[Sequence[int | str], Sequence[int], bool, Mapping[str, object]]] = {
    "1-D": (["b", 3, "w"], [5, 3, 4], True, {"pads": [2, 1], "strides": [2]}),
    "2-D": (["b", 3, "h", "w"], [7, 3, 3, 2], True, {"pads": [1, 0, 2, 1], "strides": [1, 2], "dilations": [2, 1]}),
    "3-D": (["b", 2, 5, "h", "w"], [4, 2, 2, 3, 1], False, {"pads": [0, 1, 0, 1, 1, 0], "dilations": [2, 1, 1]}),
    "groups": (["b", 6, "h", "w"], [4, 3, 3, 3], True, {"group": 2, "pads": [1, 1, 1, 1]}),
    "a channel each": (["b", 5, "h", "w"], [10, 1, 3, 3], False, {"group": 5, "strides": [2, 2]}),
    "one place": (["b", 9, "h", "w"], [20, 9, 1, 1], True, {}),
    "same above": (["b", 2, "h", "w"], [3, 2, 4, 3], True, {"auto_pad": "SAME_UPPER", "strides": [2, 1]}),
    "same below": (["b", 2, "h", "w"], [3, 2, 4, 3], False, {"auto_pad": "SAME_LOWER", "strides": [3, 2]}),
    "valid": (["b", 2, "h", "w"], [3, 2, 2, 2], False, {"auto_pad": "VALID"}),
}


def _convolution(kind: int, name: str) -> onnx.ModelProto:
    image, weights, biased, attributes = CONVOLUTIONS[name]
    inputs = {"x": (kind, image), "w": (kind, weights), **({"b": (kind, weights[:1])} if biased else {})}
    return model_of([N("Conv", list(inputs), ["y"], **attributes)], inputs, ["y"])


@pytest.fixture(scope="module")
def convolutions() -> Together:
    made = Together()
    for kind in REAL:
        for name in _some(CONVOLUTIONS, kind):
            assert made.add(f"{name} {kind}", _convolution(kind, name)) is None
    made.build(quickly=True)
    return made


def _convolved(feeds: Mapping[str, np.ndarray], said: Mapping[str, object]) -> np.ndarray:
    """By torch, in double precision."""
    x, w = (torch.from_numpy(_exact(feeds[name])) for name in ("x", "w"))
    rank = x.dim() - 2
    strides, dilations = (list(said.get(name, [1] * rank)) for name in ("strides", "dilations"))
    pads = list(said.get("pads", [0] * (2 * rank)))
    if str(said.get("auto_pad", "")).startswith("SAME"):
        for axis in range(rank):
            size, wide = x.shape[2 + axis], (w.shape[2 + axis] - 1) * dilations[axis] + 1
            total = max(0, (-(-size // strides[axis]) - 1) * strides[axis] + wide - size)
            pads[axis] = (total + (said["auto_pad"] == "SAME_LOWER")) // 2
            pads[axis + rank] = total - pads[axis]
    around = [amount for axis in reversed(range(rank)) for amount in (pads[axis], pads[axis + rank])]
    bias = torch.from_numpy(_exact(feeds["b"])) if "b" in feeds else None
    convolve = (nn.functional.conv1d, nn.functional.conv2d, nn.functional.conv3d)[rank - 1]
    padded = nn.functional.pad(x, around)
    return convolve(padded, w, bias, stride=strides, dilation=dilations, groups=int(said.get("group", 1))).numpy()


@pytest.mark.parametrize("kind", REAL)
@FEW
@given(
    st.integers(0, 99),
    st.fixed_dictionaries({"b": st.integers(0, 3), "h": st.integers(5, 21), "w": st.sampled_from([4, 5, 9, 16, 37])}),
    st.integers(1, 2),
)
def test_convolutions_of_any_size(
    convolutions: Together, kind: int, which: int, sizes: dict[str, int], threads: int
) -> None:
    name = _one(CONVOLUTIONS, kind, which)
    image, weights, biased, said = CONVOLUTIONS[name]
    shapes = {"x": image, "w": weights, **({"b": weights[:1]} if biased else {})}
    feeds = _fed(shapes, sizes, kind)
    (found,) = convolutions.run(f"{name} {kind}", feeds, threads=threads)
    assert difference(found, _convolved(feeds, said).astype(DTYPES[kind]), least=1.0) is None


def test_every_node_test_of_a_product_gives_what_is_expected() -> None:
    chosen = [case for case in cases() if case.node.op_type in ("MatMul", "Gemm", "Conv")]
    assert {case.node.op_type for case in chosen} == {"MatMul", "Gemm", "Conv"}
    assert compare_cases([*chosen, *map(symbolic, chosen)], quickly=True) == []


# What is around a product


def test_operands_are_computed_and_results_used_in_the_same_kernel() -> None:
    nodes = [
        *(N("Exp", ["x"], ["e"]), N("Transpose", ["w"], ["t"], perm=[1, 0]), N("MatMul", ["e", "t"], ["p"])),
        *(N("Concat", ["p", "x"], ["j"], axis=1), N("Softmax", ["p"], ["s"]), N("MatMul", ["s", "j"], ["y"])),
    ]
    model = model_of(nodes, {"x": (FLOAT, [9, 30]), "w": (FLOAT, [9, 30])}, ["y", "p"])
    assert len(plan_kernels(ir.from_proto(model), choice="all").groups) == 1
    compare(model, {"x": _array((9, 30), FLOAT, 0), "w": _array((9, 30), FLOAT, 1)})


def test_a_product_of_one_operand_with_itself() -> None:
    nodes = [N("Transpose", ["x"], ["t"], perm=[0, 2, 1]), N("MatMul", ["x", "t"], ["y"])]
    compare(model_of(nodes, {"x": (FLOAT, ["b", 11, "k"])}, ["y"]), {"x": _array((3, 11, 20), FLOAT, 0)})


def test_a_product_of_places() -> None:
    nodes = [N("Range", ["zero", "six", "one"], ["r"]), N("MatMul", ["r", "x"], ["y"])]
    constants = {"zero": np.array(0), "six": np.array(6), "one": np.array(1)}
    x = _array((6, 5), TensorProto.INT64, 0)
    compare(model_of(nodes, {"x": (TensorProto.INT64, [6, 5])}, ["y"], constants), {"x": x})


def test_what_is_not_finite_goes_only_where_it_belongs() -> None:
    a, b = _array((14, 40), FLOAT, 0), _array((40, 35), FLOAT, 1)
    a[3, 7], b[2, 30] = np.inf, np.nan
    model = model_of([N("MatMul", ["a", "b"], ["y"])], {"a": (FLOAT, [14, 40]), "b": (FLOAT, [40, 35])}, ["y"])
    (found,) = compare(model, {"a": a, "b": b})
    assert np.isfinite(found).sum() == 13 * 34


def test_sizes_that_may_not_fit_are_refused() -> None:
    model = model_of([N("MatMul", ["a", "b"], ["y"])], {"a": (FLOAT, ["m", "k"]), "b": (FLOAT, ["l", "n"])}, ["y"])
    (why,) = plan_kernels(ir.from_proto(model), choice="all").rejected.values()
    assert "inner sizes may differ" in why


def test_an_image_smaller_than_its_window_is_an_error_of_the_call() -> None:
    together = Together()
    assert together.add("model", _convolution(FLOAT, "valid")) is None
    together.build(quickly=True)
    feeds = _fed({"x": [1, 2, 1, 4], "w": [3, 2, 2, 2]}, {}, FLOAT)
    with pytest.raises(Exception, match="a slice is out of bounds"):
        together.run("model", feeds)


def test_auto_leaves_products_to_onnxruntime() -> None:
    nodes = [*(N("Exp", ["x"], ["e"]), N("Neg", ["e"], ["f"])), N("MatMul", ["f", "x"], ["y"])]
    found = plan_kernels(ir.from_proto(model_of(nodes, {"x": (FLOAT, [5, 5])}, ["y"])), choice="auto")
    assert found.groups == [["Exp", "Neg"]]
    assert list(found.rejected.values()) == ["faster in onnxruntime"]


# Whole graphs


class _Attention(nn.Module):
    """A layer of BERT, its attention written out."""

    def __init__(self, size: int = 48, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.given = nn.ModuleList(nn.Linear(size, size) for _ in range(3))
        self.attended, self.wider, self.back = nn.Linear(size, size), nn.Linear(size, 80), nn.Linear(80, size)
        self.first, self.second = nn.LayerNorm(size), nn.LayerNorm(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, size = x.shape
        query, key, value = (f(x).reshape(batch, tokens, self.heads, -1).transpose(1, 2) for f in self.given)
        shares = torch.softmax(query @ key.transpose(-1, -2) / (size // self.heads) ** 0.5, -1)
        x = self.first(x + self.attended((shares @ value).transpose(1, 2).reshape(batch, tokens, size)))
        return self.second(x + self.back(nn.functional.gelu(self.wider(x))))


GRAPHS: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP": (
        lambda: nn.Sequential(nn.Linear(17, 40), nn.GELU(), nn.LayerNorm(40), nn.Linear(40, 9), nn.Softmax(-1)),
        (17,),
    ),
    "CNN": (
        lambda: nn.Sequential(
            *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 12, 3, 2, 1, groups=4), nn.SiLU(), nn.Conv2d(12, 12, 3, groups=12, bias=False)),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 5)),
        ),
        (3, 16, 16),
    ),
    "BERT": (_Attention, (11, 48)),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_a_whole_graph_is_one_kernel(name: str) -> None:
    make, shape = GRAPHS[name]
    torch.manual_seed(0)
    model = make().eval()
    program = sardonyx.export(model, (torch.randn(2, *shape),), dynamic_shapes=({0: "batch"},), optimize=False)
    compiled = native.compile(program, select="all")
    assert [len(kernel.operators) > 4 for kernel in compiled.report.kernels] == [True]
    assert len(list(compiled.model.graph)) == 1
    session, exact = compiled.session(), copy.deepcopy(model).double()
    for batch in (1, 2, 7):
        x = torch.randn(batch, *shape)
        (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        np.testing.assert_allclose(found, program(x).numpy(), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found, exact(x.double()).detach().numpy(), rtol=1e-4, atol=1e-5)


# Transposes that move the last axis

TURNED = {
    "reversed": ([2, 1, 0], ["a", "b", "c"]),
    "first to last": ([1, 2, 0], ["a", "b", "c"]),
    "last to first": ([2, 0, 1], ["a", "b", "c"]),
    "matrix": ([1, 0], ["a", "c"]),
    "channels": ([0, 3, 1, 2], ["a", "b", "b", "c"]),
}


def _turned(order: Sequence[int], dims: Sequence[str], kind: int) -> onnx.ModelProto:
    """Between work before and after it, with a second operand that is not transposed."""
    moved = [dims[axis] for axis in order]
    nodes = [
        *(N("Exp", ["x"], ["e"]), N("Neg", ["e"], ["n"]), N("Transpose", ["n"], ["t"], perm=order)),
        *(N("Mul", ["t", "z"], ["m"]), N("Tanh", ["m"], ["y"])),
    ]
    return model_of(nodes, {"x": (kind, dims), "z": (kind, moved)}, ["y"])


@pytest.fixture(scope="module")
def transposes() -> Together:
    made = Together("auto")
    for name, (order, dims) in TURNED.items():
        for kind in (FLOAT, HALF):
            model = _turned(order, dims, kind)
            assert made.add(f"{name} {kind}", model) is None
            assert made.groups(f"{name} {kind}") == [["Exp", "Neg", "Transpose", "Mul", "Tanh"]]
    made.build(quickly=True)
    return made


@pytest.mark.parametrize("kind", [FLOAT, HALF])
@FEW
@given(
    st.sampled_from(list(TURNED)),
    st.fixed_dictionaries({"a": SIZES, "b": st.integers(0, 19), "c": SIZES}),
    st.integers(1, 2),
)
def test_what_is_transposed_between_other_work(
    transposes: Together, kind: int, name: str, sizes: dict[str, int], threads: int
) -> None:
    order, dims = TURNED[name]
    feeds = _fed({"x": dims, "z": [dims[axis] for axis in order]}, sizes, kind)
    (found,) = transposes.run(f"{name} {kind}", feeds, threads=threads)
    wanted = np.tanh(-np.exp(_exact(feeds["x"])).transpose(order) * _exact(feeds["z"]))
    assert difference(found, wanted.astype(DTYPES[kind]), least=1.0) is None


def _groups(nodes: Sequence[onnx.NodeProto], outputs: Sequence[str]) -> list[list[str]]:
    model = model_of(nodes, {"x": (FLOAT, [8, 40]), "w": (FLOAT, [8, 40])}, outputs)
    return plan_kernels(ir.from_proto(model), choice="auto").groups


EXP_NEG = [N("Exp", ["x"], ["e"]), N("Neg", ["e"], ["n"])]


def test_auto_leaves_a_transpose_with_little_around_it() -> None:
    assert _groups([N("Transpose", ["x"], ["t"]), N("Exp", ["t"], ["y"])], ["y"]) == []


def test_auto_leaves_a_transpose_that_a_product_reads() -> None:
    nodes = [*EXP_NEG, N("Transpose", ["n"], ["t"]), N("MatMul", ["x", "t"], ["y"])]
    assert _groups(nodes, ["y"]) == [["Exp", "Neg"]]


def test_auto_leaves_a_transpose_whose_rows_are_summed() -> None:
    nodes = [N("Transpose", ["x"], ["t"]), N("Softmax", ["t"], ["s"]), N("Neg", ["s"], ["y"])]
    assert _groups(nodes, ["y"]) == [["Softmax", "Neg"]]
