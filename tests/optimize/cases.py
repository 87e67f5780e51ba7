"""For every rule: a model it applies to, and one it must leave alone.

`@A` to `@F` are sizes and `@(A*B)` is computed from them; `@T` is a dtype, `@N` its number. A test fills them in.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

FLOATS = ("float", "double", "float16")
ANY = (*FLOATS, "int64")
NUMBERS = {"float": 1, "int64": 7, "float16": 10, "double": 11}
SIZES = {"A": 2, "B": 3, "C": 4, "D": 5, "E": 2, "F": 3}

X = "@T[@A,@B,@C] x"
Y = "@T[@A,@B,@C] y"
HALVES = """<int64[1] zero = {0}, int64[1] mid = {@C}, int64[1] end = {99}, int64[1] axis = {3}, int64[1] one = {1}>"""
HEADS = "@T[@A,@E,@B,@C]"
IMAGE = "@T[@A,@B,@C,@D] x"
TO_FIRST = "Transpose<perm=[0, 3, 1, 2]>"


@dataclass(frozen=True)
class Case:
    """Models that show a rule: `applies` in every dtype of `types`; `refuses` for the sizes that stand above."""

    applies: str
    refuses: str
    types: tuple[str, ...] = ("float",)


def filled(text: str, dtype: str = "float", sizes: dict[str, int] = SIZES) -> str:
    """The model's text for one dtype and these sizes."""

    def value(match: re.Match[str]) -> str:
        expression = match[1] or match[2]
        known = {"T": dtype, "N": NUMBERS[dtype], **sizes}
        return str(eval(expression, {}, known))

    return re.sub(r"@(?:\(([^()]*)\)|([A-FNT]))", value, text)


def drawn(text: str, types: tuple[str, ...], seed: int, choice: Sequence[int] = (1, 2, 3, 4, 5, 8)) -> str:
    """The model's text for sizes and a dtype that the seed decides."""
    generator = random.Random(seed)
    sizes = {name: generator.choice(choice) for name in SIZES}
    return filled(text, generator.choice(types), sizes)


CASES = {
    "DropIdentity": Case(
        f"g ({X}) => ({Y}) {{ a = Identity(x) y = Relu(a) }}",
        f"g ({X}) => ({Y}) {{ y = Identity(x) }}",
        FLOATS,
    ),
    "DropCast": Case(
        "g (float[@A,@B] x) => (float[@A,@B] y) { a = Cast<to=1>(x) y = Relu(a) }",
        "g (float[@A,@B] x) => (double[@A,@B] y) { y = Cast<to=11>(x) }",
    ),
    "JoinCasts": Case(
        "g (float[@A,@B] x) => (float16[@A,@B] y) { a = Cast<to=11>(x) y = Cast<to=10>(a) }",
        "g (float[@A,@B] x) => (float[@A,@B] y) { a = Cast<to=10>(x) y = Cast<to=1>(a) }",
    ),
    "DropReshape": Case(
        f"g ({X}) => ({Y}) <int64[3] s = {{@A, @B, @C}}> {{ a = Reshape(x, s) y = Neg(a) }}",
        f"g ({X}) => (@T[@(A*B),@C] y) <int64[2] s = {{@(A*B), @C}}> {{ y = Reshape(x, s) }}",
        ANY,
    ),
    "JoinReshapes": Case(
        f"""g ({X}) => (@T[@C,@(A*B)] y) <int64[2] s = {{@(A*B), @C}}, int64[2] t = {{@C, @(A*B)}}>
        {{ a = Reshape(x, s) y = Reshape(a, t) }}""",
        f"""g ({X}) => (@T[@C,@(A*B)] y) <int64[2] s = {{@(A*B), @C}}, int64[2] t = {{@C, @(A*B)}}>
        {{ a = Reshape(x, s) b = Transpose<perm=[1, 0]>(a) y = Reshape(b, t) }}""",
        ANY,
    ),
    "ViewAsReshape": Case(
        f"""g ({X}) => (@T[@(A*B),1,@C] y) <int64[2] s = {{@(A*B), @C}}, int64[1] t = {{1}}>
        {{ a = Reshape(x, s) y = Unsqueeze(a, t) }}""",
        f"g ({X}) => (@T[@A,1,@B,@C] y) <int64[1] t = {{1}}> {{ y = Unsqueeze(x, t) }}",
        ANY,
    ),
    "DropTranspose": Case(
        "g (@T[@A,1,@C] x) => (@T[1,@A,@C] y) { y = Transpose<perm=[1, 0, 2]>(x) }",
        f"g ({X}) => (@T[@B,@A,@C] y) {{ y = Transpose<perm=[1, 0, 2]>(x) }}",
        ANY,
    ),
    "JoinTransposes": Case(
        f"g ({X}) => (@T[@C,@A,@B] y) {{ a = Transpose(x) y = Transpose<perm=[0, 2, 1]>(a) }}",
        f"g ({X}) => (@T[@C,@A,@B] y) {{ a = Transpose(x) b = Softmax<axis=0>(a) y = Transpose<perm=[0, 2, 1]>(b) }}",
        FLOATS,
    ),
    "SinkTransposeThroughElementwise": Case(
        f"g ({X}) => (@T[@C,@A,@B] y) {{ a = Transpose(x) b = Neg(a) y = Transpose<perm=[0, 2, 1]>(b) }}",
        f"g ({X}) => (@T[@C,@B,@A] y) {{ a = Transpose(x) y = Neg(a) }}",
        ANY,
    ),
    "SinkTransposeThroughArithmetic": Case(
        f"""g ({X}, @T[@A,1,@C] z) => (@T[@C,@B,@A] y)
        {{ a = Transpose<perm=[2, 1, 0]>(x) b = Transpose(z) y = Sub(a, b) }}""",
        f"""g ({X}, @T[@A,@C,@B] z) => (@T[@C,@B,@A] y)
        {{ a = Transpose<perm=[2, 1, 0]>(x) b = Transpose<perm=[1, 2, 0]>(z) y = Sub(a, b) }}""",
        FLOATS,
    ),
    "DropExpand": Case(
        f"g ({X}) => ({Y}) <int64[1] s = {{1}}> {{ a = Expand(x, s) y = Neg(a) }}",
        "g (@T[@A,1] x) => (@T[@A,@B] y) <int64[2] s = {1, @B}> { y = Expand(x, s) }",
        ANY,
    ),
    "DropExpandBeforeBroadcast": Case(
        f"g ({X}, @T[@C] z) => ({Y}) <int64[3] s = {{@A, @B, @C}}> {{ a = Expand(z, s) y = Add(x, a) }}",
        f"g (@T[@C] x, @T[@C] z) => ({Y}) <int64[3] s = {{@A, @B, @C}}> {{ a = Expand(z, s) y = Add(x, a) }}",
        ANY,
    ),
    "SinkReshapeThroughElementwise": Case(
        f"g ({X}) => (@T[@(A*B),@C] y) <int64[2] s = {{@(A*B), @C}}> {{ a = Reshape(x, s) y = Relu(a) }}",
        f"""g ({X}) => (@T[@(A*B),@C] y, @T[@(A*B),@C] a) <int64[2] s = {{@(A*B), @C}}>
        {{ a = Reshape(x, s) y = Relu(a) }}""",
        FLOATS,
    ),
    "SinkReshapeThroughRowwise": Case(
        f"g ({X}) => (@T[@(A*B),@C] y) <int64[2] s = {{@(A*B), @C}}> {{ a = Reshape(x, s) y = Softmax<axis=-1>(a) }}",
        f"g ({X}) => (@T[@C,@(A*B)] y) <int64[2] s = {{@C, @(A*B)}}> {{ a = Reshape(x, s) y = Softmax<axis=-1>(a) }}",
        FLOATS,
    ),
    "SinkReshapeThroughArithmetic": Case(
        f"g (@T[@(A*B),@C] x, {X.replace(' x', ' z')}) => ({Y}) <int64[3] s = {{@A, @B, @C}}>"
        "{ a = Reshape(x, s) y = Sub(z, a) }",
        f"g (@T[@(A*B),@C] x, @T[@A,1,@C] z) => ({Y}) <int64[3] s = {{@A, @B, @C}}>"
        "{ a = Reshape(x, s) y = Add(a, z) }",
        ANY,
    ),
    "DropSlice": Case(
        f"""g ({X}) => ({Y}) <int64[1] b = {{0}}, int64[1] e = {{9}}, int64[1] i = {{1}}>
        {{ a = Slice(x, b, e, i, i) y = Neg(a) }}""",
        f"""g ({X}) => ({Y}) <int64[1] b = {{-1}}, int64[1] e = {{-99}}, int64[1] i = {{1}}, int64[1] s = {{-1}}>
        {{ y = Slice(x, b, e, i, s) }}""",
        ANY,
    ),
    "DropConcat": Case(
        f"g ({X}) => ({Y}) {{ a = Concat<axis=0>(x) y = Neg(a) }}",
        f"g ({X}) => (@T[@(A*2),@B,@C] y) {{ y = Concat<axis=0>(x, x) }}",
        ANY,
    ),
    "RejoinPieces": Case(
        """g (@T[@A,@(B+C)] x) => (@T[@A,@(B+C)] y)
        <int64[1] o = {0}, int64[1] p = {@B}, int64[1] q = {@(B+C)}, int64[1] i = {1}>
        { a = Slice(x, o, p, i) b = Slice(x, p, q, i, i) c = Concat<axis=-1>(a, b) y = Neg(c) }""",
        """g (@T[@A,@(B+C)] x) => (@T[@A,@(B+C)] y)
        <int64[1] o = {0}, int64[1] p = {@B}, int64[1] q = {@(B+C)}, int64[1] i = {1}>
        { a = Slice(x, o, p, i) b = Slice(x, p, q, i, i) c = Concat<axis=-1>(b, a) y = Neg(c) }""",
        ANY,
    ),
    "SlicesAsSplit": Case(
        """g (@T[@A,@(B+C+D)] x) => (@T[@A,@B] a, @T[@A,@C] b, @T[@A,@D] c)
        <int64[1] o = {0}, int64[1] p = {@B}, int64[1] q = {@(B+C)}, int64[1] r = {99}, int64[1] i = {1}>
        { c = Slice(x, q, r, i, i) a = Slice(x, o, p, i, i) b = Slice(x, p, q, i) }""",
        """g (@T[@A,@(B+C+D)] x) => (@T[@A,@B] a, @T[@A,@D] c)
        <int64[1] o = {0}, int64[1] p = {@B}, int64[1] q = {@(B+C)}, int64[1] r = {99}, int64[1] i = {1}>
        { a = Slice(x, o, p, i, i) c = Slice(x, q, r, i, i) }""",
        ANY,
    ),
    "DropFactorOne": Case(
        f"g ({X}) => ({Y}) <float[1] d = {{1.0}}> {{ c = Cast<to=@N>(d) a = Mul(x, c) y = Neg(a) }}",
        "g (float x) => (float[3] y) <float[3] c = {1.0, 1.0, 1.0}> { y = Mul(x, c) }",
        ANY,
    ),
    "DropAddendZero": Case(
        "g (int64[@A,@B] x) => (int64[@A,@B] y) <int64 c = {0}> { a = Add(c, x) y = Neg(a) }",
        "g (float[3] x) => (float[3] y) <float c = {0.0}> { y = Add(x, c) }",
        ("int64",),
    ),
    "DropDoubleNegation": Case(
        f"g ({X}) => ({Y}) {{ a = Neg(x) b = Neg(a) y = Abs(b) }}",
        f"g ({X}) => ({Y}) {{ a = Neg(x) b = Abs(a) y = Neg(b) }}",
        ANY,
    ),
    "SquareAsProduct": Case(
        f"g ({X}) => ({Y}) <float d = {{2.0}}> {{ c = Cast<to=@N>(d) y = Pow(x, c) }}",
        f"g ({X}) => ({Y}) <float d = {{2.5}}> {{ c = Cast<to=@N>(d) y = Pow(x, c) }}",
        FLOATS,
    ),
    "OneOverAsReciprocal": Case(
        f"g ({X}) => ({Y}) <float d = {{1.0}}> {{ c = Cast<to=@N>(d) y = Div(c, x) }}",
        f"g ({X}) => ({Y}) <float d = {{2.0}}> {{ c = Cast<to=@N>(d) y = Div(c, x) }}",
        FLOATS,
    ),
    "DivideByPowerOfTwo": Case(
        f"g ({X}) => ({Y}) <float[1] d = {{-8.0}}> {{ c = Cast<to=@N>(d) y = Div(x, c) }}",
        f"g ({X}) => ({Y}) <float d = {{3.0}}> {{ c = Cast<to=@N>(d) y = Div(x, c) }}",
        FLOATS,
    ),
    "ClampAsClip": Case(
        f"""g ({X}) => ({Y}) <float d = {{-0.5}}, float[1] e = {{0.75}}>
        {{ l = Cast<to=@N>(d) h = Cast<to=@N>(e) a = Max(x, l) y = Min(h, a) }}""",
        f"g ({X}) => ({Y}) <float l = {{1.0}}, float h = {{0.0}}> {{ a = Max(x, l) y = Min(a, h) }}",
        ("float", "double", "int64"),
    ),
    "DropDoubleNot": Case(
        "g (bool[@A,@B] x) => (bool[@A,@B] y) { a = Not(x) b = Not(a) y = Or(b, x) }",
        "g (bool[@A,@B] x) => (bool[@A,@B] y) { y = Not(x) }",
    ),
    "NotInsteadOfEqual": Case(
        "g (bool[@A,@B] x) => (bool[@A,@B] y) <int64 o = {0}> { a = Cast<to=7>(x) y = Equal(a, o) }",
        "g (float[@A,@B] x) => (bool[@A,@B] y) <int64 o = {0}> { a = Cast<to=7>(x) y = Equal(a, o) }",
    ),
    "WhereNot": Case(
        f"g ({X}, bool[@B,1] m, @T[@C] z) => ({Y}) {{ n = Not(m) y = Where(n, x, z) }}",
        f"g ({X}, bool[@B,1] m, @T[@C] z) => ({Y}) {{ y = Where(m, x, z) }}",
        ANY,
    ),
    "DropWhere": Case(
        f"g ({X}, bool[@C] m) => ({Y}) {{ a = Where(m, x, x) y = Neg(a) }}",
        "g (@T[1,@C] x, bool[@B,@C] m) => (@T[@B,@C] y) { a = Where(m, x, x) y = Neg(a) }",
        ANY,
    ),
    "GemmTakesTransposedRight": Case(
        "g (@T[@A,@B] x, @T[@C,@B] w, @T[@C] b) => (@T[@A,@C] y) { t = Transpose<perm=[1, 0]>(w) y = Gemm(x, t, b) }",
        "g (@T[@A,@B] x, @T[@B,@C] w, @T[@C] b) => (@T[@A,@C] y) { y = Gemm(x, w, b) }",
        ("float", "double"),
    ),
    "GemmTakesTransposedLeft": Case(
        "g (@T[@B,@A] x, @T[@B,@C] w, @T[@C] b) => (@T[@A,@C] y) { t = Transpose(x) y = Gemm(t, w, b) }",
        "g (@T[@B,@A] x, @T[@B,@C] w, @T[@C] b) => (@T[@A,@C] y) { y = Gemm<transA=1>(x, w, b) }",
        ("float", "double"),
    ),
    "MatricesToGemm": Case(
        "g (@T[@A,@B] x, @T[@C,@B] w) => (@T[@A,@C] y) { t = Transpose(w) y = MatMul(x, t) }",
        "g (@T[@D,@A,@B] x, @T[@C,@B] w) => (@T[@D,@A,@C] y) { t = Transpose(w) y = MatMul(x, t) }",
        ("float", "double"),
    ),
    "BiasIntoGemm": Case(
        "g (@T[@A,@B] x, @T[@B,@C] w, @T[@C] b) => (@T[@A,@C] y) { p = MatMul(x, w) y = Add(b, p) }",
        "g (@T[@A,@B] x, @T[@B,1] w, @T[@C] b) => (@T[@A,@C] y) { p = MatMul(x, w) y = Add(b, p) }",
        ("float", "double"),
    ),
    "BiasIntoPlainGemm": Case(
        "g (@T[@A,@B] x, @T[@C,@B] w, @T[@C] b) => (@T[@A,@C] y) { p = Gemm<transB=1>(x, w) y = Add(p, b) }",
        "g (@T[@A,@B] x, @T[1,@B] w, @T[@C] b) => (@T[@A,@C] y) { p = Gemm<transB=1>(x, w) y = Add(p, b) }",
        ("float", "double"),
    ),
    "ScaleIntoGemm": Case(
        """g (@T[@A,@B] x, @T[@C,@B] w, @T[@C] b) => (@T[@A,@C] y) <float d = {0.3}>
        { c = Cast<to=@N>(d) p = Gemm<transB=1, beta=2.0>(x, w, b) y = Div(p, c) }""",
        """g (@T[@A,@B] x, @T[@C,@B] w) => (@T[1,@A,@C] y) <float[1,1,1] d = {0.3}>
        { c = Cast<to=@N>(d) p = Gemm<transB=1>(x, w) y = Div(p, c) }""",
    ),
    "SinkReshapeThroughProduct": Case(
        """g (@T[@A,@B,@C] x, @T[@D,@C] w) => (@T[@(A*B),@D] y) <int64[2] s = {@(A*B), @C}>
        { r = Reshape(x, s) y = Gemm<transB=1>(r, w) }""",
        """g (@T[@A,@B,@D] x, @T[@C,@(A*B)] w) => (@T[@D,@C] y) <int64[2] s = {@D, @(A*B)}>
        { r = Reshape(x, s) y = Gemm<transB=1>(r, w) }""",
        ("float", "double"),
    ),
    "SinkReshapeThroughBatchedProduct": Case(
        """g (@T[@A,@B,@C,@D] a, @T[@A,@B,@D,@E] b) => (@T[@(A*B),@C,@E] y)
        <int64[3] s = {@(A*B), @C, @D}, int64[3] t = {@(A*B), @D, @E}>
        { p = Reshape(a, s) q = Reshape(b, t) y = MatMul(p, q) }""",
        """g (@T[@A,@B,@C,@D] a, @T[@B,@A,@D,@E] b) => (@T[@(A*B),@C,@E] y)
        <int64[3] s = {@(A*B), @C, @D}, int64[3] t = {@(A*B), @D, @E}>
        { p = Reshape(a, s) q = Reshape(b, t) y = MatMul(p, q) }""",
        ("float", "double"),
    ),
    "MatmulTakesTransposedRight": Case(
        """g (@T[@D,@A,@B] x, @T[@D,@C,@B] w) => (@T[@D,@A,@C] y)
        { t = Transpose<perm=[0, 2, 1]>(w) y = MatMul(x, t) }""",
        "g (@T[@B] x, @T[@C,@B] w) => (@T[@C] y) { t = Transpose(w) y = MatMul(x, t) }",
        ("float", "double"),
    ),
    "MatmulTakesTransposedLeft": Case(
        """g (@T[@D,@B,@A] x, @T[@D,@B,@C] w) => (@T[@D,@A,@C] y)
        { t = Transpose<perm=[0, 2, 1]>(x) y = MatMul(t, w) }""",
        "g (@T[@B,@A] x, @T[@B] w) => (@T[@A] y) { t = Transpose(x) y = MatMul(t, w) }",
        ("float", "double"),
    ),
    "ScaleIntoMatmul": Case(
        """g (@T[@D,@A,@B] x, @T[@D,@B,@C] w) => (@T[@D,@A,@C] y) <float c = {0.3}>
        { p = MatMul(x, w) y = Div(p, c) }""",
        """g (@T[@D,@A,@B] x, @T[@D,@B,@C] w) => (@T[1,@D,@A,@C] y) <float[1,1,1,1] c = {0.3}>
        { p = MatMul(x, w) y = Mul(p, c) }""",
    ),
    "ScaledOperandIntoMatmul": Case(
        """g (@T[@D,@A,@B] x, @T[@B,@C] w) => (@T[@D,@A,@C] y) <float c = {0.3}, float[1] d = {4.0}>
        { p = Mul(c, x) q = Div(w, d) y = MatMul(p, q) }""",
        """g (@T[@D,@A,@B] x, @T[@B,@C] w) => (@T[@D,@A,@C] y) <float c = {0.0}>
        { p = Mul(c, x) y = MatMul(p, w) }""",
    ),
    "Silu": Case(
        f"g ({X}) => ({Y}) {{ s = Sigmoid(x) y = Mul(s, x) }}",
        f"g ({X}, @T[@C] z) => ({Y}) {{ s = Sigmoid(z) y = Mul(s, x) }}",
    ),
    "QuickGelu": Case(
        f"g ({X}) => ({Y}) <float c = {{1.702}}> {{ a = Mul(x, c) s = Sigmoid(a) y = Mul(x, s) }}",
        "g (@T[@C] x) => (@T[1,@C] y) <float[1,1] c = {1.702}> { a = Mul(x, c) s = Sigmoid(a) y = Mul(x, s) }",
    ),
    "TanhGelu": Case(
        f"""g ({X}) => ({Y})
        <float h = {{0.5}}, float k = {{0.044715}}, float r = {{0.7978845608}}, float one = {{1.0}},
         float three = {{3.0}}>
        {{ c = Pow(x, three) a = Mul(c, k) b = Add(x, a) d = Mul(b, r) t = Tanh(d) e = Add(t, one)
           f = Mul(x, h) y = Mul(f, e) }}""",
        f"""g ({X}) => ({Y})
        <float h = {{0.5}}, float k = {{0.044}}, float r = {{0.7978845608}}, float one = {{1.0}},
         float three = {{3.0}}>
        {{ c = Pow(x, three) a = Mul(c, k) b = Add(x, a) d = Mul(b, r) t = Tanh(d) e = Add(t, one)
           f = Mul(x, h) y = Mul(f, e) }}""",
    ),
    "ErfGelu": Case(
        f"""g ({X}) => ({Y}) <float h = {{0.5}}, float r = {{0.70710678}}, float one = {{1.0}}>
        {{ a = Mul(x, r) e = Erf(a) b = Add(e, one) c = Mul(x, h) y = Mul(c, b) }}""",
        f"""g ({X}) => ({Y}) <float h = {{0.5}}, float r = {{0.7}}, float one = {{1.0}}>
        {{ a = Mul(x, r) e = Erf(a) b = Add(e, one) c = Mul(x, h) y = Mul(c, b) }}""",
    ),
    "Softmax": Case(
        f"""g ({X}) => ({Y}) <int64[1] i = {{1}}>
        {{ m = ReduceMax(x, i) d = Sub(x, m) e = Exp(d) s = ReduceSum(e, i) y = Div(e, s) }}""",
        f"""g ({X}) => ({Y}) <int64[1] i = {{1}}, int64[1] j = {{2}}>
        {{ m = ReduceMax(x, j) d = Sub(x, m) e = Exp(d) s = ReduceSum(e, i) y = Div(e, s) }}""",
    ),
    "LogSoftmax": Case(
        f"""g ({X}) => ({Y}) <int64[1] i = {{-1}}>
        {{ m = ReduceMax(x, i) d = Sub(x, m) e = Exp(d) s = ReduceSum(e, i) l = Log(s) y = Sub(d, l) }}""",
        f"""g ({X}) => ({Y}) <int64[1] i = {{-1}}>
        {{ m = ReduceMin(x, i) d = Sub(x, m) e = Exp(d) s = ReduceSum(e, i) l = Log(s) y = Sub(d, l) }}""",
    ),
    "SumAsMean": Case(
        f"""g ({X}) => (@T[@A] y) <int64[2] i = {{1, -1}}, float n = {{@(B*C)}}>
        {{ c = Cast<to=@N>(n) s = ReduceSum<keepdims=0>(x, i) y = Div(s, c) }}""",
        f"""g ({X}) => (@T[@A] y) <int64[2] i = {{1, -1}}, float n = {{@(B*C-1)}}>
        {{ c = Cast<to=@N>(n) s = ReduceSum<keepdims=0>(x, i) y = Div(s, c) }}""",
        ("float", "double"),
    ),
    "RmsNorm": Case(
        f"""g ({X}, @T[@C] w) => ({Y}) <float d = {{0.00001}}, int64[1] axes = {{-1}}, float t = {{2.0}}>
        {{ e = Cast<to=@N>(d) two = Cast<to=@N>(t) q = Pow(x, two) m = ReduceMean(q, axes) a = Add(e, m) r = Sqrt(a)
           n = Div(x, r) y = Mul(w, n) }}""",
        f"""g ({X}, @T[@C] w) => ({Y}) <float d = {{0.00001}}, int64[1] axes = {{1}}>
        {{ e = Cast<to=@N>(d) q = Mul(x, x) m = ReduceMean(q, axes) a = Add(m, e) r = Sqrt(a) i = Reciprocal(r)
           n = Mul(x, i) y = Mul(w, n) }}""",
    ),
    "LayerNorm": Case(
        f"""g ({X}) => ({Y}) <float d = {{0.00001}}, int64[1] axes = {{2}}>
        {{ e = Cast<to=@N>(d) m = ReduceMean(x, axes) z = Sub(x, m) q = Mul(z, z) v = ReduceMean(q, axes) a = Add(v, e)
           r = Sqrt(a) i = Reciprocal(r) y = Mul(z, i) }}""",
        f"""g ({X}) => ({Y}) <float d = {{0.00001}}, int64[1] axes = {{1}}>
        {{ e = Cast<to=@N>(d) m = ReduceMean(x, axes) z = Sub(x, m) q = Mul(z, z) v = ReduceMean(q, axes) a = Add(v, e)
           r = Sqrt(a) y = Div(z, r) }}""",
    ),
    "NormTakesWeight": Case(
        f"""g ({X}, @T[@C] w) => ({Y}) <float d = {{0.00001}}, float o = {{1.0}}, int64[1] axes = {{-1}}>
        {{ e = Cast<to=@N>(d) one = Cast<to=@N>(o) u = Add(w, one) q = Mul(x, x) m = ReduceMean(q, axes) a = Add(m, e)
           r = Sqrt(a) i = Reciprocal(r) n = Mul(x, i) y = Mul(u, n) }}""",
        f"g ({X}, @T[@C] w, @T[@C] u) => ({Y}) {{ n = RMSNormalization(x, w) y = Mul(n, u) }}",
    ),
    "NormTakesBias": Case(
        f"g ({X}, @T[@C] w, @T[@C] b) => ({Y}) {{ n = LayerNormalization(x, w) y = Add(b, n) }}",
        f"g ({X}, @T[@C] w, @T[@B,1] b) => ({Y}) {{ n = LayerNormalization(x, w) y = Add(b, n) }}",
        ("float", "double"),
    ),
    "RmsNormInFloat": Case(
        """g (float16[@A,@B,@C] h, float16[@C] w) => (float16[@A,@B,@C] y)
        <float e = {0.00001}, int64[1] axes = {-1}>
        { x = Cast<to=1>(h) q = Mul(x, x) m = ReduceMean(q, axes) a = Add(m, e) r = Sqrt(a) i = Reciprocal(r)
          n = Mul(x, i) c = Cast<to=10>(n) y = Mul(w, c) }""",
        """g (float16[@A,@B,@C] h, float16[@C] w) => (float16[@A,@B,@C] y)
        <double e = {0.00001}, int64[1] axes = {-1}>
        { x = Cast<to=11>(h) q = Mul(x, x) m = ReduceMean(q, axes) a = Add(m, e) r = Sqrt(a) i = Reciprocal(r)
          n = Mul(x, i) c = Cast<to=10>(n) y = Mul(w, c) }""",
    ),
    "BatchNormIntoConv": Case(
        """g (@T[@A,1,@(B+2)] x) => (@T[@A,2,@B] y) <float[2,1,3] w = {1.0, 2.0, -1.0, 0.5, 0.25, 3.0},
        float[2] b = {0.5, 1.0}, float[2] s = {1.5, 0.5}, float[2] t = {0.25, -1.0}, float[2] m = {0.125, 2.0},
        float[2] v = {1.5, 0.75}>
        { c = Conv(x, w, b) y = BatchNormalization<epsilon=0.001>(c, s, t, m, v) }""",
        """g (@T[@A,1,@(B+2)] x, float[2,1,3] w) => (@T[@A,2,@B] y) <float[2] b = {0.5, 1.0},
        float[2] s = {1.5, 0.5}, float[2] t = {0.25, -1.0}, float[2] m = {0.125, 2.0}, float[2] v = {1.5, 0.75}>
        { c = Conv(x, w, b) y = BatchNormalization<epsilon=0.001>(c, s, t, m, v) }""",
    ),
    "RotaryEmbedding": Case(
        f"""g (@T[@A,@B,@D,@(C*2)] x, @T[1,@D,@C] f) => (@T[@A,@B,@D,@(C*2)] y) {HALVES}
        {{ ff = Concat<axis=2>(f, f) c = Cos(ff) s = Sin(ff) cu = Unsqueeze(c, one) su = Unsqueeze(s, one)
          a = Slice(x, zero, mid, axis, one) b = Slice(x, mid, end, axis, one) n = Neg(b) r = Concat<axis=3>(n, a)
          p = Mul(x, cu) q = Mul(r, su) y = Add(p, q) }}""",
        f"""g (@T[@A,@B,@D,@(C*2)] x, @T[1,1,@D,@(C*2)] c, @T[1,1,@D,@(C*2)] s) => (@T[@A,@B,@D,@(C*2)] y) {HALVES}
        {{ a = Slice(x, zero, mid, axis, one) b = Slice(x, mid, end, axis, one) n = Neg(b) r = Concat<axis=3>(n, a)
          p = Mul(x, c) q = Mul(r, s) y = Add(p, q) }}""",
    ),
    "RotaryInRows": Case(
        """g (@T[@A,@D,@B,@(C*2)] x, @T[@A,@D,@C] c, @T[@A,@D,@C] s) => (@T[@A,@B,@D,@(C*2)] y)
        { t = Transpose<perm=[0, 2, 1, 3]>(x) y = RotaryEmbedding(t, c, s) }""",
        """g (@T[@D,@A,@B,@(C*2)] x, @T[@A,@D,@C] c, @T[@A,@D,@C] s) => (@T[@A,@B,@D,@(C*2)] y)
        { t = Transpose<perm=[1, 2, 0, 3]>(x) y = RotaryEmbedding(t, c, s) }""",
    ),
    "Attention": Case(
        """g (@T[@A,@E,@B,@C] q, @T[@A,@E,@D,@C] k, @T[@A,@E,@D,@F] v) => (@T[@A,@E,@B,@F] y) <float c = {0.3}>
        { t = Transpose<perm=[0, 1, 3, 2]>(k) p = MatMul(q, t) s = Mul(p, c) w = Softmax<axis=-1>(s)
          y = MatMul(w, v) }""",
        """g (@T[@A,@E,@B,@C] q, @T[@A,@E,@D,@C] k, @T[@A,@E,@D,@F] v, @T[@B,@D] m) => (@T[@A,@E,@B,@F] y)
        { t = Transpose<perm=[0, 1, 3, 2]>(k) p = MatMul(q, t) s = Add(p, m) w = Softmax<axis=-1>(s)
          y = MatMul(w, v) }""",
    ),
    "DropOpenMask": Case(
        """g (@T[@A,@E,@B,@C] q, @T[@A,@E,@D,@C] k, @T[@A,@E,@D,@C] v) => (@T[@A,@E,@B,@C] y)
        <bool one = {1}, int64[4] s = {@A, 1, @B, @D}> { m = Expand(one, s) y = Attention(q, k, v, m) }""",
        """g (@T[@A,@E,2,@C] q, @T[@A,@E,2,@C] k, @T[@A,@E,2,@C] v) => (@T[@A,@E,2,@C] y)
        <bool[2,2] m = {1, 0, 1, 1}> { y = Attention(q, k, v, m) }""",
    ),
    "ProjectionsIntoAttention": Case(
        """g (@T[@(A*B),2] x) => (@T[@A,@B,4] y) <int64[3] s = {@A, @B, 4},
        float[4,2] u = {1.0, 2.0, -1.0, 0.5, 0.25, 3.0, 0.5, -0.5}, float[4] p = {0.5, 1.0, -1.0, 0.25},
        float[4,2] v = {0.5, -2.0, 1.0, 0.25, 0.75, 1.0, -0.5, 1.5}, float[4] q = {1.5, 0.0, -1.0, 0.75},
        float[4,2] w = {-1.0, 1.0, 0.5, 0.5, 1.25, -3.0, 2.5, 0.5}, float[4] r = {0.25, -1.0, 1.0, 0.5}>
        { a = Gemm<transB=1>(x, u, p) b = Gemm<transB=1>(x, v, q) c = Gemm<transB=1>(x, w, r)
          d = Reshape(a, s) e = Reshape(b, s) f = Reshape(c, s)
          y = Attention<q_num_heads=2, kv_num_heads=2, scale=0.5>(d, e, f) }""",
        """g (@T[@(A*B),2] x, @T[@(A*B),2] z) => (@T[@A,@B,4] y) <int64[3] s = {@A, @B, 4},
        float[4,2] u = {1.0, 2.0, -1.0, 0.5, 0.25, 3.0, 0.5, -0.5}, float[4] p = {0.5, 1.0, -1.0, 0.25}>
        { a = Gemm<transB=1>(x, u, p) b = Gemm<transB=1>(z, u, p) c = Gemm<transB=1>(x, u, p)
          d = Reshape(a, s) e = Reshape(b, s) f = Reshape(c, s)
          y = Attention<q_num_heads=2, kv_num_heads=2, scale=0.5>(d, e, f) }""",
    ),
    "AttentionTakesScale": Case(
        """g (@T[@(A*B),2] x, @T[@A,@B,4] k) => (@T[@A,@B,4] y) <int64[3] s = {@A, @B, 4},
        float[4,2] u = {1.0, 2.0, -1.0, 0.5, 0.25, 3.0, 0.5, -0.5}, float[4] p = {0.5, 1.0, -1.0, 0.25}>
        { a = Gemm<transB=1, alpha=0.5, beta=0.5>(x, u, p) q = Reshape(a, s)
          y = Attention<q_num_heads=2, kv_num_heads=2, scale=0.7>(q, k, k) }""",
        """g (@T[@(A*B),2] x, @T[@A,@B,4] k) => (@T[@A,@B,4] y) <int64[3] s = {@A, @B, 4},
        float[4,2] u = {1.0, 2.0, -1.0, 0.5, 0.25, 3.0, 0.5, -0.5}, float[4] p = {0.5, 1.0, -1.0, 0.25}>
        { a = Gemm<transB=1, alpha=0.5>(x, u, p) q = Reshape(a, s)
          y = Attention<q_num_heads=2, kv_num_heads=2, scale=0.7>(q, k, k) }""",
    ),
    "AttentionInRows": Case(
        """g (@T[@A,@D,@B,@C] q, @T[@A,@E,@B,@C] k, @T[@A,@E,@B,@C] v) => (@T[@A,@D,@B,@C] y)
        { a = Transpose<perm=[0, 2, 1, 3]>(q) b = Transpose<perm=[0, 2, 1, 3]>(k) c = Transpose<perm=[0, 2, 1, 3]>(v)
          o = Attention(a, b, c) y = Transpose<perm=[0, 2, 1, 3]>(o) }""",
        """g (@T[@A,@D,@B,@C] q, @T[@A,@B,@E,@C] k, @T[@A,@B,@E,@C] v) => (@T[@A,@D,@B,@C] y)
        { a = Transpose<perm=[0, 2, 1, 3]>(q) o = Attention(a, k, v) y = Transpose<perm=[0, 2, 1, 3]>(o) }""",
    ),
    "AttentionRepeatsHeads": Case(
        """g (@T[@A,@(B*2),@D,@C] q, @T[@A,@B,@E,@C] k, @T[@A,@B,@E,@C] v) => (@T[@A,@(B*2),@D,@C] y)
        <int64[1] two = {2}, int64[5] e = {@A, @B, 2, @E, @C}, int64[4] s = {@A, @(B*2), @E, @C}>
        { a = Unsqueeze(k, two) b = Expand(a, e) c = Reshape(b, s)
          d = Unsqueeze(v, two) f = Expand(d, e) h = Reshape(f, s) y = Attention(q, c, h) }""",
        """g (@T[@A,@(B*2),@D,@C] q, @T[@A,@B,@E,@C] k, @T[@A,@B,@E,@C] v) => (@T[@A,@(B*2),@D,@C] y)
        <int64[1] one = {1}, int64[5] e = {@A, 2, @B, @E, @C}, int64[4] s = {@A, @(B*2), @E, @C}>
        { a = Unsqueeze(k, one) b = Expand(a, e) c = Reshape(b, s)
          d = Unsqueeze(v, one) f = Expand(d, e) h = Reshape(f, s) y = Attention(q, c, h) }""",
    ),
    "ScaleBeforeExpand": Case(
        """g (@T[@A,1,@C] x, @T[@A,@B,@C] z) => (@T[@A,@B,@C] y) <int64[3] s = {@A, @(B*2//2), @C}, float c = {0.3}>
        { a = Expand(x, s) b = Mul(a, c) y = Sub(b, z) }""",
        """g (@T[@A,1,@C] x, @T[@A,@B,@C] z) => (@T[@A,@B,@C] y) <int64[3] s = {@A, @B, @C}>
        { a = Expand(x, s) y = Mul(a, z) }""",
    ),
    "ScaleSmallerOperand": Case(
        """g (@T[@A,@B,1] x, @T[@A,@B,@(C+1)] z) => (@T[@A,@B,@(C+1)] y) <float c = {2.0}>
        { a = Mul(z, c) y = Mul(x, a) }""",
        """g (@T[@A,@B,@C] x, @T[@A,@B,@C] z) => (@T[@A,@B,@C] y) <float c = {2.0}> { a = Mul(z, c) y = Mul(x, a) }""",
    ),
    "PaddedPartsAsConcat": Case(
        """g (@T[@A,@B,@D] x, @T[@A,@C,@D] z) => (@T[@A,@(B+C),@D] y)
        <int64[6] p = {0, 0, 0, 0, @C, 0}, int64[6] q = {0, @B, 0, 0, 0, 0}>
        { a = Pad(x, p) b = Pad(z, q) y = Add(b, a) }""",
        """g (@T[@A,2,@D] x, @T[@A,2,@D] z) => (@T[@A,3,@D] y)
        <int64[6] p = {0, 0, 0, 0, 1, 0}, int64[6] q = {0, 1, 0, 0, 0, 0}>
        { a = Pad(x, p) b = Pad(z, q) y = Add(b, a) }""",
        ("float", "double"),
    ),
    "CrossEntropyGradient": Case(
        """g (@T[@A,4] l, int64[@A,1] i, @T[@A,1] v) => (@T[@A,4] y)
        <float zero = {0.0}, float one = {-1.0}, int64[2] s = {@A, 4}, int64[2] r = {@A, 1}, int64[1] axis = {1}>
        { w = Sigmoid(v) z = Expand(zero, s) u = Expand(one, r) m = ScatterElements<axis=1>(z, i, u) p = Mul(m, w)
          e = Exp(l) t = ReduceSum(p, axis) q = Mul(e, t) y = Sub(p, q) }""",
        """g (@T[@A,4] l, int64[@A,1] i, @T[@A,1] v) => (@T[@A,4] y)
        <float zero = {0.0}, float one = {1.0}, int64[2] s = {@A, 4}, int64[2] r = {@A, 1}, int64[1] axis = {1}>
        { w = Sigmoid(v) z = Expand(zero, s) u = Expand(one, r) m = ScatterElements<axis=1>(z, i, u) p = Mul(m, w)
          e = Exp(l) t = ReduceSum(p, axis) q = Mul(e, t) y = Sub(p, q) }""",
    ),
    "JoinStacksBeforeTranspose": Case(
        """g (@T[@A,@B,@C,@D] x, @T[@(A*B),@C,@E] z) => (@T[@(A*B),@D,@E] y) <int64[3] s = {@(A*B), @D, @C}>
        { t = Transpose<perm=[0, 1, 3, 2]>(x) r = Reshape(t, s) y = MatMul(r, z) }""",
        """g (@T[@A,@B,@C,@D] x) => (@T[@(A*B),@D,@C] y) <int64[3] s = {@(A*B), @D, @C}>
        { t = Transpose<perm=[0, 1, 3, 2]>(x) r = Reshape(t, s) y = Neg(r) }""",
    ),
    "SoftmaxOfProduct": Case(
        """g (@T[@A,@B] x, @T[@B,@C] z) => (@T[@A,@C] y)
        <float least = {-inf}, float zero = {0.0}, int64[1] axis = {1}, float low = {-9.0}, float high = {9.0}>
        { a = Clip(x, low, high) b = Clip(z, low, high) s = MatMul(a, b)
          m = ReduceMax(s, axis) e = Equal(m, least) p = Softmax<axis=1>(s) y = Where(e, zero, p) }""",
        """g (@T[@A,@C] s) => (@T[@A,@C] y) <float least = {-inf}, float zero = {0.0}, int64[1] axis = {1}>
        { m = ReduceMax(s, axis) e = Equal(m, least) p = Softmax<axis=1>(s) y = Where(e, zero, p) }""",
    ),
    "BlockedConvolution": Case(
        """g (@T[@A,16,35,32] x, @T[16,16,3,2] w, @T[16] b) => (@T[@A,16,33,31] y) { y = Conv(x, w, b) }""",
        """g (@T[@A,12,33,32] x, @T[16,12,3,2] w) => (@T[@A,16,33,31] y) { y = Conv<pads=[1, 0, 1, 0]>(x, w) }""",
    ),
    "BlockedTransposedConvolution": Case(
        """g (@T[@A,16,33,32] x, @T[16,32,3,2] w) => (@T[@A,32,33,34] y)
        { y = ConvTranspose<pads=[2, 0, 2, 0], dilations=[2, 2]>(x, w) }""",
        """g (@T[@A,16,33,32] x, @T[16,32,2,2] w) => (@T[@A,32,66,64] y) { y = ConvTranspose<strides=[2, 2]>(x, w) }""",
    ),
    "BiasApart": Case(
        "g (float[@A,@B] x, float[@B,@C] w, float[@C] b) => (float[@A,@C] y) { y = Gemm(x, w, b) }",
        "g (float[2,3] x, float[3,4] w, float[2,4] b) => (float[2,4] y) { y = Gemm(x, w, b) }",
    ),
    "BiasGelu": Case(
        f"g ({X}, @T[@C] b) => ({Y}) {{ a = Add(x, b) y = Gelu(a) }}",
        f"g ({X}, @T[@B,1] b) => ({Y}) {{ a = Add(x, b) y = Gelu(a) }}",
    ),
    "SkipLayerNorm": Case(
        f"""g ({X}, @T[@A,@B,@C] z, @T[@C] r, @T[@C] w, @T[@C] b) => ({Y}, @T[@A,@B,@C] s)
        {{ a = Add(x, r) s = Add(z, a) y = LayerNormalization<axis=-1>(s, w, b) }}""",
        f"""g ({X}, @T[@B,@C] z, @T[@C] w, @T[@C] b) => ({Y})
        {{ s = Add(x, z) y = LayerNormalization<axis=-1>(s, w, b) }}""",
    ),
    "SkipRmsNorm": Case(
        f"""g ({X}, @T[@A,@B,@C] z, @T[@C] w) => ({Y}, @T[@A,@B,@C] t)
        {{ s = Add(x, z) y = RMSNormalization<axis=-1>(s, w) t = Neg(s) }}""",
        f"""g ({X}, @T[1,@B,@C] z, @T[@C] w) => ({Y}) {{ s = Add(x, z) y = RMSNormalization<axis=-1>(s, w) }}""",
    ),
    "SumInFloat32": Case(
        """g (float16[@A,@B,1024] x, float16[@A,@(B*1024)] z, float16[1024] r, float16[1024] w, float16[1024] b)
        => (float16[@A,@B,1024] y, float16[@A,@B,1024] n, float16[@A,@B,1024] u)
        <float16 high = {4}, int64[3] rows = {@A, @B, 1024}>
        { k = Reshape(z, rows) a = Add(x, r) s = Add(k, a) c = Min(s, high) y = LayerNormalization<axis=-1>(c, w, b)
          t = Mul(x, w) u = Add(c, t) n = RMSNormalization<axis=-1>(u, w) }""",
        """g (float16[@A,@B,64] x, float16[@A,@B,64] z, float16[64] w) => (float16[@A,@B,64] y)
        { s = Add(x, z) y = RMSNormalization<axis=-1>(s, w) }""",
        types=("float16",),
    ),
    "GateInFloat32": Case(
        """g (float16[@A,64] x, float16[@B,64] r, float16[2048,64] v, float16[64,2048] w)
        => (float16[1,@A,2048] y, float16[@B,2048] z) <int64[3] rows = {1, @A, 2048}>
        { p = Gemm<transB=1>(x, v) a = Reshape(p, rows) s = Sigmoid(a) g = Mul(a, s) b = MatMul(x, w)
          u = Reshape(b, rows) y = Mul(g, u) c = Gemm<transB=1>(r, v) h = Gelu<approximate="tanh">(c)
          e = MatMul(r, w) z = Mul(h, e) }""",
        """g (float16[@A,64] x, float16[2048,64] v, float16[64,2048] w) => (float16[@A,2048] y, float16[@A,2048] p)
        { p = Gemm<transB=1>(x, v) s = Sigmoid(p) g = Mul(p, s) b = MatMul(x, w) y = Mul(g, b) }""",
        types=("float16",),
    ),
    "CausalMask": Case(
        """g (float[@A,2,3,4] q, float[@A,2,3,4] k, float[@A,2,3,4] v) => (float[@A,2,3,4] y)
        <int64[3] r = {0, 1, 2}, int64[3,1] c = {0, 1, 2}>
        { m = LessOrEqual(r, c) y = Attention(q, k, v, m) }""",
        """g (float[2,2,3,4] q, float[2,2,3,4] k, float[2,2,3,4] v) => (float[2,2,3,4] y)
        <int64[3] r = {0, 1, 2}, int64[3,1] c = {0, 1, 2}>
        { m = Less(r, c) y = Attention(q, k, v, m) }""",
    ),
    "ScaleInAttention": Case(
        """g (float[@A,3,@(8*B)] q, float[@A,3,2,@(4*B)] k, float[@A,3,2,@(4*B)] v) => (float[@A,2,3,@(4*B)] y)
        <float c = {0.3}, int64[4] s = {0, 0, 2, -1}>
        { a = Mul(q, c) b = Reshape(a, s) d = Transpose<perm=[0,2,1,3]>(b) e = Transpose<perm=[0,2,1,3]>(k)
          f = Transpose<perm=[0,2,1,3]>(v) y = Attention<scale=2.0>(d, e, f) }""",
        """g (float[2,2,3,4] q, float[2,2,3,4] k, float[2,2,3,4] v) => (float[2,2,3,4] y) <float c = {-0.3}>
        { a = Mul(q, c) y = Attention(a, k, v) }""",
    ),
    "MultiHeadAttention": Case(
        """g (float[@A,3,@(8*B)] q, float[@A,512,@(8*B)] k, float[@A,512,@(8*B)] v) => (float[@A,3,@(8*B)] y)
        { y = Attention<q_num_heads=2, kv_num_heads=2, scale=0.3>(q, k, v) }""",
        """g (float[2,512,8] q, float[2,512,8] k, float[2,512,8] v) => (float[2,512,8] y)
        { y = Attention<q_num_heads=2, kv_num_heads=2, is_causal=1>(q, k, v) }""",
    ),
    "PatchesAsProduct": Case(
        """g (@T[@A,@B,@(4*C),@(6*D)] x, @T[@E,@B,2,3] w, @T[@E] b) => (@T[@A,@E,@(2*C),@(2*D)] y)
        { y = Conv<strides=[2, 3]>(x, w, b) }""",
        "g (float[2,3,8,6] x, float[5,3,2,3] w) => (float[2,5,4,2] y) { y = Conv<strides=[2, 2]>(x, w) }",
    ),
    "SequenceConvolutionAsProduct": Case(
        """g (float16[@A,@B,@(2*C+4)] x, float16[@E,@B,3] w, float16[@E] b) => (float16[@A,@E,@(C+1)] y)
        { y = Conv<strides=[2], dilations=[2], pads=[1, 1]>(x, w, b) }""",
        "g (float16[2,4,9] x, float16[6,2,3] w) => (float16[2,6,7] y) { y = Conv<group=2>(x, w) }",
        ("float16",),
    ),
    "ChannelsLastConvolution": Case(
        """g (float16[@A,@B,@(2*C+1),@(D+4)] x, float16[@E,@B,3,2] w, float16[@F,@E,1,1] v, float16[@F] b)
        => (float16[@A,@F,@(C+1),@(D+2)] y)
        { a = Conv<strides=[2, 1], dilations=[1, 2], pads=[0, 0, 2, 0]>(x, w) y = Conv(a, v, b) }""",
        """g (float16[2,4,8,8] x, float16[4,4,3,3] w, float16[4,2,3,3] v) => (float16[2,4,4,4] y)
        { a = Conv(x, w) y = Conv<group=2>(a, v) }""",
        ("float16",),
    ),
    "ChannelsLastBatchNorm": Case(
        f"""g ({IMAGE}, @T[@D] s, @T[@D] b, @T[@D] m, @T[@D] r) => (@T[@A,@D,@B,@C] y)
        {{ a = {TO_FIRST}(x) v = Mul(r, r) y = BatchNormalization<epsilon=0.01>(a, s, b, m, v) }}""",
        f"""g ({IMAGE}, @T[@C] s, @T[@C] b, @T[@C] m, @T[@C] r) => (@T[@A,@C,@B,@D] y)
        {{ a = Transpose<perm=[0, 2, 1, 3]>(x) v = Mul(r, r) y = BatchNormalization<epsilon=0.01>(a, s, b, m, v) }}""",
        ("float16", "float"),
    ),
    "ChannelsLastElementwise": Case(
        f"""g ({IMAGE}) => (@T[@A,@D,@B,@C] y) <float low = {{0.0}}, float high = {{1.5}}>
        {{ a = {TO_FIRST}(x) b = Relu(a) l = CastLike(low, b) h = CastLike(high, b) y = Clip(b, l, h) }}""",
        f"g ({IMAGE}) => (@T[@A,@C,@B,@D] y) {{ a = Transpose<perm=[0, 2, 1, 3]>(x) y = Relu(a) }}",
        ("float16", "float"),
    ),
    "ChannelsLastArithmetic": Case(
        f"""g ({IMAGE}, @T[@A,@B,@C,@D] z, @T[@D,1,1] w, @T[@A,@D,1,1] v) => (@T[@A,@D,@B,@C] y)
        {{ a = {TO_FIRST}(x) b = {TO_FIRST}(z) c = Add(a, b) d = Mul(w, c) e = Sub(v, d) y = Max(c, d, e) }}""",
        f"g ({IMAGE}, @T[@A,@D,@B,@C] z) => (@T[@A,@D,@B,@C] y) {{ a = {TO_FIRST}(x) y = Add(a, z) }}",
        ("float16", "float"),
    ),
    "ChannelsLastPool": Case(
        f"""g (@T[@A,@(B+3),@(C+4),@D] x) => (@T[@A,@D,@(B+3),@(C+4)] y, @T[@A,@D,@(B//2+1),@(C+3)] z)
        {{ a = {TO_FIRST}(x) y = MaxPool<kernel_shape=[3, 1], pads=[1, 0, 1, 0]>(a)
          z = AveragePool<kernel_shape=[3, 2], strides=[2, 1], count_include_pad=1>(a) }}""",
        f"""g (@T[2,9,9,3] x) => (@T[2,3,5,9] y)
        {{ a = {TO_FIRST}(x) y = MaxPool<kernel_shape=[3, 1], dilations=[2, 1]>(a) }}""",
        ("float16", "float"),
    ),
    "ChannelsLastConcat": Case(
        f"""g ({IMAGE}, @T[@A,@B,@C,@E] z) => (@T[@A,@(D+E),@B,@C] y, @T[@A,@D,@B,@(2*C)] w)
        {{ a = {TO_FIRST}(x) b = {TO_FIRST}(z) y = Concat<axis=-3>(a, b) w = Concat<axis=3>(a, a) }}""",
        f"g ({IMAGE}, @T[@A,@E,@B,@C] z) => (@T[@A,@(D+E),@B,@C] y) {{ a = {TO_FIRST}(x) y = Concat<axis=1>(a, z) }}",
        ("float16", "float"),
    ),
    "ChannelsLastReduction": Case(
        f"""g ({IMAGE}) => (@T[@A,@D,1,1] y, @T[@A,@D] z) <int64[2] s = {{-1, 2}}>
        {{ a = {TO_FIRST}(x) y = ReduceMean(a, s) z = ReduceSum<keepdims=0>(a, s) }}""",
        f"""g ({IMAGE}) => (@T[@A,1,@B,@C] y) <int64[1] s = {{1}}>
        {{ a = {TO_FIRST}(x) y = ReduceMean(a, s) }}""",
        ("float16", "float"),
    ),
    "IntegerProduct": Case(
        """g (int8[@A,@B] x, int8[@C,@B] w, float[@C] c) => (float[@A,@C] y)
        <float s = {0.5}, float t = {0.25}, int8 z = {1}>
        { a = DequantizeLinear(x, s, z) b = DequantizeLinear(w, t) y = Gemm<transB=1>(a, b, c) }""",
        """g (int8[@A,@B] x, int8[@C,@B] w, float[@C] c) => (int8[@A,@C] y)
        <float s = {0.5}, float t = {0.25}, int8 z = {-128}>
        { a = DequantizeLinear(x, s, z) b = DequantizeLinear(w, t) p = Gemm<transB=1>(a, b, c)
          r = Relu(p) y = QuantizeLinear(r, s, z) }""",
    ),
    "DropRequantize": Case(
        """g (int8[@A,@B] x) => (int8[@A,@B] y) <float s = {0.3}, int8 z = {1}>
        { a = DequantizeLinear(x, s, z) y = QuantizeLinear(a, s, z) }""",
        """g (int8[@A,@B] x) => (int8[@A,@B] y) <float s = {0.3}, float t = {0.2}, int8 z = {1}>
        { a = DequantizeLinear(x, s, z) y = QuantizeLinear(a, t, z) }""",
    ),
    "QuantizeRows": Case(
        """g (int32[@A,@B,@C] k, int8[@A,@B,1] i) => (uint8[@A,@B,@C] y)
        <float step = {70.5}, float low = {-128}, float high = {127}, int32 half = {128}>
        { z = Cast<to=1>(i) r = Cast<to=1>(k) x = Mul(r, step) a = Round(x)
          b = Add(a, z) c = Clip(b, low, high) d = Cast<to=3>(c) e = Cast<to=6>(d) f = Add(e, half)
          y = Cast<to=2>(f) }""",
        """g (int32[@A,@B,@C] k, int8[@A,@B,1] i) => (uint8[@A,@B,@C] y)
        <float step = {70.5}, float low = {-127}, float high = {127}, int32 half = {128}>
        { z = Cast<to=1>(i) r = Cast<to=1>(k) x = Mul(r, step) a = Round(x)
          b = Add(a, z) c = Clip(b, low, high) d = Cast<to=3>(c) e = Cast<to=6>(d) f = Add(e, half)
          y = Cast<to=2>(f) }""",
    ),
    "ZeroPointIntoProduct": Case(
        """g (float[@A,@B] x, int8[@B,@C] w) => (int32[@A,@C] y)
        <float scale = {0.1}, uint8 zero = {7}, int32 half = {128}, int64[1] axes = {0}>
        { a = QuantizeLinear(x, scale, zero) p = MatMulInteger(a, w) b = Cast<to=7>(w) c = ReduceSum(b, axes)
          d = Cast<to=6>(c) e = Mul(d, half) y = Sub(p, e) }""",
        """g (float[@A,@B] x, int8[@B,@C] w) => (int32[@A,@C] y)
        <float scale = {0.1}, uint8 zero = {7}, int32 half = {127}, int64[1] axes = {0}>
        { a = QuantizeLinear(x, scale, zero) p = MatMulInteger(a, w) b = Cast<to=7>(w) c = ReduceSum(b, axes)
          d = Cast<to=6>(c) e = Mul(d, half) y = Sub(p, e) }""",
    ),
    "ScalesIntoProduct": Case(
        """g (int8[@A,@B] x, int8[@B,@C] w, float[@A,1] r) => (float[@A,@C] y, float[@A,@C] v)
        <float[1] one = {0.5}, float[1,1] two = {0.25}, int64[1] n = {@C}>
        { c = Expand(one, n) p = MatMulInteger(x, w) a = Cast<to=1>(p) b = Mul(a, r) y = Mul(b, c)
          u = Neg(x) q = MatMulInteger(u, w) d = Cast<to=1>(q) e = Mul(d, two) v = Mul(e, one) }""",
        """g (int8[@A,@B] x, int8[@B,@C] w, float[@A,1] r) => (float[@A,@C] y)
        { p = MatMulInteger(x, w) a = Cast<to=1>(p) b = Mul(a, r) y = Mul(b, r) }""",
    ),
    "ProductWithBlocks": Case(
        """g (float[@A,@(16*B)] x, int32[@(16*B),@C] k) => (float[@A,@C] y)
        <int32 low = {15}, float[1,1] s = {0.25}, uint8[1,1] z = {8}, int64[2] n = {@B, @C}>
        { a = BitwiseAnd(k, low) codes = Cast<to=2>(a) scales = Expand(s, n) b = Expand(z, n)
          c = Cast<to=21>(codes) zero = Cast<to=21>(b) w = DequantizeLinear<axis=0, block_size=16>(c, scales, zero)
          y = MatMul(x, w) }""",
        """g (float[@A,@(16*B)] x, int32[@(16*B),@C] k) => (float[@A,@C] y)
        <int32 low = {15}, float[1,1] s = {0.25}, uint8[1,1] z = {7}, int64[2] n = {@B, @C}>
        { a = BitwiseAnd(k, low) codes = Cast<to=2>(a) scales = Expand(s, n) b = Expand(z, n)
          c = Cast<to=21>(codes) zero = Cast<to=21>(b) w = DequantizeLinear<axis=0, block_size=16>(c, scales, zero)
          y = MatMul(x, w) }""",
    ),
    "LargestMagnitude": Case(
        """g (float[@A,@(B+1)] x, bool[@A,1] b) => (float[@A,1] y)
        <float zero = {0}, float nan = {nan}, int64[1] axes = {1}>
        { m = ReduceMin(x, axes) n = ReduceMax(x, axes) c = Where(b, nan, m) d = Where(b, nan, n)
          e = Min(c, zero) f = Max(d, zero) h = Neg(e) y = Max(h, f) }""",
        """g (float[@A,@(B+1)] x, bool[@A,1] b) => (float[@A,1] y)
        <float zero = {1}, float nan = {nan}, int64[1] axes = {1}>
        { m = ReduceMin(x, axes) n = ReduceMax(x, axes) c = Where(b, nan, m) d = Where(b, nan, n)
          e = Min(c, zero) f = Max(d, zero) h = Neg(e) y = Max(h, f) }""",
    ),
    "ChannelsLastPad": Case(
        f"""g ({IMAGE}) => (@T[@A,@D,@(B+3),@(C+1)] y) <int64[8] p = {{0, 0, 1, 0, 0, 0, 2, 1}}>
        {{ a = {TO_FIRST}(x) y = Pad<mode="constant">(a, p) }}""",
        f"""g ({IMAGE}) => (@T[@A,@C,@(B+3),@(D+1)] y) <int64[8] p = {{0, 0, 1, 0, 0, 0, 2, 1}}>
        {{ a = Transpose<perm=[0, 2, 1, 3]>(x) y = Pad<mode="constant">(a, p) }}""",
        ("float16", "float"),
    ),
    "ChannelsLastMaxPoolWithNan": Case(
        f"""g (float[@A,@(2*B+2),@(C+4),@D] x) => (float[@A,@D,@(B+1),@(C+4)] y) <float n = {{nan}}>
        {{ p = Relu(x) a = {TO_FIRST}(p) m = MaxPool<kernel_shape=[3, 2], strides=[2, 1], pads=[1, 0, 0, 1]>(a)
          v = AveragePool<kernel_shape=[3, 2], strides=[2, 1], pads=[1, 0, 0, 1]>(a)
          i = IsNaN(v) y = Where(i, n, m) }}""",
        f"""g (float[2,9,9,3] x) => (float[2,3,8,9] y) <float n = {{1.0}}>
        {{ p = Relu(x) a = {TO_FIRST}(p) m = MaxPool<kernel_shape=[2, 1]>(a)
          v = AveragePool<kernel_shape=[2, 1]>(a) i = IsNaN(v) y = Where(i, n, m) }}""",
        ("float",),
    ),
    "ChannelsLastPoolOnCpu": Case(
        f"""g (float[@A,@(B+3),@(C+4),@D] x) => (float[@A,@D,@(B+1),@(C+4)] y, float[@A,@D,@(B//2+1),@(C+3)] z)
        {{ a = {TO_FIRST}(x) y = MaxPool<kernel_shape=[3, 1], pads=[1, 0, 1, 0], dilations=[2, 1]>(a)
          z = AveragePool<kernel_shape=[3, 2], strides=[2, 1], count_include_pad=1>(a) }}""",
        f"""g (float[2,9,9,3] x) => (float[2,3,5,9] y)
        {{ a = {TO_FIRST}(x) y = MaxPool<kernel_shape=[2, 1], strides=[2, 1], ceil_mode=1>(a) }}""",
        ("float",),
    ),
    "ChannelsLastDepthwiseConvolution": Case(
        f"""g (float[@A,@(B+1),@C,3] x) => (float[@A,3,@B,@C] y)
        <float[3,1,2,1] w = {{1, 2, 3, -1, 0.5, 2}}, float[3] b = {{0.1, 0.2, 0.3}}>
        {{ a = {TO_FIRST}(x) y = Conv<group=3>(a, w, b) }}""",
        f"""g (float[2,5,4,3] x) => (float[2,2,4,4] y) <float[2,3,2,1] w = {{1, 2, 3, -1, 0.5, 2, 1, 2, 3, -1, 0.5, 2}}>
        {{ a = {TO_FIRST}(x) y = Conv(a, w) }}""",
        ("float",),
    ),
    "ChannelsLastBatchNormOnCpu": Case(
        f"""g (float[@A,@B,@C,@D] x, float[@D] s, float[@D] b, float[@D] m, float[@D] r) => (float[@A,@D,@B,@C] y)
        {{ a = {TO_FIRST}(x) v = Mul(r, r) y = BatchNormalization<epsilon=0.01>(a, s, b, m, v) }}""",
        """g (float[2,3,4,5] x, float[4] s, float[4] b, float[4] m, float[4] r) => (float[2,4,3,5] y)
        { a = Transpose<perm=[0, 2, 1, 3]>(x) v = Mul(r, r) y = BatchNormalization<epsilon=0.01>(a, s, b, m, v) }""",
        ("float",),
    ),
}
