"""What an exported program takes at a call, and what it refuses: numbers, constants, arrangement, aliases, edits."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional as F

import sardonyx

X = torch.arange(24.0).view(4, 6) / 7


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def kinds(program: sardonyx.Program) -> dict[str, str]:
    return {argument.path: argument.kind for argument in program.call_spec.arguments}


# Numbers


def _floats(x: torch.Tensor, s: float) -> tuple[torch.Tensor, ...]:
    ints = (x * 5).long()
    return (
        *(x * s, x + s, s - x, x / s, s / (x + 1), x**s, x // s, x % s, torch.fmod(x, s), torch.lerp(x, x * 2, s)),
        *(x > s, ints < s, x == s, torch.tensor([0.1, 0.2]) >= s, x.clamp(s, s + 1), torch.where(x > 1, x, s)),
        *(x.masked_fill(x > 1, s), torch.full((2,), s), x * (2 * s + 1), ints * s, torch.add(x, x, alpha=s)),
        x.double() * s,
    )


def _integers(x: torch.Tensor, n: int) -> tuple[torch.Tensor, ...]:
    return (
        *(x * n, x.long() * n, x / n, x**n, x > n, torch.arange(n), torch.zeros(n, 3) + n, x.repeat(n, 1), x[:, n]),
        *(x[:, :n], x[:, -n:], x.roll(n, 0), x.tril(n), x.view(n, -1), x[:, None].expand(-1, n, -1), F.pad(x, (n, n))),
    )


@pytest.mark.parametrize(("function", "example", "others"), [(_floats, 0.5, (0.1, 1.75)), (_integers, 1, (2, 3))])
def test_numbers_are_inputs(function: Any, example: float, others: tuple[float, ...]) -> None:
    program = sardonyx.export(function, (X, example))
    assert kinds(program) == {"x": "tensor", "s" if function is _floats else "n": "number"}
    for number in (example, *others):
        for place, (got, want) in enumerate(zip(program(X, number), function(X, number), strict=True)):
            assert got.dtype == want.dtype, place
            assert_same(got, want)


def test_numbers_in_containers_and_results_and_the_file_takes_them(tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor, *, options: dict[str, Any]) -> tuple[torch.Tensor, float, int]:
            return x * options["scale"], options["scale"] * 2, options["shift"] + 1

    program = sardonyx.export(Scaled().eval(), (X,), {"options": {"scale": 1.5, "shift": 3}})
    result, double, shift = program(X, options={"scale": np.float64(2.5), "shift": np.int64(7)})
    assert_same(result, X * 2.5)
    assert (double, shift) == (5.0, 8)
    session = onnxruntime.InferenceSession(str(program.save(tmp_path / "m.onnx")))
    feeds = dict(zip(program.inputs, (X.numpy(), np.array(0.5), np.array(4)), strict=True))
    assert_same(torch.from_numpy(session.run(None, feeds)[0]), X * 0.5)


class Deciding(nn.Module):
    def forward(
        self, x: torch.Tensor, power: float, times: int, *, how: str = "sum", keep: bool = True, bias: Any = None
    ) -> torch.Tensor:
        x = x * power if power > 1 else x
        for _ in range(times):
            x = x + 1
        x = x.sum(0, keepdim=keep) if how == "sum" else x.mean(0, keepdim=keep)
        return x if bias is None else x + bias


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"power": 0.5}, "power is 0.5, and the model was exported with 1.5"),
        ({"times": 3}, "times is 3, and the model was exported with 2"),
        ({"times": 2.0}, "times is 2.0, and the model was exported with 2"),
        ({"how": "mean"}, "how is 'mean', and the model was exported with 'sum'"),
        ({"keep": False}, "keep is False, and the model was exported with True"),
        ({"bias": X}, "bias is a Tensor, and the model was exported with None"),
    ],
)
def test_what_decides_is_a_constant_that_a_call_cannot_change(deciding: Any, change: Any, told: str) -> None:
    call: dict[str, Any] = {"power": 1.5, "times": 2, "how": "sum", "keep": True, "bias": None}
    assert_same(deciding(X, **call), Deciding()(X, **call))
    with pytest.raises(ValueError, match=told):
        deciding(X, **{**call, **change})


@pytest.fixture(scope="module")
def deciding() -> sardonyx.Program:
    call: dict[str, Any] = {"power": 1.5, "times": 2, "how": "sum", "keep": True, "bias": None}
    program = sardonyx.export(Deciding().eval(), (X,), call)
    assert program.inputs == ["x"]
    return program


def test_a_boolean_that_is_read_off_a_tensor_is_a_result() -> None:
    program = sardonyx.export(lambda x: (x.any().item(), x.sum().item() > 2), (torch.tensor([True, False, True]),))
    assert program(torch.tensor([False, False, False])) == (False, False)
    assert program(torch.tensor([True, True, True])) == (True, True)


def test_a_number_that_is_asked_for_its_class_is_a_constant() -> None:
    def last(x: torch.Tensor, n: int) -> torch.Tensor:
        return x[:, -n:] if isinstance(n, int) else x[:, n]

    program = sardonyx.export(last, (X, 2))
    assert kinds(program)["n"] == "constant"
    assert_same(program(X, 2), X[:, -2:])


def test_one_number_is_an_input_though_another_decides() -> None:
    program = sardonyx.export(lambda x, scale, flag: x * scale if flag > 0 else x, (X, 1.5, 1.0))
    assert kinds(program) == {"x": "tensor", "scale": "number", "flag": "constant"}
    assert_same(program(X, 3.0, 1.0), X * 3)


def test_a_number_that_no_operator_takes_is_a_constant() -> None:
    program = sardonyx.export(lambda x, slope, shift: F.leaky_relu(x - 1, slope) + shift, (X, 0.1, 1.0))
    assert kinds(program) == {"x": "tensor", "slope": "constant", "shift": "number"}
    assert_same(program(X, 0.1, 2.0), F.leaky_relu(X - 1, 0.1) + 2)


@pytest.mark.parametrize("given", [2, True, "2", None, torch.tensor(2.0)])
def test_a_float_is_given_as_a_float(given: Any, scaling: Any) -> None:
    with pytest.raises(TypeError, match=r"s is .*, where the model was exported with 1.5: pass a float"):
        scaling(X, given, [X, X])


@pytest.fixture(scope="module")
def scaling() -> sardonyx.Program:
    return sardonyx.export(lambda x, s, xs: x * s + xs[0] - xs[1], (X, 1.5, [X, X]))


def test_another_arrangement_is_named(scaling: Any) -> None:
    with pytest.raises(TypeError, match="xs is a list of 3, and the model was exported with a list of 2"):
        scaling(X, 1.5, [X, X, X])
    with pytest.raises(TypeError, match="xs is a tuple of 2, and the model was exported with a list of 2"):
        scaling(X, 1.5, (X, X))
    with pytest.raises(TypeError, match="xs is one value, and the model was exported with a list of 2"):
        scaling(X, 1.5, X)
    with pytest.raises(TypeError, match=r"xs\[1\] is a tuple of 1, and the model was exported with one value"):
        scaling(X, 1.5, [X, (X,)])
    with pytest.raises(TypeError, match=r"xs\[1\] is None, where the model was exported with a tensor"):
        scaling(X, 1.5, [X, None])
    with pytest.raises(TypeError, match="3 positional arguments"):
        scaling(X, 1.5)


def test_examples_that_differ_in_a_float_that_decides_are_refused() -> None:
    program = sardonyx.export(lambda x, s: x * s, (X, 1.5), examples=[(torch.ones(2, 6), 2.5)])
    assert_same(program(torch.ones(3, 6), 4.0), torch.full((3, 6), 4.0))
    with pytest.raises(sardonyx.CaptureError, match=r"s is 1\.5 in one example and 2\.5 in another"):
        sardonyx.export(lambda x, s: x * 2 if s > 2 else x, (X, 1.5), examples=[(X, 2.5)])


def test_none_stays_where_it_is_in_a_list() -> None:
    def total(xs: list[torch.Tensor | None]) -> torch.Tensor:
        return torch.stack([x.sum() for x in xs if x is not None]).sum()

    shapes = ([{0: "rows"}, None, {0: "rows"}],)
    program = sardonyx.export(total, ([X, None, X],), dynamic_shapes=shapes)
    assert_same(program([torch.ones(2, 6), None, X[:2]]), 12 + X[:2].sum())
    with pytest.raises(ValueError, match=r"xs\[1\] is a Tensor, and the model was exported with None"):
        program([X, X, X])


# Memory


def test_examples_that_are_one_tensor_or_views_of_one_are_several_inputs() -> None:
    def mixed(a: torch.Tensor, b: torch.Tensor, *, rest: dict[str, list[torch.Tensor]]) -> torch.Tensor:
        return a - 2 * b + 3 * rest["xs"][0] - 4 * rest["xs"][1]

    base = torch.randn(8, 6)
    program = sardonyx.export(mixed, (base[:4], base[:4]), {"rest": {"xs": [base[2:6], base[:4]]}})
    a, b, c, d = torch.randn(4, 4, 6)
    assert_same(program(a, b, rest={"xs": [c, d]}), mixed(a, b, rest={"xs": [c, d]}))


@torch.no_grad()
def test_attention_exported_with_one_tensor_serves_three() -> None:
    model, x = nn.MultiheadAttention(8, 2).eval(), torch.randn(4, 2, 8)
    program = sardonyx.export(model, (x, x, x), dynamic_shapes=({0: "to"}, {0: "from"}, {0: "from"}))
    query, key, value = torch.randn(3, 2, 8), torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    assert_same(program(query, key, value)[0], model(query, key, value)[0])


@torch.no_grad()
def test_an_example_that_is_a_weight_is_an_input() -> None:
    model = nn.Linear(3, 3, bias=False).eval()
    program = sardonyx.export(model, (model.weight,))
    assert_same(program(torch.eye(3)), model.weight.T)


# Edits


def test_an_argument_that_is_edited_and_returned_is_an_output_once(caplog: pytest.LogCaptureFixture) -> None:
    def edits(x: torch.Tensor) -> torch.Tensor:
        return x.add_(1)

    x, y = torch.ones(2), torch.ones(2)
    with caplog.at_level("WARNING", "sardonyx"):
        program = sardonyx.export(edits, (x,), verify=True)
    assert "modifies its argument x in place, which a file cannot: its output output is the new value" in caplog.text
    assert torch.equal(x, torch.ones(2))
    assert len(program.outputs) == 1
    assert_same(program(y), torch.full((2,), 2.0))
    assert_same(y, torch.full((2,), 2.0))


def test_an_argument_that_is_edited_and_not_returned_is_an_output_of_its_own(tmp_path: Path) -> None:
    def fill(cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        cache[:, 1] = x
        return cache.sum()

    program = sardonyx.export(fill, (torch.zeros(2, 3), torch.ones(2)), output_names=["total"])
    assert program.outputs == ["total", "cache_mutated"]
    cache, x = torch.zeros(2, 3), torch.tensor([2.0, 3.0])
    assert_same(program(cache, x), torch.tensor(5.0))
    assert_same(cache, torch.tensor([[0.0, 2, 0], [0, 3, 0]]))
    session = onnxruntime.InferenceSession(str(program.save(tmp_path / "m.onnx")))
    results = session.run(None, {"cache": np.zeros((2, 3), "float32"), "x": x.numpy()})
    assert_same(torch.from_numpy(results[1]), cache)


@pytest.mark.parametrize("name", ["t_", "squeeze_"])
def test_an_argument_that_gets_other_sizes_in_place_is_told(name: str) -> None:
    def changes(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        getattr(x, name)()
        return y + 1

    with pytest.raises(sardonyx.CaptureError, match="changes the shape of an argument in place"):
        sardonyx.export(changes, (X[:1].clone(), X))


def test_an_edit_that_torch_cannot_capture_names_the_line() -> None:
    class Overlapping(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.clone()
            y.unfold(0, 2, 1).mul_(2)  # the line
            return y

    with pytest.raises(sardonyx.CaptureError, match="overlap") as failure:
        sardonyx.export(Overlapping(), (X,))
    assert "# the line" in str(failure.value.where)


# Dtypes and sizes


def test_tensors_of_another_dtype_rank_or_size_are_told() -> None:
    def product(x: torch.Tensor, y: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
        return x @ y

    y = torch.ones(6, 2)
    program = sardonyx.export(product, (X, y, X), dynamic_shapes=({0: "rows"}, None, None))
    assert_same(program(X[:3], y, X), X[:3] @ y)
    with pytest.raises(TypeError, match=r"y has torch\.float64, where the model was exported with torch\.float32"):
        program(X, y.double(), X)
    with pytest.raises(ValueError, match="x has 3 dimensions, where the model was exported with 2"):
        program(X[None], y, X)
    with pytest.raises(ValueError, match=r"y\.shape\[1\] is 1, and the model was exported with 2, which is a constant"):
        program(X, y[:, :1], X)
    with pytest.raises(ValueError, match=r"unused\.shape\[0\] is 6"):
        program(X, y, y)


def test_sizes_that_were_taken_for_one_must_be_equal() -> None:
    def turned(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x + 1).reshape(x.shape[1], x.shape[0]) * y.sum()

    auto, square = Dim.AUTO, torch.arange(9.0).view(3, 3)
    program = sardonyx.export(turned, (square, X), dynamic_shapes=({0: auto, 1: auto}, None))
    assert_same(program(square[:2, :2], X), turned(square[:2, :2], X))
    with pytest.raises(ValueError, match=r"x\.shape\[0\] == x\.shape\[1\]"):
        program(square[:, :1], X)


# Dynamic sizes


def test_arguments_of_any_number_have_their_sizes_declared_by_position_or_by_name() -> None:
    def total(first: torch.Tensor, *others: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        return first + others[0] - others[1] * named["factor"]

    rows = {0: "rows"}
    call = (X, X, X), {"factor": X}
    for shapes in (
        (rows, rows, rows, rows),
        (rows, (rows, rows), {"factor": rows}),
        {"first": rows, "others": (rows, rows), "named": {"factor": rows}},
        {"first": rows, "others": [rows, rows], "factor": rows},
    ):
        inputs = sardonyx.export(total, *call, dynamic_shapes=shapes).model.graph.inputs
        assert [(str(x.name), str(x.shape[0])) for x in inputs] == [
            ("first", "rows"),
            ("others_0", "rows"),
            ("others_1", "rows"),
            ("factor", "rows"),
        ]
    with pytest.raises(sardonyx.CaptureError, match="dynamic_shapes has 2 elements, and the call 4 arguments"):
        sardonyx.export(total, *call, dynamic_shapes=(rows, rows))
    with pytest.raises(sardonyx.CaptureError, match="dynamic_shapes names 'second', which is not an argument"):
        sardonyx.export(total, *call, dynamic_shapes={"second": rows})


class Resized(nn.Module):
    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        modes = [("nearest", 2), ("nearest", 1.5), ("bilinear", 1.5), ("bicubic", 2), ("nearest-exact", 2)]
        sizes = [F.interpolate(x, scale_factor=factor, mode=mode) for mode, factor in modes]
        again = F.interpolate(x, scale_factor=2, mode="bilinear", recompute_scale_factor=True, align_corners=True)
        return [*sizes, again]


def test_images_are_resized_by_a_factor_whatever_their_sizes() -> None:
    program = sardonyx.export(Resized().eval(), (torch.randn(2, 3, 4, 5),), dynamic_shapes=({0: "n", 2: "h", 3: "w"},))
    assert list(map(str, program.model.graph.inputs[0].shape)) == ["n", "3", "h", "w"]
    for sizes in ((1, 3, 4, 5), (3, 3, 7, 6)):
        x = torch.randn(sizes)
        for got, want in zip(program(x), Resized()(x), strict=True):
            assert_same(got, want)


def test_lines_of_images_are_resized_by_a_factor_whatever_their_batch() -> None:
    def resized(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        smooth = F.interpolate(x[:, :, None].expand(-1, -1, 4, -1), scale_factor=0.5, mode="bilinear", antialias=True)
        return F.interpolate(x, scale_factor=2, mode="linear"), F.interpolate(x, scale_factor=2), smooth

    program = sardonyx.export(resized, (torch.randn(2, 3, 6),), dynamic_shapes=({0: "n"},))
    x = torch.randn(5, 3, 6)
    for got, want in zip(program(x), resized(x), strict=True):
        assert_same(got, want)


def test_a_size_that_became_a_constant_names_the_line() -> None:
    def specialized(x: torch.Tensor) -> torch.Tensor:
        return x * int(x.shape[0])  # the line

    for dim in ("rows", Dim.DYNAMIC, Dim("rows")):
        with pytest.raises(sardonyx.CaptureError) as failure:
            sardonyx.export(specialized, (X,), dynamic_shapes=({0: dim},))
        assert "# the line" in str(failure.value.where)
        assert "dynamic_shapes" in str(failure.value.hint)


def test_a_failed_export_leaves_no_marks_of_dynamic_sizes_on_the_examples() -> None:
    x = torch.ones(3, 4)
    with pytest.raises(sardonyx.CaptureError):
        sardonyx.export(lambda x: x.nonexistent(), (x,), dynamic_shapes=({0: Dim.DYNAMIC},))
    assert not vars(x)
    torch._dynamo.mark_dynamic(x, 1)
    before = {name: str(value) for name, value in vars(x).items()}
    sardonyx.export(torch.nn.ReLU(), (x,), dynamic_shapes=({0: Dim.DYNAMIC},))
    assert {name: str(value) for name, value in vars(x).items()} == before


def test_a_size_that_is_left_to_torch_and_became_a_constant_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "sardonyx"):
        program = sardonyx.export(lambda x: x * int(x.shape[0]), (X,), dynamic_shapes=({0: Dim.AUTO, 1: Dim.AUTO},))
    assert "x.shape[0] is a constant of the exported model, 4, at" in caplog.text
    assert not isinstance(program.model.graph.inputs[0].shape[1], int)


def test_a_size_that_a_decomposition_makes_constant_names_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    from sardonyx.capture import surgery

    own = surgery._trace_decomposition

    def specializing(node: torch.fx.Node, inputs: Any) -> Any:
        int(inputs[0].meta["val"].shape[0])
        return own(node, inputs)

    class Decomposed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.special.xlog1py(x, x)  # the line

    monkeypatch.setattr(surgery, "_trace_decomposition", specializing)
    told = r"x\.shape\[0\] was declared dynamic, but became the constant 4"
    for model, line in ((Decomposed().eval(), "# the line"), (lambda x: torch.special.xlog1py(x, x), "xlog1py")):
        with pytest.raises(sardonyx.CaptureError, match=told) as failure:
            sardonyx.export(model, (X,), dynamic_shapes=({0: "rows"},))
        assert line in str(failure.value.where)


def test_what_was_decided_by_a_size_is_told_and_checked(caplog: pytest.LogCaptureFixture) -> None:
    def decides(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] > 3 else x

    with caplog.at_level("WARNING", "sardonyx"):
        program = sardonyx.export(decides, (X,), dynamic_shapes=({0: "rows"},))
    assert "the exported model is only valid for rows > 3" in caplog.text
    assert_same(program(torch.ones(5, 6)), torch.full((5, 6), 2.0))
    with pytest.raises(ValueError, match="rows > 3"):
        program(torch.ones(2, 6))


def test_what_torch_asserts_of_a_number_is_checked() -> None:
    program = sardonyx.export(lambda n: torch.arange(n), (3,))
    assert program(5).tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="n >= 0"):
        program(-1)


# Transforms


@torch.no_grad()
def test_vmap_is_exported_over_a_dynamic_batch() -> None:
    class Mapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 4)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            rows = torch.vmap(lambda row: self.inner(row).softmax(0) * row.sum())(x)
            pairs = torch.vmap(torch.vmap(torch.dot, in_dims=(None, 0)), in_dims=(0, None))(x, y)
            return rows, pairs

    model, rows = Mapped().eval(), {0: "rows"}
    program = sardonyx.export(model, (X, X), dynamic_shapes=(rows, {0: "others"}))
    x, y = torch.randn(5, 6), torch.randn(3, 6)
    for got, want in zip(program(x, y), model(x, y), strict=True):
        assert_same(got, want)


def test_no_trial_of_a_number_is_heard(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    sardonyx.export(lambda x, s: x if s > 1 else -x, (X, 1.5))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("opset", [20, 23])
def test_rms_norm_has_the_epsilon_that_torch_computes_with(opset: int) -> None:
    def norms(x: torch.Tensor) -> list[torch.Tensor]:
        given = [x.to(dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)]
        return [F.rms_norm(x, (2,), weight) for x in given for weight in (None, torch.full((2,), 1.5).to(x.dtype))]

    x = torch.tensor([[1e-3, 2e-3], [300, -500], [1, 0]])
    for got, want in zip(sardonyx.export(norms, (x,), opset=opset)(x), norms(x), strict=True):
        torch.testing.assert_close(got, want)


# Conditions on dynamic sizes


@pytest.mark.parametrize(
    ("function", "sizes"),
    [
        (lambda x: x * 10 if x.shape[0] % 3 == 2 else x + 1, (5, 6)),
        (lambda x: x * 10 if x.shape[0] > 7 else x + 1, (9, 6)),
        (lambda x: (x + 1).squeeze(), (1, 6)),
        (lambda x: (x + 1).squeeze(0), (1, 6)),
        (lambda x: x[None].squeeze((0, 1)), (1, 6)),
    ],
)
def test_a_size_that_takes_another_branch_is_an_error(function: Any, sizes: tuple[int, ...]) -> None:
    program = sardonyx.export(function, (X,), dynamic_shapes=({0: "batch"},))
    for batch in (3, 4):
        assert_same(program(torch.ones(batch, 6)), function(torch.ones(batch, 6)))
    with pytest.raises(ValueError, match=r"the model was exported for calls with .*batch"):
        program(torch.ones(sizes))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sum() * torch.linspace(-1, 1, x.shape[0] ** 2),
        lambda x: x.sum() * torch.hann_window(x.shape[0] * x.shape[0]),
        lambda x: x.sum() * torch.ones(int(x.shape[0] ** 2)),
    ],
)
def test_a_size_that_is_taken_for_an_integer_is_an_error(function: Any) -> None:
    program = sardonyx.export(function, (X,), dynamic_shapes=({0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO},))
    assert_same(program(torch.ones(4, 8)), function(torch.ones(4, 8)))
    refusal = "the model was exported for calls with .* 16.*, which was decided at .*lambda x"
    with pytest.raises(ValueError, match=refusal):
        program(torch.ones(3, 8))


def test_a_size_that_torch_splits_otherwise_is_an_error() -> None:
    def second_half(x: torch.Tensor) -> torch.Tensor:
        return torch.ceil(x).tensor_split(2)[1]

    program = sardonyx.export(second_half, (torch.ones(5, 6),), examples=[(torch.ones(7, 6),)])
    for rows in (1, 3, 9):
        assert_same(program(torch.ones(rows, 6)), second_half(torch.ones(rows, 6)))
    for rows in (0, 2, 8):
        with pytest.raises(ValueError, match=r"the model was exported for calls with .*Mod"):
            program(torch.ones(rows, 6))


def test_a_function_without_a_signature_is_refused_with_a_hint() -> None:
    with pytest.raises(sardonyx.errors.CaptureError, match="function of your own"):
        sardonyx.export(torch.sin, (X,))
    assert_same(sardonyx.export(lambda x: torch.sin(x), (X,))(X), torch.sin(X))
