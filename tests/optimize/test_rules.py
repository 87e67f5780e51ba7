"""Each rule: where it applies, where it must not, and that it changes no number, whatever the sizes and dtypes.

Values are compared before and after by `rewritten`, in ONNX Runtime without its own rewrites.
"""

from __future__ import annotations

import math
from collections import Counter

import pytest

from sardonyx.optimize.optimizer import all_rules
from tests.optimize.cases import CASES, drawn, filled
from tests.optimize.rewriting import CUDA_RULES, model_of, numbers_for, rewritten, run

SPECIAL = ((), (), (math.nan,), (math.inf, -math.inf), (0.0, -0.0))
DRAWS = 8


def test_every_rule_has_its_cases_and_states_its_algebra() -> None:
    rules = all_rules()
    assert {rule.name for rule in rules} == set(CASES)
    assert all(rule.doc for rule in rules)


@pytest.mark.parametrize("name", CASES)
def test_a_rule_applies_and_keeps_the_values(name: str) -> None:
    for dtype in CASES[name].types:
        hits, _ = rewritten(filled(CASES[name].applies, dtype), cuda=name in CUDA_RULES)
        assert hits[name], (dtype, hits)


@pytest.mark.parametrize("name", CASES)
def test_a_rule_refuses_what_it_would_get_wrong(name: str) -> None:
    hits, _ = rewritten(filled(CASES[name].refuses, CASES[name].types[0]), cuda=name in CUDA_RULES)
    assert not hits[name]


@pytest.mark.parametrize("name", CASES)
def test_a_rule_keeps_the_values_whatever_the_sizes_dtypes_and_numbers(name: str) -> None:
    hits: Counter[str] = Counter()
    for seed in range(DRAWS):
        text = drawn(CASES[name].applies, CASES[name].types, seed)
        special = SPECIAL[seed % len(SPECIAL)]
        hits += rewritten(text, seed=seed, special=special, cuda=name in CUDA_RULES)[0]
    assert hits[name]


@pytest.mark.parametrize("name", CASES)
def test_a_rule_keeps_the_values_alone(name: str) -> None:
    for seed in range(2):
        text = drawn(CASES[name].applies, CASES[name].types, seed)
        rewritten(text, names={name, "FoldConstant"}, cuda=name in CUDA_RULES)


CRASHES_WHEN_EMPTY = (
    *("AttentionInRows", "AttentionRepeatsHeads", "DropOpenMask", "CausalMask", "ScaleInAttention"),
    *("AttentionTakesScale", "MultiHeadAttention", "SequenceConvolutionAsProduct", "ChannelsLastConvolution"),
    *("ZeroPointIntoProduct", "ScalesIntoProduct"),
)
"""ONNX Runtime divides by zero for the models themselves, never ends, or leaves an empty sum uninitialized."""


@pytest.mark.parametrize("name", [name for name in CASES if name not in CRASHES_WHEN_EMPTY])
def test_a_rule_keeps_the_values_of_empty_tensors(name: str) -> None:
    for seed in range(8):
        text = drawn(CASES[name].applies, CASES[name].types, seed, choice=(0, 1, 2, 3))
        if runs(text):
            rewritten(text, seed=seed, cuda=name in CUDA_RULES)


def runs(text: str) -> bool:
    """Whether ONNX Runtime gives results of the stated sizes for the model as it is.

    A zero means something else in a Reshape, and to some kernels, as to a reduction whose axes count from the end.
    """
    model = model_of(text)
    try:
        results = run(model_of(text), numbers_for(model, 0, ()))
    except Exception:
        return False
    return all(result.shape == tuple(output.shape) for result, output in zip(results, model.graph.outputs, strict=True))


MORE = {
    "a root in the denominator": (
        "RmsNorm",
        """g (float[2,8] x) => (float[2,8] y) <float e = {0.1}, int64[1] axes = {1}, float one = {1.0}>
        { q = Mul(x, x) m = ReduceMean(q, axes) a = Add(m, e) r = Sqrt(a) i = Div(one, r) y = Mul(x, i) }""",
    ),
    "a mean that is a sum": (
        "LayerNorm",
        """g (float[2,8] x) => (float[2,8] y) <float e = {0.1}, int64[1] axes = {1}, float n = {8.0}>
        { s = ReduceSum(x, axes) m = Div(s, n) d = Sub(x, m) q = Mul(d, d) t = ReduceSum(q, axes) v = Div(t, n)
          a = Add(v, e) r = Sqrt(a) y = Div(d, r) }""",
    ),
    "a largest number that is NaN where any is": (
        "Softmax",
        """g (float[2,8] x) => (float[2,8] y) <int64[1] axes = {1}, float nan = {nan}>
        { r = ReduceSumSquare(x, axes) c = IsNaN(r) m = ReduceMax(x, axes)
          l = Where(c, nan, m) d = Sub(x, l) e = Exp(d) s = ReduceSum(e, axes) y = Div(e, s) }""",
    ),
    "attention without heads": (
        "Attention",
        """g (float[2,3,4] q, float[2,5,4] k, float[2,5,6] v) => (float[2,3,6] y) <float c = {8.0}>
        { t = Transpose<perm=[0, 2, 1]>(k) p = MatMul(q, t) s = Div(p, c) w = Softmax<axis=-1>(s) y = MatMul(w, v) }""",
    ),
    "attention with a constant bias": (
        "Attention",
        """g (float[2,3,2,4] q, float[2,3,3,4] k, float[2,3,3,4] v) => (float[2,3,2,4] y)
        <float[2,3] m = {0.0, 0.5, -10000.0, -2.0, 0.0, 1.0}>
        { t = Transpose<perm=[0, 1, 3, 2]>(k) p = MatMul(q, t) s = Add(m, p) w = Softmax(s) y = MatMul(w, v) }""",
    ),
    "keys turned twice": (
        "Attention",
        """g (float[2,3,4,5] q, float[2,6,3,5] k, float[2,3,6,5] v) => (float[2,3,4,5] y)
        { t = Transpose<perm=[0, 2, 3, 1]>(k) p = MatMul(q, t) w = Softmax(p) y = MatMul(w, v) }""",
    ),
    "a convolution without a bias": (
        "BatchNormIntoConv",
        """g (float[1,2,5] x) => (float[1,2,5] y) <float[2,1,1] w = {1.0, 2.0}, float[2] s = {1.5, 0.5},
        float[2] t = {0.25, -1.0}, float[2] m = {0.125, 2.0}, float[2] v = {1.5, 0.75}>
        { c = Conv<group=2>(x, w) y = BatchNormalization(c, s, t, m, v) }""",
    ),
    "a convolution with padding, where plain ones compute 0 · ∞": (
        "BlockedConvolution",
        "g (float[2,16,33,32] x, float[32,16,3,2] w) => (float[2,32,33,31] y) { y = Conv<pads=[1, 0, 1, 0]>(x, w) }",
    ),
    "a convolution with steps": (
        "BlockedConvolution",
        """g (float[4,16,33,33] x, float[32,16,3,3] w) => (float[4,32,17,16] y)
        { y = Conv<pads=[1, 0, 1, 0], strides=[2, 2]>(x, w) }""",
    ),
    "gradients that add up": (
        "BiasIntoGemm",
        "g (float[2,3] x, float[3,4] w, float[2,4] z) => (float[2,4] y) { p = MatMul(x, w) y = Add(p, z) }",
    ),
    "minus zero added": (
        "DropAddendZero",
        "g (float[3] x) => (float[3] y) <float c = {-0.0}> { a = Add(x, c) y = Neg(a) }",
    ),
    "pieces of a split": (
        "RejoinPieces",
        """g (float[2,6] x) => (float[2,6] y)
        { a, b = Split<axis=1, num_outputs=2>(x) c = Concat<axis=1>(a, b) y = Neg(c) }""",
    ),
    "a number between two transposes": (
        "SinkTransposeThroughArithmetic",
        """g (float[2,3,4] x) => (float[2,3,4] y) <float c = {3.0}>
        { a = Transpose<perm=[1, 2, 0]>(x) b = Sub(c, a) y = Transpose<perm=[2, 0, 1]>(b) }""",
    ),
}


@pytest.mark.parametrize("form", MORE)
def test_a_rule_applies_to_another_form_of_it(form: str) -> None:
    name, text = MORE[form]
    hits, _ = rewritten(text)
    assert hits[name], hits


LEFT = {
    "a bias that hides a whole row, which the operator answers with zeros": (
        "Attention",
        """g (float[2,3,2,4] q, float[2,3,2,4] k, float[2,3,2,4] v) => (float[2,3,2,4] y)
        <float[2,2] m = {0.0, 0.0, -3.4e38, -3.4e38}>
        { t = Transpose<perm=[0, 1, 3, 2]>(k) p = MatMul(q, t) s = Add(m, p) w = Softmax(s) y = MatMul(w, v) }""",
    ),
    "weights of attention that are returned": (
        "Attention",
        """g (float[2,3,4] q, float[2,5,4] k, float[2,5,6] v) => (float[2,3,6] y, float[2,3,5] w)
        { t = Transpose<perm=[0, 2, 1]>(k) p = MatMul(q, t) w = Softmax<axis=-1>(p) y = MatMul(w, v) }""",
    ),
    "a batch norm in training": (
        "BatchNormIntoConv",
        """g (float[2,2,5] x) => (float[2,2,5] y, float[2] n, float[2] u) <float[2,1,1] w = {1.0, 2.0},
        float[2] s = {1.5, 0.5}, float[2] t = {0.25, -1.0}, float[2] m = {0.125, 2.0}, float[2] v = {1.5, 0.75}>
        { c = Conv<group=2>(x, w) y, n, u = BatchNormalization<training_mode=1>(c, s, t, m, v) }""",
    ),
    "slices that overlap": (
        "SlicesAsSplit",
        """g (float[4] x) => (float[3] a, float[2] b)
        <int64[1] o = {0}, int64[1] two = {2}, int64[1] three = {3}, int64[1] four = {4}>
        { a = Slice(x, o, three, o) b = Slice(x, two, four, o) }""",
    ),
    "a value where the largest number is not NaN": (
        "Softmax",
        """g (float[2,8] x) => (float[2,8] y) <int64[1] axes = {1}, float other = {1.0}>
        { r = ReduceSumSquare(x, axes) c = IsNaN(r) m = ReduceMax(x, axes)
          l = Where(c, other, m) d = Sub(x, l) e = Exp(d) s = ReduceSum(e, axes) y = Div(e, s) }""",
    ),
    "a layer norm with further results": (
        "SinkReshapeThroughRowwise",
        """g (float[2,3,4] x, float[4] w) => (float[6,4] y, float[6,1] m) <int64[2] s = {6, 4}>
        { r = Reshape(x, s) y, m = LayerNormalization(r, w) }""",
    ),
    "attention that a runtime calls by the same name": (
        "AttentionRepeatsHeads",
        """g (float[2,4,12] x, float[12,12] w, float[12] b) => (float[2,4,4] y)
        { y = com.microsoft.Attention<num_heads=2>(x, w, b) }""",
    ),
}


@pytest.mark.parametrize("form", LEFT)
def test_a_rule_leaves_alone(form: str) -> None:
    name, text = LEFT[form]
    hits, _ = rewritten(text)
    assert not hits[name]


@pytest.mark.parametrize("mask", ["m = LessOrEqual(z, r)", "m = Where(t, z, low)"], ids=["boolean", "added"])
def test_a_mask_that_masks_nothing_is_dropped_on_cuda(mask: str) -> None:
    kind = "int64" if mask.startswith("m = Less") else "float"
    numbers = "{0, 1, 2}" if kind == "int64" else "{0.0, 0.0, 0.0}"
    text = f"""g (float[2,2,1,4] q, float[2,2,3,4] k, float[2,2,3,4] v) => (float[2,2,1,4] y)
        <{kind}[1,3] r = {numbers}, {kind} z = {{0}}, bool[1,3] t = {{1, 1, 1}}, float low = {{-1e9}}>
        {{ {mask} y = Attention(q, k, v, m) }}"""
    hits, operators = rewritten(text, names={"CausalMask"}, cuda=True)
    assert hits["CausalMask"] == 1
    assert operators[-1] == "Attention"
