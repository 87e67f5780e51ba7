"""What runs beside the rules, graphs within graphs, and that the work grows as the graph does."""

from __future__ import annotations

from collections import Counter

import onnx_ir as ir
import pytest

from sardonyx.optimize import optimizer
from sardonyx.optimize.optimizer import optimize
from sardonyx.optimize.pattern import P
from sardonyx.optimize.rule import RULES, Match, rule
from tests.optimize.rewriting import assert_same, model_of, numbers_for, rewritten, run


def test_equal_nodes_become_one() -> None:
    hits, operators = rewritten("g (float[3] x) => (float[3] y) { a = Exp(x) b = Exp(x) y = Add(a, b) }")
    assert hits["ShareCommon"] == 1
    assert operators == ["Exp", "Add"]


def test_random_nodes_stay_apart_and_are_not_folded() -> None:
    model = model_of("""g (float[3] x) => (float[3] y) <float[3] c = {1.0, 2.0, 3.0}>
        { a = RandomNormalLike(c) b = RandomNormalLike(c) d = Add(a, b) y = Add(d, x) }""")
    assert not optimize(model)
    assert [node.op_type for node in model.graph] == ["RandomNormalLike", "RandomNormalLike", "Add", "Add"]


def test_constants_are_folded() -> None:
    hits, operators = rewritten(
        "g (float[3] x) => (float[3] y) <float a = {2.0}, float b = {3.0}> { c = Add(a, b) y = Mul(x, c) }"
    )
    assert hits["FoldConstant"] == 1
    assert operators == ["Mul"]


def test_what_nothing_reads_is_removed() -> None:
    _, operators = rewritten("g (float[3] x) => (float[3] y) { a = Exp(x) b = Sin(a) y = Relu(x) }")
    assert operators == ["Relu"]


def test_a_long_chain_that_nothing_reads_is_removed() -> None:
    chain = " ".join(f"a{i + 1} = Exp(a{i})" for i in range(3000))
    _, operators = rewritten(f"g (float[3] x) => (float[3] y) {{ a0 = Sin(x) {chain} y = Relu(x) }}")
    assert operators == ["Relu"]


def test_a_value_read_elsewhere_is_kept() -> None:
    _, operators = rewritten(
        "g (float[3] x) => (float[3] y, float[3] z) { s = Sigmoid(x) y = Mul(s, x) z = Add(s, x) }"
    )
    assert operators == ["Sigmoid", "Mul", "Add"]


def test_an_output_that_becomes_another_is_still_returned() -> None:
    _, operators = rewritten("g (float[3] x) => (float[3] y, float[3] z) { y = Relu(x) z = Identity(y) }")
    assert sorted(operators) == ["Identity", "Relu"]


@pytest.mark.parametrize(
    "text",
    [
        "g (float[3] x) => (float[3] y) { a = Relu(x) y = Identity(a) }",
        "g (float[3] x) => (float[3] y, float[3] z) { y = Relu(x) z = Neg(y) }",
        "g (float[3] x) => (float[3] y) { s = Sigmoid(x) y = Mul(s, x) }",
        "g (float[3] x) => (float[3] y) <float a = {2.0}, float b = {3.0}> { c = Add(a, b) y = Mul(x, c) }",
        "g (float[3] x) => (float[3] y, float z) <float a = {2.0}, float b = {3.0}> { z = Add(a, b) y = Relu(x) }",
        "g (float[3] x) => (float[3] y, float[3] z) { a = Neg(x) y = Identity(a) z = Identity(a) }",
    ],
)
def test_outputs_keep_their_names(text: str) -> None:
    model = model_of(text)
    before = [value.name for value in model.graph.outputs]
    optimize(model, domains={"com.microsoft"})
    assert [value.name for value in model.graph.outputs] == before
    names = [value.name for node in model.graph for value in node.outputs]
    assert len(set(names)) == len(names)


def test_only_the_rules_that_are_named_run() -> None:
    text = "g (float[3] x) => (float[3] y) { a = Exp(x) b = Exp(x) c = Add(a, b) s = Sigmoid(c) y = Mul(s, c) }"
    hits, operators = rewritten(text, names={"ShareCommon"})
    assert hits == {"ShareCommon": 1}
    assert operators == ["Exp", "Add", "Sigmoid", "Mul"]
    assert rewritten(text, names={"Silu"})[0] == {"Silu": 1}


def test_rules_that_go_in_circles_are_stopped(caplog: pytest.LogCaptureFixture) -> None:
    known = optimizer.all_rules()

    @rule(P.Tanh("x"))
    def around(m: Match) -> ir.Value:
        return m.g.Tanh(m.x)

    try:
        hits, operators = rewritten("g (float[3] x) => (float[3] y) { y = Tanh(x) }")
    finally:
        RULES[:] = known
    assert hits["Around"] > 10
    assert operators == ["Tanh"]
    assert "Around" in caplog.text


def test_a_rewritten_model_can_be_rewritten_again() -> None:
    text = "g (float[2,3] x, float[4,3] w) => (float[2,4] y) { t = Transpose(w) p = MatMul(x, t) y = Relu(p) }"
    model, plain = model_of(text), model_of(text)
    optimize(model, names={"JoinTransposes", "MatricesToGemm"})
    again = next(node for node in model.graph if node.op_type == "Relu")
    product = ir.Node("", "Mul", [again.outputs[0], again.outputs[0]], num_outputs=1)
    model.graph.insert_after(again, product)
    optimize(model, domains={"com.microsoft"})
    names = [value.name for node in model.graph for value in node.outputs]
    assert len(set(names)) == len(names)
    feeds = numbers_for(plain, 0, ())
    assert_same(run(model, feeds)[0], run(plain, feeds)[0])


BRANCHES = """g (float[2,3] x, bool c) => (float[2,3] y) {{
    n = Neg(x) {around}
    y = If (c) <
        then_branch = t () => (float[2,3] u) {{ {then} }},
        else_branch = e () => (float[2,3] v) {{ {other} }}
    > }}"""


@pytest.mark.parametrize(
    ("around", "then", "other", "rule"),
    [
        ("m = Neg(n)", "u = Relu(m)", "v = Abs(x)", "DropDoubleNegation"),
        ("", "i = Neg(n) u = Relu(i)", "v = Abs(x)", None),
        ("", "s = Sigmoid(n) u = Mul(s, n)", "v = Identity(n)", "Silu"),
        ("", "a = Exp(n) b = Exp(n) u = Add(a, b)", "a = Exp(n) v = Neg(a)", "ShareCommon"),
        ("", "i = Identity(n) u = Identity(i)", "v = Neg(n)", "DropIdentity"),
        ("w = Exp(x)", "u = Identity(w)", "v = Identity(n)", None),
        ("", "u = Identity(x)", "v = Neg(n)", None),
    ],
)
def test_branches_are_rewritten_where_they_are(around: str, then: str, other: str, rule: str | None) -> None:
    hits, operators = rewritten(BRANCHES.format(around=around, then=then, other=other))
    assert "If" in operators
    assert hits[rule] if rule else not hits


SLICE = "Slice(x, o, p, o)"
SPLIT = "Split<axis=0, num_outputs=2>(x)"
LIMITS = "<int64[1] o = {0}, int64[1] p = {1}>"


@pytest.mark.parametrize(
    ("then", "other"),
    [
        (f"a, b = {SPLIT} u = Sub(x, a)", f"i = {SLICE} v = Add(x, i)"),
        (f"i = {SLICE} u = Add(x, i)", f"a, b = {SPLIT} v = Sub(x, a)"),
        (f"i = {SLICE} d = Exp(i) a, b = {SPLIT} e = Sub(x, b) u = Add(d, e)", "v = Identity(n)"),
    ],
)
def test_slices_are_outputs_of_a_split_only_where_it_is_visible(then: str, other: str) -> None:
    text = BRANCHES.format(around="", then=then, other=other)
    rewritten(text.replace("(float[2,3] y) {", f"(float[2,3] y) {LIMITS} {{"))


@pytest.mark.parametrize("copied", [False, True])
def test_outputs_of_branches_and_of_what_chooses_them_keep_their_names(copied: bool) -> None:
    then, other = "s = Sigmoid(n) p = Mul(s, n) u = Identity(p)", "i = Identity(n) a = Exp(i) v = Identity(a)"
    text = BRANCHES.format(around="", then=then, other=other)
    if copied:
        text = text.replace("y = If", "w = If").removesuffix("}") + "y = Identity(w) }"
    model = model_of(text)
    assert optimize(model)["DropIdentity"]
    assert [value.name for value in model.graph.outputs] == ["y"]
    assert sorted(str(body.outputs[0].name) for body in model.graph.subgraphs()) == ["u", "v"]
    rewritten(text)


def test_what_only_a_dead_branch_reads_is_removed() -> None:
    text = BRANCHES.format(around="", then="u = Relu(n)", other="v = Abs(n)")
    _, operators = rewritten(text.replace("y)", "z)", 1).removesuffix("}") + "z = Exp(x) }")
    assert operators == ["Exp"]


def test_what_a_loop_finds_around_it_is_not_moved_into_it() -> None:
    hits, operators = rewritten("""g (float[3] x) => (float[3] y) <int64 n = {4}, bool t = {1}> {
        s = Sigmoid(x)
        y = Loop (n, t, x) <body = b (int64 i, bool c, float[3] a) => (bool d, float[3] z)
            { d = Identity(c) p = Mul(s, x) z = Add(a, p) }> }""")
    assert not hits["Silu"]
    assert operators == ["Sigmoid", "Loop"]


LAYER = """q{i} = Mul(x{i}, x{i}) m{i} = ReduceMean(q{i}, axes) a{i} = Add(m{i}, eps) r{i} = Sqrt(a{i})
    n{i} = Div(x{i}, r{i}) w{i} = Mul(n{i}, w) v{i} = Reshape(w{i}, flat) t{i} = Transpose(k) p{i} = MatMul(v{i}, t{i})
    g{i} = Sigmoid(p{i}) h{i} = Mul(g{i}, p{i}) u{i} = Reshape(h{i}, back) x{j} = Add(x{i}, u{i})"""


def stack(count: int) -> str:
    layers = "\n".join(LAYER.format(i=i, j=i + 1) for i in range(count))
    return f"""g (float[2,3,4] x0, float[4] w, float[4,4] k) => (float[2,3,4] x{count})
        <float eps = {{0.1}}, int64[1] axes = {{-1}}, int64[2] flat = {{6, 4}}, int64[3] back = {{2, 3, 4}}>
        {{ {layers} }}"""


def test_the_work_grows_as_the_graph_does(monkeypatch: pytest.MonkeyPatch) -> None:
    visits: Counter[int] = Counter()
    visit = optimizer._Rewriter._visit

    def counted(self: optimizer._Rewriter, node: ir.Node) -> list[ir.Node]:
        visits[count] += 1
        return visit(self, node)

    monkeypatch.setattr(optimizer._Rewriter, "_visit", counted)
    for count in (1, 4, 16):
        model = model_of(stack(count))
        hits = optimize(model, domains={"com.microsoft"})
        assert hits["RmsNorm"] == hits["Silu"] == count
    assert visits[16] < 4.5 * visits[4] < 4.5 * 4.5 * visits[1]


def test_a_stack_of_layers_keeps_its_values() -> None:
    rewritten(stack(3))
