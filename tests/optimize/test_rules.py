"""Each rule: where it applies, and where it must not. Values are compared before and after by `rewritten`."""

from __future__ import annotations

import pytest

from sardonyx.optimize.optimizer import all_rules
from tests.optimize.rewriting import rewritten

X = "float[2,3,4] x"

APPLIES = {
    "DropIdentity": f"g ({X}) => (float[2,3,4] y) {{ a = Identity(x) y = Relu(a) }}",
    "DropCast": f"g ({X}) => (float[2,3,4] y) {{ a = Cast<to=1>(x) y = Relu(a) }}",
    "JoinCasts": f"g ({X}) => (float16[2,3,4] y) {{ a = Cast<to=11>(x) y = Cast<to=10>(a) }}",
    "DropReshape": f"g ({X}) => (float[2,3,4] y) <int64[3] s = {{2, 3, 4}}> {{ a = Reshape(x, s) y = Relu(a) }}",
    "JoinReshapes": f"""g ({X}) => (float[4,6] y) <int64[2] s = {{6, 4}}, int64[2] t = {{4, 6}}>
        {{ a = Reshape(x, s) y = Reshape(a, t) }}""",
    "ViewAsReshape": f"""g ({X}) => (float[6,1,4] y) <int64[2] s = {{6, 4}}, int64[1] t = {{1}}>
        {{ a = Reshape(x, s) y = Unsqueeze(a, t) }}""",
    "DropTranspose": "g (float[2,1,4] x) => (float[1,2,4] y) { y = Transpose<perm=[1, 0, 2]>(x) }",
    "JoinTransposes": f"""g ({X}) => (float[4,2,3] y)
        {{ a = Transpose<perm=[2, 1, 0]>(x) y = Transpose<perm=[0, 2, 1]>(a) }}""",
    "DropExpand": f"g ({X}) => (float[2,3,4] y) <int64[1] s = {{1}}> {{ a = Expand(x, s) y = Relu(a) }}",
    "DropExpandBeforeBroadcast": f"""g ({X}, float[4] z) => (float[2,3,4] y) <int64[3] s = {{2, 3, 4}}>
        {{ a = Expand(z, s) y = Add(x, a) }}""",
    "SinkReshapeThroughElementwise": f"""g ({X}) => (float[6,4] y) <int64[2] s = {{6, 4}}>
        {{ a = Reshape(x, s) y = Relu(a) }}""",
    "SinkReshapeThroughRowwise": f"""g ({X}) => (float[6,4] y) <int64[2] s = {{6, 4}}>
        {{ a = Reshape(x, s) y = Softmax<axis=-1>(a) }}""",
    "SinkReshapeThroughArithmetic": """g (float[6,4] x, float[2,3,4] z) => (float[2,3,4] y) <int64[3] s = {2, 3, 4}>
        { a = Reshape(x, s) y = Add(a, z) }""",
    "DropSlice": f"""g ({X}) => (float[2,3,4] y) <int64[1] b = {{0}}, int64[1] e = {{9}}, int64[1] i = {{1}}>
        {{ a = Slice(x, b, e, i, i) y = Relu(a) }}""",
    "DropConcat": f"g ({X}) => (float[2,3,4] y) {{ a = Concat<axis=0>(x) y = Relu(a) }}",
    "DropFactorOne": f"g ({X}) => (float[2,3,4] y) <float c = {{1.0}}> {{ a = Mul(x, c) y = Relu(a) }}",
    "DropAddendZero": f"g ({X}) => (float[2,3,4] y) <float c = {{0.0}}> {{ a = Add(c, x) y = Relu(a) }}",
    "GemmTakesTransposedRight": """g (float[2,3] x, float[4,3] w, float[4] b) => (float[2,4] y)
        { t = Transpose<perm=[1, 0]>(w) y = Gemm(x, t, b) }""",
    "GemmTakesTransposedLeft": """g (float[3,2] x, float[3,4] w, float[4] b) => (float[2,4] y)
        { t = Transpose<perm=[1, 0]>(x) y = Gemm(t, w, b) }""",
    "MatricesToGemm": """g (float[2,3] x, float[4,3] w) => (float[2,4] y)
        { t = Transpose<perm=[1, 0]>(w) y = MatMul(x, t) }""",
    "BiasIntoGemm": "g (float[2,3] x, float[3,4] w, float[4] b) => (float[2,4] y) { p = MatMul(x, w) y = Add(b, p) }",
    "BiasIntoPlainGemm": """g (float[2,3] x, float[4,3] w, float[4] b) => (float[2,4] y)
        { p = Gemm<transB=1>(x, w) y = Add(p, b) }""",
    "SinkReshapeThroughProduct": """g (float[2,5,3] x, float[4,3] w) => (float[10,4] y) <int64[2] s = {10, 3}>
        { r = Reshape(x, s) y = Gemm<transB=1>(r, w) }""",
    "MatmulTakesTransposedRight": """g (float[5,2,3] x, float[5,4,3] w) => (float[5,2,4] y)
        { t = Transpose<perm=[0, 2, 1]>(w) y = MatMul(x, t) }""",
    "MatmulTakesTransposedLeft": """g (float[5,3,2] x, float[5,3,4] w) => (float[5,2,4] y)
        { t = Transpose<perm=[0, 2, 1]>(x) y = MatMul(t, w) }""",
    "ScaleIntoMatmul": """g (float[5,2,3] x, float[5,3,4] w) => (float[5,2,4] y) <float c = {0.5}>
        { p = MatMul(x, w) y = Mul(p, c) }""",
    "Silu": f"g ({X}) => (float[2,3,4] y) {{ s = Sigmoid(x) y = Mul(s, x) }}",
    "QuickGelu": f"g ({X}) => (float[2,3,4] y) <float c = {{1.702}}> {{ a = Mul(x, c) s = Sigmoid(a) y = Mul(x, s) }}",
    "TanhGelu": f"""g ({X}) => (float[2,3,4] y)
        <float h = {{0.5}}, float k = {{0.044715}}, float r = {{0.7978845608}}, float one = {{1.0}}>
        {{ q = Mul(x, x) c = Mul(q, x) a = Mul(c, k) b = Add(x, a) d = Mul(b, r) t = Tanh(d) e = Add(t, one)
           f = Mul(x, h) y = Mul(f, e) }}""",
    "ErfGelu": f"""g ({X}) => (float[2,3,4] y) <float h = {{0.5}}, float r = {{0.70710678}}, float one = {{1.0}}>
        {{ a = Mul(x, r) e = Erf(a) b = Add(e, one) c = Mul(x, h) y = Mul(c, b) }}""",
    "RmsNorm": f"""g ({X}, float[4] w) => (float[2,3,4] y) <float e = {{0.00001}}, int64[1] axes = {{-1}}>
        {{ q = Mul(x, x) m = ReduceMean(q, axes) a = Add(m, e) r = Sqrt(a) i = Reciprocal(r) n = Mul(x, i)
           y = Mul(w, n) }}""",
    "RmsNormInFloat": """g (float16[2,3,4] h, float16[4] w) => (float16[2,3,4] y)
        <float e = {0.00001}, int64[1] axes = {-1}>
        { x = Cast<to=1>(h) q = Mul(x, x) m = ReduceMean(q, axes) a = Add(m, e) r = Sqrt(a) i = Reciprocal(r)
          n = Mul(x, i) c = Cast<to=10>(n) y = Mul(w, c) }""",
    "RotaryEmbedding": """g (float[2,3,5,4] x, float[1,5,2] f) => (float[2,3,5,4] y)
        <int64[1] zero = {0}, int64[1] mid = {2}, int64[1] end = {9}, int64[1] axis = {3}, int64[1] one = {1}>
        { ff = Concat<axis=2>(f, f) c = Cos(ff) s = Sin(ff) cu = Unsqueeze(c, one) su = Unsqueeze(s, one)
          a = Slice(x, zero, mid, axis, one) b = Slice(x, mid, end, axis, one) n = Neg(b) r = Concat<axis=3>(n, a)
          p = Mul(x, cu) q = Mul(r, su) y = Add(p, q) }""",
    "RotaryInRows": """g (float[2,5,3,4] x, float[2,5,2] c, float[2,5,2] s) => (float[2,3,5,4] y)
        { t = Transpose<perm=[0, 2, 1, 3]>(x) y = RotaryEmbedding(t, c, s) }""",
    "AttentionInRows": """g (float[2,5,3,4] q, float[2,6,3,4] k, float[2,6,3,4] v) => (float[2,5,3,4] y)
        { a = Transpose<perm=[0, 2, 1, 3]>(q) b = Transpose<perm=[0, 2, 1, 3]>(k) c = Transpose<perm=[0, 2, 1, 3]>(v)
          o = Attention(a, b, c) y = Transpose<perm=[0, 2, 1, 3]>(o) }""",
    "AttentionRepeatsHeads": """g (float[2,4,5,8] q, float[2,2,6,8] k, float[2,2,6,8] v) => (float[2,4,5,8] y)
        <int64[1] two = {2}, int64[5] e = {2, 2, 2, 6, 8}, int64[4] s = {2, 4, 6, 8}>
        { a = Unsqueeze(k, two) b = Expand(a, e) c = Reshape(b, s)
          d = Unsqueeze(v, two) f = Expand(d, e) h = Reshape(f, s) y = Attention(q, c, h) }""",
}

REFUSES = {
    "JoinCasts": f"g ({X}) => (float[2,3,4] y) {{ a = Cast<to=10>(x) y = Cast<to=1>(a) }}",
    "DropTranspose": f"g ({X}) => (float[3,2,4] y) {{ y = Transpose<perm=[1, 0, 2]>(x) }}",
    "DropExpandBeforeBroadcast": """g (float[4] x, float[4] z) => (float[2,3,4] y) <int64[3] s = {2, 3, 4}>
        { a = Expand(z, s) y = Add(x, a) }""",
    "SinkReshapeThroughRowwise": f"""g ({X}) => (float[4,6] y) <int64[2] s = {{4, 6}}>
        {{ a = Reshape(x, s) y = Softmax<axis=-1>(a) }}""",
    "DropSlice": f"""g ({X}) => (float[2,2,4] y) <int64[1] b = {{1}}, int64[1] e = {{9}}, int64[1] i = {{1}}>
        {{ y = Slice(x, b, e, i, i) }}""",
    "DropFactorOne": "g (float x) => (float[3] y) <float[3] c = {1.0, 1.0, 1.0}> { y = Mul(x, c) }",
    "DropAddendZero": "g (double[3] x) => (double[3] y) <double c = {0.0000001}> { y = Add(x, c) }",
    "BiasIntoGemm": "g (float[2,3] x, float[3,4] w, float[2,4] b) => (float[2,4] y) { p = MatMul(x, w) y = Add(b, p) }",
    "MatmulTakesTransposedLeft": """g (float[3,2] x, float[3] w) => (float[2] y)
        { t = Transpose<perm=[1, 0]>(x) y = MatMul(t, w) }""",
    "ScaleIntoMatmul": """g (float[5,2,3] x, float[5,3,4] w, float c) => (float[5,2,4] y)
        { p = MatMul(x, w) y = Mul(p, c) }""",
    "Silu": "g (float[3] x, float[3] z) => (float[3] y) { s = Sigmoid(z) y = Mul(s, x) }",
    "RmsNorm": """g (float[2,3,4] x, float[4] w) => (float[2,3,4] y) <float e = {0.00001}, int64[1] axes = {1}>
        { q = Mul(x, x) m = ReduceMean(q, axes) a = Add(m, e) r = Sqrt(a) i = Reciprocal(r) n = Mul(x, i)
          y = Mul(w, n) }""",
    "RotaryEmbedding": """g (float[2,3,5,4] x, float[1,1,5,4] c, float[1,1,5,4] s) => (float[2,3,5,4] y)
        <int64[1] zero = {0}, int64[1] mid = {2}, int64[1] end = {9}, int64[1] axis = {3}, int64[1] one = {1}>
        { a = Slice(x, zero, mid, axis, one) b = Slice(x, mid, end, axis, one) n = Neg(b) r = Concat<axis=3>(n, a)
          p = Mul(x, c) q = Mul(r, s) y = Add(p, q) }""",
    "SinkReshapeThroughProduct": """g (float[2,3,5] x, float[4,6] w) => (float[5,4] y) <int64[2] s = {5, 6}>
        { r = Reshape(x, s) y = Gemm<transB=1>(r, w) }""",
    "AttentionInRows": """g (float[2,5,3,4] q, float[2,3,6,4] k, float[2,3,6,4] v) => (float[2,5,3,4] y)
        { a = Transpose<perm=[0, 2, 1, 3]>(q) o = Attention(a, k, v) y = Transpose<perm=[0, 2, 1, 3]>(o) }""",
}


@pytest.mark.parametrize("name", APPLIES)
def test_a_rule_applies_and_keeps_the_values(name: str) -> None:
    hits, _ = rewritten(APPLIES[name])
    assert hits[name], hits


@pytest.mark.parametrize("name", REFUSES)
def test_a_rule_refuses_what_it_would_get_wrong(name: str) -> None:
    hits, _ = rewritten(REFUSES[name])
    assert not hits[name]


def test_every_rule_has_a_test_and_states_its_algebra() -> None:
    rules = all_rules()
    assert {rule.name for rule in rules} == set(APPLIES)
    assert all(rule.doc for rule in rules)


def test_equal_nodes_become_one() -> None:
    hits, operators = rewritten("g (float[3] x) => (float[3] y) { a = Exp(x) b = Exp(x) y = Add(a, b) }")
    assert hits["ShareCommon"] == 1
    assert operators == ["Exp", "Add"]


def test_constants_are_folded() -> None:
    hits, operators = rewritten(
        "g (float[3] x) => (float[3] y) <float a = {2.0}, float b = {3.0}> { c = Add(a, b) y = Mul(x, c) }"
    )
    assert hits["FoldConstant"] == 1
    assert operators == ["Mul"]


def test_what_nothing_reads_is_removed() -> None:
    _, operators = rewritten("g (float[3] x) => (float[3] y) { a = Exp(x) b = Sin(a) y = Relu(x) }")
    assert operators == ["Relu"]


def test_a_value_read_elsewhere_is_kept() -> None:
    _, operators = rewritten("g (float[3] x) => (float[3] y, float[3] s) { s = Sigmoid(x) y = Mul(s, x) }")
    assert operators == ["Sigmoid", "Mul"]


def test_an_output_that_becomes_another_is_still_returned() -> None:
    _, operators = rewritten("g (float[3] x) => (float[3] y, float[3] z) { y = Relu(x) z = Identity(y) }")
    assert sorted(operators) == ["Identity", "Relu"]
