"""Numbers at the edges: what is not finite, what wraps around, what is rounded."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented

from tests.native.running import Feeds, Together, difference, model_of, run, session_of

FLOAT, DOUBLE, HALF, BFLOAT = TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16
INF, NAN = np.inf, np.nan
EDGES = np.array(
    [
        *(0.0, -0.0, 1.0, -1.0, INF, -INF, NAN, 1e-40, -1e-40, 3e38, -3e38, 88.7, 89.0, -87.0, -104.0),
        *(0.5, 1.5, 2.5, -2.5, 1e-8, -1e-8, 17.0, -17.0, 1e4, -1e4),
    ],
    np.float32,
)
"""Twenty-five, so that lanes and their tail meet them."""


def _one(op: str, *kinds: int, **attributes: object) -> onnx.ModelProto:
    """A model of one operator over vectors."""
    names = [f"x{i}" for i in range(len(kinds))]
    node = helper.make_node(op, names, ["y"], **attributes)
    return model_of([node], {name: (kind, ["n"]) for name, kind in zip(names, kinds, strict=True)}, ["y"])


def _pairs(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.repeat(values, len(values)), np.tile(values, len(values))


class Table:
    """Models that are compared together."""

    def __init__(self) -> None:
        self._together, self._feeds, self._models = Together(), {}, {}

    def add(self, name: str, model: onnx.ModelProto, *arrays: np.ndarray) -> None:
        assert self._together.add(name, model) is None
        self._models[name] = model
        self._feeds[name] = {x.name: array for x, array in zip(model.graph.input, arrays, strict=True)}

    def feeds(self, name: str) -> Feeds:
        return self._feeds[name]

    def both(self) -> dict[str, tuple[list[np.ndarray], list[np.ndarray]]]:
        """For each model, what kernels give and what onnxruntime does."""
        self._together.build(quickly=True)
        results = {}
        for name, model in self._models.items():
            with suppress(NotImplemented):  # of some operators onnxruntime has no kernel in double precision
                wanted = run(session_of(model), self._feeds[name])
                results[name] = (self._together.run(name, self._feeds[name]), wanted)
        return results

    def results(self) -> dict[str, np.ndarray]:
        """What the kernel of each model gives."""
        self._together.build(quickly=True)
        return {name: self._together.run(name, self._feeds[name])[0] for name in self._models}


UNARY = (
    *("Exp", "Log", "Sqrt", "Tanh", "Sigmoid", "Erf", "Relu", "Abs", "Neg", "Floor", "Ceil", "Round", "Sign"),
    *("Reciprocal", "Softplus", "Elu", "Selu", "LeakyRelu", "HardSigmoid", "Softsign", "Sin", "Cos", "Atan"),
)
BINARY = ("Add", "Sub", "Mul", "Div", "Max", "Min", "Pow")
COMPARED = ("Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal")
WHOLE = (TensorProto.INT32, TensorProto.INT64, TensorProto.INT8, TensorProto.UINT8)


def test_what_is_not_finite_goes_through_as_in_onnxruntime() -> None:
    table = Table()
    left, right = _pairs(EDGES)
    for kind, dtype in ((FLOAT, np.float32), (DOUBLE, np.float64)):
        for op in UNARY:
            table.add(f"{op} {kind}", _one(op, kind), EDGES.astype(dtype))
        for op in (*BINARY, *COMPARED):
            table.add(f"{op} {kind}", _one(op, kind, kind), left.astype(dtype), right.astype(dtype))
        for op in ("IsNaN", "IsInf"):
            table.add(f"{op} {kind}", _one(op, kind), EDGES.astype(dtype))
    failures = []
    for name, ((found,), (wanted,)) in table.both().items():
        a, b = found.astype(np.float64), wanted.astype(np.float64)
        least = 1e-7 if "Sigmoid" in name else 1e-37  # onnxruntime's is the less exact
        same = np.isclose(a, b, rtol=1e-12 if "11" in name else 2e-6, atol=least, equal_nan=True)
        if not same.all():
            given = [x[~same][:4] for x in table.feeds(name).values()]
            failures.append(f"{name}{given}: {a[~same][:4]} instead of {b[~same][:4]}")
    assert not failures, "\n".join(failures)


def _rows(dtype: type) -> np.ndarray:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((8, 37)).astype(dtype)
    x[0] = -INF
    x[1, :20] = -INF
    x[2, 5] = INF
    x[3, 36] = NAN
    x[4] = 0
    x[5] = 1e4
    x[6] *= 1e-30
    return x


ROWS = {
    "Softmax": lambda x: torch.softmax(x, 1),
    "LogSoftmax": lambda x: torch.log_softmax(x, 1),
    "ReduceSum": lambda x: x.sum(1, keepdim=True),
    "ReduceMax": lambda x: x.amax(1, keepdim=True),
    "ReduceMin": lambda x: x.amin(1, keepdim=True),
    "ReduceMean": lambda x: x.mean(1, keepdim=True),
    "ReduceL1": lambda x: x.abs().sum(1, keepdim=True),
    "ReduceL2": lambda x: torch.linalg.vector_norm(x, dim=1, keepdim=True),
    "ReduceLogSumExp": lambda x: torch.logsumexp(x, 1, keepdim=True),
}


def test_rows_of_what_is_not_finite_reduce_as_in_torch() -> None:
    """onnxruntime loses a NaN in a maximum, depending on its place."""
    table = Table()
    for kind, dtype in ((FLOAT, np.float32), (DOUBLE, np.float64)):
        for op in ROWS:
            reduces = op.startswith("Reduce")
            node = helper.make_node(op, ["x", "a"] if reduces else ["x"], ["y"], **({} if reduces else {"axis": 1}))
            axes = {"a": np.array([1])} if reduces else {}
            table.add(f"{op} {kind}", model_of([node], {"x": (kind, ["n", 37])}, ["y"], axes), _rows(dtype))
    for name, found in table.results().items():
        wanted = ROWS[name.split()[0]](torch.from_numpy(_rows(found.dtype.type))).numpy()
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6, err_msg=name)


def test_integers_wrap_around() -> None:
    table = Table()
    for kind in WHOLE:
        dtype = helper.tensor_dtype_to_np_dtype(kind)
        info = np.iinfo(dtype)
        edges = np.array([0, 1, 2, 3, 7, 100, info.max, info.max - 1, info.min, info.min + 1, info.max // 2], dtype)
        left, right = _pairs(edges)
        for op in ("Add", "Sub", "Mul", "Max", "Min", "Less", "Equal"):
            table.add(f"{op} {dtype}", _one(op, kind, kind), left, right)
    wanted = {"Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Max": np.maximum, "Min": np.minimum}
    wanted |= {"Less": np.less, "Equal": np.equal}
    for name, found in table.results().items():
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(found, wanted[name.split()[0]](*table.feeds(name).values()), name)


def test_floats_become_integers_as_in_onnxruntime() -> None:
    """Also those too large for it, for which ONNX leaves it open."""
    table = Table()
    large = np.array([127.0, 128.0, 255.0, 256.0, -129.0, 1e5, 2.0**31, -(2.0**31), 2.0**33, 2.0**63, 1e20, 0.9, -0.9])
    for kind, dtype in ((FLOAT, np.float32), (DOUBLE, np.float64)):
        for to in (*WHOLE, TensorProto.INT16, TensorProto.UINT16):
            table.add(f"{kind} to {to}", _one("Cast", kind, to=to), np.concatenate([EDGES, large]).astype(dtype))
    for name, ((found,), (wanted,)) in table.both().items():
        np.testing.assert_array_equal(found, wanted, name)


def _towards_zero(x: int, y: int) -> int:
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


def test_integers_divide_towards_zero() -> None:
    table, by = Table(), [-3, -1, 2, 7, 13]
    for kind in (TensorProto.INT32, TensorProto.INT64):
        dtype = helper.tensor_dtype_to_np_dtype(kind)
        left, right = np.meshgrid(np.array([0, 1, -1, 7, -7, 2, np.iinfo(dtype).min + 1, 13, -3], dtype), by)
        for op in ("Div", "Mod"):
            node, divisors = helper.make_node(op, ["x", "by"], ["y"]), {"by": right.astype(dtype)}
            table.add(f"{op} {dtype}", model_of([node], {"x": (kind, left.shape)}, ["y"], divisors), left)
    for name, found in table.results().items():
        pairs = zip(table.feeds(name)["x"].ravel().tolist(), right.ravel().tolist(), strict=True)
        wanted = [_towards_zero(x, y) if "Div" in name else x % y for x, y in pairs]
        np.testing.assert_array_equal(found.ravel(), wanted, name)


EXPONENTS = (0.5, -0.5, 1.5, 2.0, 3.0, 1 / 3, -1.0, 0.0)


@pytest.mark.parametrize("size", [10, 41])
def test_constant_powers_of_what_is_not_finite_are_those_of_c(size: int) -> None:
    """A root is no power of 0.5 for minus zero and minus infinity, though compilers vectorize it as one."""
    together, kinds = Together(), {HALF: np.float16, FLOAT: np.float32, DOUBLE: np.float64}
    x = np.resize(np.array([0.0, -0.0, 1.0, -1.0, INF, -INF, NAN, 2.0, 4.0, -8.0]), size)
    for kind, dtype in kinds.items():
        for exponent in EXPONENTS:
            constants = {"exponent": np.array(exponent, dtype)}
            model = model_of(
                [helper.make_node("Pow", ["x", "exponent"], ["y"])], {"x": (kind, [size])}, ["y"], constants
            )
            assert together.add(f"{kind} {exponent}", model) is None
    together.build()
    for kind, dtype in kinds.items():
        for exponent in EXPONENTS:
            (found,) = together.run(f"{kind} {exponent}", {"x": x.astype(dtype)})
            base = torch.from_numpy(x)
            wanted = torch.pow(base, torch.full_like(base, float(dtype(exponent)))).numpy()
            np.testing.assert_allclose(found, wanted, rtol=2 * np.finfo(dtype).eps, err_msg=f"{dtype} {exponent}")
            signs = [np.signbit(y[~np.isnan(y)]) for y in (found, wanted)]
            np.testing.assert_array_equal(*signs, f"{dtype} {exponent}")


@pytest.mark.parametrize(("kind", "dtype"), [(HALF, np.float16), (BFLOAT, ml_dtypes.bfloat16)], ids=["half", "bfloat"])
def test_every_narrow_number_is_read_and_written_exactly(kind: int, dtype: type) -> None:
    every = np.arange(2**16, dtype=np.uint16).view(dtype)
    table = Table()
    table.add("neg", _one("Neg", kind), every)
    table.add("widen", _one("Cast", kind, to=FLOAT), every)
    results = table.results()
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(results["neg"].astype(np.float32), (-every).astype(np.float32))
        np.testing.assert_array_equal(results["widen"], every.astype(np.float32))


@pytest.mark.parametrize(("kind", "dtype"), [(HALF, np.float16), (BFLOAT, ml_dtypes.bfloat16)], ids=["half", "bfloat"])
def test_wide_numbers_are_rounded_to_the_nearest_narrow_one(kind: int, dtype: type) -> None:
    rng = np.random.default_rng(0)
    wide = rng.integers(0, 2**32, 2**15, dtype=np.uint64).astype(np.uint32).view(np.float32)
    ties = (np.arange(2**15, dtype=np.float32) / 2**14 + 1) * np.float32(1 + 2**-11)
    small = rng.standard_normal(2**15).astype(np.float32) * np.float32(1e-7)
    wide = np.concatenate([wide, ties, small, np.array([65504.0, 65519.9, 65520.0, 1e9], np.float32)])
    table = Table()
    table.add("narrow", _one("Cast", FLOAT, to=kind), wide)
    with np.errstate(over="ignore", invalid="ignore"):
        np.testing.assert_array_equal(
            table.results()["narrow"].astype(np.float32), wide.astype(dtype).astype(np.float32)
        )


def test_sums_of_narrow_numbers_do_not_overflow() -> None:
    x = np.full((3, 600), 200, np.float16)
    nodes = [
        helper.make_node("Add", ["x", "x"], ["a"]),
        helper.make_node("LayerNormalization", ["a", "s"], ["b"]),
        helper.make_node("ReduceMean", ["a", "axes"], ["c"]),
    ]
    model = model_of(nodes, {"x": (HALF, [3, 600]), "s": (HALF, [600])}, ["b", "c"], {"axes": np.array([0, 1])})
    together = Together()
    assert together.add("m", model) is None
    together.build(quickly=True)
    normal, mean = together.run("m", {"x": x, "s": np.ones(600, np.float16)})
    assert np.abs(normal.astype(np.float32)).max() < 1e-2
    assert mean.item() == 400


def test_sums_of_many_short_rows_stay_exact() -> None:
    model = model_of(
        [helper.make_node("Pad", ["x", "p"], ["a"]), helper.make_node("ReduceSum", ["a"], ["y"])],
        {"x": (FLOAT, [60, 60, 10])},
        ["y"],
        {"p": np.array([1, 1, 1] * 2)},
    )
    table = Table()
    table.add("sum", model, np.full((60, 60, 10), 1.4993, np.float32))
    wanted = np.float64(np.float32(1.4993)) * 36000
    assert abs(table.results()["sum"].item() - wanted) < 1e-6 * wanted


def test_long_sums_stay_exact() -> None:
    table = Table()
    node = helper.make_node("ReduceSum", ["x", "axes"], ["y"], keepdims=0)
    for name, axis, shape in (("rows", 1, (1, 2_000_003)), ("columns", 0, (100_003, 3))):
        model = model_of([node], {"x": (FLOAT, ["n", "m"])}, ["y"], {"axes": np.array([axis])})
        table.add(name, model, np.full(shape, 1.4993, np.float32))
    results = table.results()
    for name, size in (("rows", 2_000_003), ("columns", 100_003)):
        wanted = np.float64(np.float32(1.4993)) * size
        assert np.abs(results[name] - wanted).max() < 2e-6 * wanted


EXACT = {
    "Exp": lambda x: torch.exp(x),
    "Sigmoid": lambda x: torch.sigmoid(x),
    "Tanh": lambda x: torch.tanh(x),
    "Erf": lambda x: torch.erf(x),
}


def test_functions_are_exact_but_for_a_few_roundings() -> None:
    small = np.exp(np.linspace(-30, 4.4, 40_001))
    x = np.concatenate([small, -small]).astype(np.float32)
    table = Table()
    for op in EXACT:
        table.add(op, _one(op, FLOAT), x)
    for op, found in table.results().items():
        wanted = EXACT[op](torch.from_numpy(x.astype(np.float64))).numpy()
        large = np.abs(wanted) > np.finfo(np.float32).tiny  # what would be a denormal may be zero
        error = np.abs(found - wanted)[large] / np.abs(wanted)[large]
        assert error.max() < 4 * np.finfo(np.float32).eps, op
        assert op == "Exp" or np.abs(found).max() <= 1


def _bfloat_case(nodes: Sequence[onnx.NodeProto], **shapes: Sequence[int]) -> tuple[onnx.ModelProto, Feeds]:
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for name, shape in shapes.items()}
    return model_of(nodes, {name: (BFLOAT, shape) for name, shape in shapes.items()}, ["y"]), feeds


def test_bfloat_graphs_that_onnxruntime_lacks_run() -> None:
    nodes = [
        helper.make_node("Add", ["x", "r"], ["a"]),
        helper.make_node("LayerNormalization", ["a", "g", "b"], ["n"]),
        helper.make_node("Sigmoid", ["n"], ["s"]),
        helper.make_node("Mul", ["n", "s"], ["y"]),
    ]
    model, feeds = _bfloat_case(nodes, x=[9, 77], r=[9, 77], g=[77], b=[77])
    together = Together()
    assert together.add("m", model) is None
    together.build(quickly=True)
    x, r, g, b = (feeds[name].astype(np.float64) for name in ("x", "r", "g", "b"))
    a = x + r
    n = (a - a.mean(1, keepdims=True)) / np.sqrt(a.var(1, keepdims=True) + 1e-5) * g + b
    (found,) = together.run("m", feeds)
    assert difference(found.astype(np.float64), n / (1 + np.exp(-n)), tolerance=2**-8) is None


def test_a_number_that_is_truncated_to_zero_has_no_sign() -> None:
    def inverse(x: torch.Tensor) -> torch.Tensor:
        return 2 / x.clamp(-99, 99).long()

    compiled = torch.compile(inverse, backend="sardonyx", dynamic=True, options={"native": True, "fallback": "error"})
    x = torch.tensor([-0.5, 0.5, -0.0, 3.0, -1.2]).repeat(5, 5)
    assert torch.equal(compiled(x), inverse(x))
