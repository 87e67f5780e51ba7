from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import sardonyx
from sardonyx.telemetry.verify import difference
from sardonyx.translate.builder import Builder
from tests.sizes import agrees_at_the_edges

TOLERANCE = 1e-5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 8)
        self.norm = nn.LayerNorm(8)
        self.register_buffer("shift", torch.randn(8))

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        y = self.norm(self.inner(x)) + self.shift
        return y if scale is None else y * scale


def run_saved(program: sardonyx.Program, path: Path, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """The model from its file, checked, in a stock session."""
    program.save(path)
    onnx.checker.check_model(str(path), full_check=True)
    session = onnxruntime.InferenceSession(str(path))
    feeds = {name: x.numpy() for name, x in zip(program.inputs, inputs, strict=True)}
    return [torch.from_numpy(result) for result in session.run(None, feeds)]


def assert_same(got: Any, want: Any) -> None:
    assert difference(got, want) <= TOLERANCE


@torch.no_grad()
def test_program_and_file_agree_with_the_module(tmp_path: Path) -> None:
    model, x = Net().eval(), torch.randn(3, 4)
    program = sardonyx.export(model, (x,))
    assert_same(program(x), model(x))
    assert_same(run_saved(program, tmp_path / "net.onnx", x)[0], model(x))
    assert program.inputs == ["x"]
    assert program.outputs == ["output"]
    assert {"inner.weight", "inner.bias", "norm.weight", "shift"} <= set(program.model.graph.initializers)
    assert program.report.fallbacks == []
    assert set(program.report.seconds) == {"capture", "translate", "optimize", "weights", "functions", "names"}


@torch.no_grad()
def test_keyword_arguments_and_nested_results(tmp_path: Path) -> None:
    class Nested(nn.Module):
        def forward(self, pair: tuple[torch.Tensor, torch.Tensor], *, options: dict[str, torch.Tensor]) -> Any:
            a, b = pair
            return {"sum": a + b, "rest": [a * options["factor"], None, 3]}

    a, b, factor = torch.randn(2), torch.randn(2), torch.randn(2)
    program = sardonyx.export(Nested(), ((a, b),), {"options": {"factor": factor}})
    got = program((a, b), options={"factor": factor})
    assert_same(got["sum"], a + b)
    assert_same(got["rest"][0], a * factor)
    assert got["rest"][1:] == [None, 3]
    assert program.outputs == ["sum", "rest_0"]
    assert len(run_saved(program, tmp_path / "m.onnx", a, b, factor)) == 2
    with pytest.raises(TypeError, match="keywords"):
        program((a, b))


@torch.no_grad()
def test_dynamic_sizes_by_name_by_dim_and_by_example() -> None:
    model, x = Net().eval(), torch.randn(3, 4)
    batch = torch.export.Dim("batch")
    by_text = sardonyx.export(model, (x,), dynamic_shapes=({0: "rows"},))
    by_dim = sardonyx.export(model, (x,), dynamic_shapes={"x": {0: batch}})
    by_example = sardonyx.export(model, (x,), examples=[(torch.randn(5, 4),)])
    names = [str(p.model.graph.inputs[0].shape[0]) for p in (by_text, by_dim)]
    assert names == ["rows", "batch"]
    for program in (by_text, by_dim, by_example):
        assert not isinstance(program.model.graph.inputs[0].shape[0], int)
        agrees_at_the_edges(program, model, lambda rows: (torch.ones(rows, 4),), {"rows": 7})


@torch.no_grad()
def test_sizes_of_one_name_are_one_size() -> None:
    class Joined(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x.reshape(y.shape[0], -1)

    shapes = {"x": {0: "rows"}, "y": {0: "rows"}}
    program = sardonyx.export(Joined(), (torch.randn(3, 4), torch.randn(3, 2)), dynamic_shapes=shapes)
    assert [str(size) for size in program.model.graph.outputs[0].shape] == ["rows", "4"]
    assert program(torch.randn(0, 4), torch.randn(0, 2)).shape == (0, 4)


def test_both_ways_to_say_what_is_dynamic_is_an_error() -> None:
    with pytest.raises(sardonyx.OptionError, match="both"):
        sardonyx.export(Net(), (torch.ones(1, 4),), dynamic_shapes=({0: "b"},), examples=[(torch.ones(2, 4),)])


@torch.no_grad()
def test_names_opset_and_an_input_that_nothing_reads(tmp_path: Path) -> None:
    class Ignores(nn.Module):
        def forward(self, x: torch.Tensor, unused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x + 1, x

    x = torch.randn(2)
    program = sardonyx.export(Ignores(), (x, x), opset=20, input_names=["left", "right"], output_names=["up", "same"])
    assert (program.inputs, program.outputs) == (["left", "right"], ["up", "same"])
    assert program.proto().opset_import[0].version == 20
    up, same = run_saved(program, tmp_path / "m.onnx", x, x)
    assert_same(up, x + 1)
    assert_same(same, x)
    with pytest.raises(sardonyx.OptionError, match="1 output names"):
        sardonyx.export(Ignores(), (x, x), output_names=["only"])


@torch.no_grad()
@pytest.mark.parametrize("opset", [18, 20, 21, 22, 23, 24])
def test_every_opset_from_eighteen_on(opset: int, tmp_path: Path) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.groups = nn.RMSNorm(8), nn.GroupNorm(2, 4)

        def forward(self, x: torch.Tensor, grid: torch.Tensor) -> Any:
            y = nn.functional.gelu(self.norm(x)) + nn.functional.gelu(x, approximate="tanh")
            attended = nn.functional.scaled_dot_product_attention(y, y, y, is_causal=True)
            return self.groups(attended), nn.functional.grid_sample(x, grid), x.amax(-1), x.std(1)

    model, x, grid = Mixed().eval(), torch.randn(2, 4, 6, 8), torch.rand(2, 3, 3, 2) * 2 - 1
    program = sardonyx.export(model, (x, grid), opset=opset)
    assert program.proto().opset_import[0].version == opset
    for got, want in zip(run_saved(program, tmp_path / "m.onnx", x, grid), model(x, grid), strict=True):
        assert_same(got, want)


@torch.no_grad()
def test_a_function_is_exported_as_a_module_is(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(3)
    assert_same(sardonyx.export(lambda x, y: x * y + 1, (x, x))(x, x), x * x + 1)
    with pytest.raises(TypeError, match="a module or a function"):
        sardonyx.export(3, (x,))  # type: ignore[arg-type]
    with caplog.at_level("WARNING", "sardonyx"):
        sardonyx.export(nn.Linear(3, 3), x)
    assert "training mode" in caplog.text


@torch.no_grad()
def test_results_that_are_weights_sizes_and_repeated() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3))

        def forward(self, x: torch.Tensor) -> Any:
            y = x * 2
            return y, y, self.w, x.shape[0]

    model, x = Odd(), torch.randn(5)
    program = sardonyx.export(model, (x,), dynamic_shapes=({0: "n"},))
    y, again, w, n = program(torch.ones(7))
    assert n == 7
    assert_same(y, torch.full((7,), 2.0))
    assert_same(again, y)
    assert_same(w, model.w)


@torch.no_grad()
def test_tied_weights_are_written_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(16, 4)
            self.head = nn.Linear(4, 16, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(ids))

    model, ids = Tied(), torch.randint(0, 16, (2, 3))
    program = sardonyx.export(model, (ids,))
    assert sum(value.shape == ir.Shape([16, 4]) for value in program.model.graph.initializers.values()) == 1
    assert_same(program(ids), model(ids))


def _fill(x: torch.Tensor) -> Any:
    y = torch.zeros(4)
    y[1:3] = x
    return y.add_(1)


def _chain(x: torch.Tensor) -> Any:
    y = x * 2
    before = y + 3
    z = y.relu_()
    z += 1
    return before, y, z


def _through_a_view(x: torch.Tensor) -> Any:
    y = x * 2
    first = y[0]
    y.add_(1)
    return first, y


def _into_a_view(x: torch.Tensor) -> Any:
    y = x * 1
    y.view(1, 2).add_(3)
    return y


def _keeps_dtype(x: torch.Tensor) -> Any:
    y = (x > 0).float()
    y += torch.ones(2, dtype=torch.float64)
    return y


def _through_dropout(x: torch.Tensor) -> Any:
    y = x * 1
    z = nn.functional.dropout(y, 0.5, False)
    z.add_(1)
    return y, z


def _through_einsum(x: torch.Tensor) -> Any:
    y = torch.diag(x)
    z = torch.einsum("ii->i", y)
    z.add_(1)
    return y, z


def _edits_a_view_twice(x: torch.Tensor) -> Any:
    y = x * 1
    z = y.squeeze()
    z.zero_()
    z.fill_(3)
    return y, z


def _by_overloads_of_other_names(x: torch.Tensor) -> Any:
    powers, exponents = (x + 1).pow_(2), (x + 4).pow_(x)
    quotients, scaled = (x * 7).floor_divide_(torch.tensor(2.0)), (x * 1).ldexp_(torch.tensor(3))
    return powers, exponents, quotients, scaled, (x * 1).unsqueeze_(0).transpose_(0, 1)


def _to_truth_values(x: torch.Tensor) -> Any:
    return (x * 1).logical_not_(), (x * 1).gt_(0), (x * 1).logical_and_(x > 0), (x.double() * 1).eq_(x)


@torch.no_grad()
@pytest.mark.parametrize(
    "function",
    [
        *(_fill, _chain, _through_a_view, _into_a_view, _keeps_dtype, _through_dropout, _through_einsum),
        *(_edits_a_view_twice, _by_overloads_of_other_names, _to_truth_values),
    ],
)
def test_edits_in_place_show_everywhere_they_should(function: Any) -> None:
    class Module(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return function(x)

    x = torch.tensor([1.0, -2.0])
    got = pytree.tree_leaves(sardonyx.export(Module(), (x,))(x))
    for ours, theirs in zip(got, pytree.tree_leaves(function(x)), strict=True):
        assert_same(ours, theirs)


@torch.no_grad()
def test_complex_tensors_in_out_and_held() -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("turn", torch.polar(torch.ones(4), torch.arange(4.0)))

        def forward(self, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            turned = z * self.turn
            return turned, turned.abs()

    z = torch.randn(3, 4, dtype=torch.complex64)
    program = sardonyx.export(Complex(), (z,))
    for got, want in zip(program(z.conj()), Complex()(z.conj()), strict=True):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want)


def test_a_value_that_decides_gives_the_line_and_the_fix() -> None:
    class Decides(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.sum() > 0:
                return x
            return -x

    with pytest.raises(sardonyx.CaptureError) as failure:
        sardonyx.export(Decides(), (torch.ones(2),))
    assert __file__ in str(failure.value.where)
    assert "if x.sum() > 0" in str(failure.value.where)
    assert "torch.cond" in str(failure.value.hint)


def test_a_size_that_cannot_change_is_named_without_noise(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(sardonyx.CaptureError, match="specialized it to be a constant") as failure:
        sardonyx.export(Net().eval(), (torch.ones(3, 4),), dynamic_shapes=({1: "width"},))
    assert "cannot be dynamic" in str(failure.value.hint)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_what_does_not_fit_is_told(tmp_path: Path) -> None:
    model, x = Net().eval(), torch.ones(3, 4)
    program = sardonyx.export(model, (x,))
    with pytest.raises(TypeError, match="ndarray"):
        program(x.numpy())
    with pytest.raises(ValueError, match=r"x\.shape\[0\] is 2, and the model was exported with 3"):
        program(torch.ones(2, 4))
    with pytest.raises(sardonyx.OptionError, match="at most"):
        sardonyx.export(model, (x,), opset=99)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        program.save(tmp_path / "missing" / "net.onnx")


def test_an_operator_without_a_translation_names_the_line() -> None:
    class Hard(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.eigvalsh(x)

    with pytest.raises(sardonyx.UnsupportedOperator) as failure:
        sardonyx.export(Hard(), (torch.eye(3),))
    assert "eigvalsh" in str(failure.value)
    assert "translations=" in str(failure.value.hint)


@torch.no_grad()
def test_own_translations_come_before_the_table() -> None:
    def gelu(g: Builder, x: ir.Value, *, approximate: str = "none") -> ir.Value:
        return g.Gelu(x, approximate="tanh")

    x = torch.linspace(-3, 3, 7)
    program = sardonyx.export(nn.GELU(), (x,), translations={torch.ops.aten.gelu: gelu})
    assert_same(program(x), nn.functional.gelu(x, approximate="tanh"))
    with pytest.raises(sardonyx.OptionError, match="translations"):
        sardonyx.export(nn.GELU(), (x,), translations={nn.GELU: gelu})


@torch.no_grad()
@pytest.mark.parametrize("optimize", ["default", "none"])
def test_modules_become_functions(tmp_path: Path, optimize: str) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.relu(self.fc(x) * 3 + 1)

    model, x = nn.Sequential(Block(), Block(), nn.Linear(4, 2)).eval(), torch.randn(3, 4)
    program = sardonyx.export(model, (x,), functions=[Block], optimize=optimize)
    assert [name for _, name, _ in program.model.functions] == [Block.__qualname__.rpartition(".")[2]]
    assert sum(node.op_type == "Block" for node in program.model.graph) == 2
    assert_same(program(x), model(x))
    assert_same(run_saved(program, tmp_path / "m.onnx", x)[0], model(x))


@torch.no_grad()
def test_nodes_say_where_they_come_from() -> None:
    proto = sardonyx.export(Net().eval(), (torch.ones(2, 4),)).proto()
    told = {entry.key: entry.value for entry in proto.graph.node[0].metadata_props}
    assert "inner" in told["pkg.torch.onnx.name_scopes"]
    assert "Linear" in told["pkg.torch.onnx.class_hierarchy"]
    assert "self.inner(x)" in told["pkg.torch.onnx.stack_trace"]


@torch.no_grad()
def test_half_precision_weights_stay_half() -> None:
    model, x = Net().eval().half(), torch.randn(3, 4, dtype=torch.float16)
    program = sardonyx.export(model, (x,))
    assert program.model.graph.initializers["inner.weight"].dtype == ir.DataType.FLOAT16
    assert not any(node.op_type == "Cast" for node in program.model.graph)
    assert difference(program(x), model(x)) < 5e-3


def test_verify_finds_a_wrong_translation() -> None:
    def wrong(g: Builder, x: ir.Value) -> ir.Value:
        return g.Neg(x)

    x = torch.ones(2)
    sardonyx.export(nn.ReLU(), (x,), verify=True)
    with pytest.raises(sardonyx.VerificationError, match="output 0"):
        sardonyx.export(nn.ReLU(), (x,), verify=True, translations={"aten::relu": wrong})


@torch.no_grad()
def test_external_data_when_asked_and_files_are_replaced_whole(tmp_path: Path) -> None:
    model, x = Net().eval(), torch.randn(3, 4)
    path = tmp_path / "net.onnx"
    path.write_text("what was here before")
    program = sardonyx.export(model, (x,))
    program.save(path, external_data=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["net.onnx", "net.onnx.data"]
    assert_same(torch.from_numpy(onnxruntime.InferenceSession(str(path)).run(None, {"x": x.numpy()})[0]), model(x))


@torch.no_grad()
def test_branches_by_value_are_exported(tmp_path: Path) -> None:
    class Branches(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, lambda x: x.sin() + 1, lambda x: x.cos() * 2, (x,))

    program = sardonyx.export(Branches(), (torch.ones(3),))
    for x in (torch.ones(3), -torch.ones(3)):
        assert_same(program(x), Branches()(x))
        assert_same(run_saved(program, tmp_path / "m.onnx", x)[0], Branches()(x))


@torch.no_grad()
def test_an_existing_model_is_optimized(tmp_path: Path) -> None:
    model, x = Net().eval(), torch.randn(3, 4)
    plain = sardonyx.export(model, (x,), optimize="none")
    path = plain.save(tmp_path / "plain.onnx")
    before = path.read_bytes()
    for given in (path, str(path), plain.proto(), plain.model):
        program = sardonyx.optimize(given)
        assert program.report.nodes <= plain.report.nodes
        assert_same(program(x), model(x))
    assert path.read_bytes() == before
    (tmp_path / "bad.onnx").write_bytes(b"no model")
    with pytest.raises(sardonyx.SardonyxError, match=r"bad\.onnx"):
        sardonyx.optimize(tmp_path / "bad.onnx")
    with pytest.raises(FileNotFoundError):
        sardonyx.optimize(tmp_path / "missing.onnx")


BIG = """
import resource, sys, torch, onnxruntime, sardonyx

def now():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS"))

sardonyx.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))  # imports
before = now()
with torch.device("meta"):
    model = torch.nn.Sequential(*(torch.nn.Linear(8192, 8192) for _ in range(9)))
model = model.to_empty(device="cpu")
for p in model.parameters():
    p.data.copy_(torch.rand(8192).sub_(0.5).mul_(0.02))  # a row for all: random numbers for each would take longest
size = sum(p.nbytes for p in model.parameters())
x = torch.ones(1, 8192)
program = sardonyx.export(model.eval(), (x,))
program.save(sys.argv[1])
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
with torch.no_grad():
    want = model(x)
del model, program
got = onnxruntime.InferenceSession(sys.argv[1]).run(None, {"input": x.numpy()})[0]
print(size, peak, float((torch.from_numpy(got) - want).abs().max() / want.abs().max()))
"""


def test_more_than_two_gigabytes_without_a_second_copy(tmp_path: Path) -> None:
    path = tmp_path / "big.onnx"
    done = subprocess.run([sys.executable, "-c", BIG, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    size, peak, error = map(float, done.stdout.split())
    assert size > 2 * 2**30
    assert peak <= 1.3 * size
    assert error <= 1e-4
    assert path.stat().st_size < 2**20
    assert (tmp_path / "big.onnx.data").stat().st_size >= size
