"""sardonyx.compat: programs in the old words do what they did."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode

import sardonyx
from sardonyx import OptionError, Program, compat
from sardonyx.compat import OptimizationOptions, dump_onnx, make_aot_ort, onnxmlir_backend, to_onnx, train_loop
from sardonyx.errors import CaptureError
from sardonyx.telemetry.report import collecting


@pytest.fixture(autouse=True)
def with_gradients() -> Iterator[None]:
    with torch.enable_grad():
        yield


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(nn.functional.silu(self.first(x)))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class TestMakeAotOrt:
    def test_its_backend_compiles(self) -> None:
        model, x = MLP(), torch.randn(3, 8)
        backend, _ = make_aot_ort(dynamic=True, rewrite=True, fallback="error")
        torch.testing.assert_close(torch.compile(model, backend=backend, fullgraph=True)(x), model(x))

    @pytest.mark.parametrize("rewrite", [True, False, "try"])
    def test_without_rewriting_no_rule_applies(self, rewrite: bool | str) -> None:
        with collecting() as report:
            torch.compile(nn.SiLU(), backend=make_aot_ort(rewrite=rewrite)[0])(torch.randn(3, 8))
        assert bool(report.rules) is bool(rewrite)

    def test_the_second_result_is_what_it_compiles_with(self) -> None:
        assert make_aot_ort(dynamic=True, rewrite=True)[1] == {}
        assert make_aot_ort(rewrite=False)[1] == {"optimize": "none"}
        assert make_aot_ort(enable_pattern="default+onnxruntime", opset=20)[1] == {"optimize": "default", "opset": 20}
        assert (
            make_aot_ort(enable_pattern=["Silu"], disable_pattern="JoinCasts")[1]["optimize"] == "none+Silu-JoinCasts"
        )
        assert make_aot_ort(dump_prefix="there/model")[1] == {"dump": "there/model_{number}"}

    def test_options_of_torch_compile_are_laid_over_its_own(self) -> None:
        backend, _ = make_aot_ort(rewrite=False)
        with collecting() as report:
            torch.compile(nn.SiLU(), backend=backend, options={"optimize": "default"})(torch.randn(3, 8))
        assert report.rules

    def test_a_level_of_onnxruntimes_optimizers(self) -> None:
        backend, options = make_aot_ort(ort_optimization_level="ORT_DISABLE_ALL")
        assert options["session_options"] == {
            "graph_optimization_level": onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        }
        torch.testing.assert_close(torch.compile(torch.sin, backend=backend)(torch.ones(3)), torch.ones(3).sin())

    def test_an_argument_without_effect_says_so(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, "sardonyx"):
            assert make_aot_ort(processor="CPU,CUDA", aot_autograd=True)[1] == {}
        assert "processor has no effect: the provider follows the tensors' device" in caplog.text

    def test_an_unknown_argument_or_rule_is_an_error(self) -> None:
        with pytest.raises(OptionError, match="did you mean 'fallback'"):
            make_aot_ort(falback="error")
        with pytest.raises(OptionError, match="unknown rule 'NoSuchPattern'"):
            make_aot_ort(enable_pattern="NoSuchPattern")

    def test_verbose_shows_the_stages(self, caplog: pytest.LogCaptureFixture) -> None:
        ours = logging.getLogger("sardonyx")
        level = ours.level
        try:
            torch.compile(torch.sin, backend=make_aot_ort(verbose=1)[0])(torch.ones(3))
        finally:
            ours.setLevel(level)
        assert "inference graph: translate took" in caplog.text


class TestTrainLoop:
    def test_it_returns_the_gradients_of_a_step_and_takes_it(self) -> None:
        model, x = MLP(), torch.randn(3, 8)
        exact = train_loop(copy.deepcopy(model).double(), x.double())
        before = model.first.weight.detach().clone()
        gradients = train_loop(torch.compile(model, backend=make_aot_ort(fallback="error")[0]), x)
        for got, expected in zip(gradients, exact, strict=True):
            torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(model.first.weight, before - 1e-3 * gradients[0])

    def test_a_loss_and_an_optimizer_can_be_given(self) -> None:
        model, x = MLP(), torch.randn(3, 8)
        start = copy.deepcopy(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        gradients = train_loop(model, x, loss_fn=nn.L1Loss(), optimizer=optimizer)
        torch.autograd.backward(nn.functional.l1_loss(start(x), torch.ones(3, 4)))
        torch.testing.assert_close(gradients[0], start.first.weight.grad)
        torch.testing.assert_close(model.first.weight, start.first.weight - 0.5 * gradients[0])

    def test_of_several_results_the_first_is_trained(self) -> None:
        model = nn.LSTM(4, 4)
        expected = train_loop(copy.deepcopy(model), torch.ones(2, 4))
        assert [x.shape for x in expected] == [p.shape for p in model.parameters()]


class TestDumpOnnx:
    def test_files_are_numbered_after_the_prefix(self, tmp_path: Path) -> None:
        model = torch.compile(MLP(), backend=make_aot_ort()[0])
        with dump_onnx("dort-mlp", folder=tmp_path / "dump"):
            train_loop(model, torch.randn(3, 8))
        assert names(tmp_path / "dump") == [f"dort-mlp_{n}.{kind}" for n in (0, 1) for kind in ("onnx", "txt")]
        onnx.checker.check_model(onnx.load(tmp_path / "dump" / "dort-mlp_1.onnx"))
        assert "def forward" in (tmp_path / "dump" / "dort-mlp_1.txt").read_text()

    def test_outside_nothing_is_dumped(self, tmp_path: Path) -> None:
        with dump_onnx("none", folder=tmp_path):
            pass
        torch.compile(MLP(), backend="sardonyx")(torch.randn(3, 8))
        assert names(tmp_path) == []

    def test_cleaning_removes_its_own_files_alone(self, tmp_path: Path) -> None:
        kept = ["model_x.onnx", "model_0.onnx.md", "my_model_0.onnx", "model_0", "notes.txt", "000_forward.onnx"]
        for name in [*kept, "model_0.onnx", "model_0.txt", "model_12.onnx.data"]:
            (tmp_path / name).touch()
        with dump_onnx("model", folder=tmp_path, clean=True):
            assert names(tmp_path) == sorted(kept)

    def test_without_cleaning_the_next_free_number_is_taken(self, tmp_path: Path) -> None:
        (tmp_path / "model_0.onnx").touch()
        with dump_onnx("model", folder=tmp_path):
            torch.compile(torch.sin, backend="sardonyx")(torch.ones(3))
        assert names(tmp_path) == ["model_0.onnx", "model_1.onnx", "model_1.txt"]

    def test_the_old_variable_is_a_prefix(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ONNXRT_DUMP_PATH", f"{tmp_path}/dumped/dumped_model_")
        torch.compile(MLP(), backend="onnxrt")(torch.randn(3, 8)).sum().backward()
        files = names(tmp_path / "dumped")
        assert files == [f"dumped_model_{n}.{kind}" for n in (0, 1) for kind in ("onnx", "txt")]

    def test_weights_lie_beside_a_dumped_model(self, tmp_path: Path) -> None:
        model, x = MLP().eval(), torch.randn(3, 8)
        with dump_onnx("model", folder=tmp_path), torch.no_grad():
            expected = torch.compile(model, backend="sardonyx")(x)
        session = onnxruntime.InferenceSession(tmp_path / "model_0.onnx")
        torch.testing.assert_close(
            torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]), expected
        )


class TestToOnnx:
    def test_it_exports(self, tmp_path: Path) -> None:
        model, x = MLP().eval(), torch.randn(3, 8)
        proto = to_onnx(model, (x,), input_names=["x"], target_opset=20, filename=tmp_path / "model.onnx", verbose=0)
        assert isinstance(proto, onnx.ModelProto)
        assert [(i.domain, i.version) for i in proto.opset_import] == [("", 20)]
        session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
        torch.testing.assert_close(torch.from_numpy(session.run(None, {"x": x.numpy()})[0]), model(x).detach())

    def test_the_builder_is_a_program(self) -> None:
        model, x = MLP().eval(), torch.randn(3, 8)
        found = to_onnx(model, (x,), return_builder=True, dynamic_shapes=({0: "batch"},))
        assert isinstance(found, tuple)
        assert isinstance(found[1], Program)
        torch.testing.assert_close(found[1](x[:2]), model(x[:2]).detach())

    @pytest.mark.parametrize(
        ("options", "opset", "expected"),
        [
            (OptimizationOptions(), 23, {"Sigmoid", "Mul", "Gemm"}),
            (OptimizationOptions(patterns="default+onnxruntime"), 23, {"QuickGelu", "Gemm"}),
            (OptimizationOptions(), {"": 23, "com.microsoft": 1}, {"QuickGelu", "Gemm"}),
            (OptimizationOptions(patterns=None), {"": 23, "com.microsoft": 1}, {"Sigmoid", "Mul", "Gemm"}),
        ],
    )
    def test_patterns_and_opsets_choose_the_operators(
        self, options: OptimizationOptions, opset: int | dict[str, int], expected: set[str]
    ) -> None:
        proto = to_onnx(MLP().eval(), (torch.randn(3, 8),), options=options, target_opset=opset)
        assert isinstance(proto, onnx.ModelProto)
        assert {node.op_type for node in proto.graph.node} == expected

    @pytest.mark.parametrize("dynamic", [False, True])
    @pytest.mark.parametrize("lowered", [False, True])
    def test_it_exports_what_a_backend_is_handed(self, dynamic: bool, lowered: bool) -> None:
        exported: list[onnx.ModelProto] = []

        def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
            exported.append(to_onnx(graph, tuple(inputs)))
            return make_boxed_func(graph.forward) if lowered else graph.forward

        def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return (x @ w).relu().reshape(-1, x.shape[0]) + x.shape[0]

        chosen: Any = aot_autograd(fw_compiler=backend) if lowered else backend
        torch.compile(function, backend=chosen, dynamic=dynamic)(torch.randn(3, 4), torch.randn(4, 3))
        session = onnxruntime.InferenceSession(exported[0].SerializeToString(), providers=["CPUExecutionProvider"])
        given = (torch.randn(5, 4), torch.randn(4, 5)) if dynamic else (torch.randn(3, 4), torch.randn(4, 3))
        feeds = {x.name: value.numpy() for x, value in zip(session.get_inputs(), given, strict=True)}
        torch.testing.assert_close(torch.from_numpy(session.run(None, feeds)[0]), function(*given))

    @pytest.mark.parametrize("lowered", [False, True])
    @pytest.mark.parametrize(
        "make",
        [
            lambda n: torch.ones(n),
            lambda n: torch.cat([torch.zeros(n - 1), torch.full((1,), 2.0)]),
            lambda n: torch.full((n,), 2.0) + torch.arange(n),
        ],
    )
    def test_tensors_of_symbolic_sizes_are_made_in_the_graph(self, make: Callable[[int], Any], lowered: bool) -> None:
        exported: list[onnx.ModelProto] = []

        def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
            exported.append(to_onnx(graph, tuple(inputs)))
            return make_boxed_func(graph.forward) if lowered else graph.forward

        def function(x: torch.Tensor) -> torch.Tensor:
            return x.sum(1) + make(x.shape[0])

        torch._dynamo.reset()
        chosen: Any = aot_autograd(fw_compiler=backend) if lowered else backend
        torch.compile(function, backend=chosen, dynamic=True)(torch.randn(3, 4))
        session = onnxruntime.InferenceSession(exported[0].SerializeToString(), providers=["CPUExecutionProvider"])
        for rows in (3, 5):
            x = torch.randn(rows, 4)
            feeds = {
                value.name: x.numpy() if len(value.shape) == 2 else np.array(rows) for value in session.get_inputs()
            }
            torch.testing.assert_close(torch.from_numpy(session.run(None, feeds)[0]), function(x))

    def test_a_graph_that_cannot_be_traced_says_what_to_pass(self) -> None:
        with FakeTensorMode(), pytest.raises(CaptureError, match="instead of SymInts"):
            to_onnx(lambda x: x.nonzero().tolist(), (torch.ones(3),))

    def test_unknown_arguments_are_errors(self) -> None:
        with pytest.raises(OptionError, match="unknown option 'dispatcher'"):
            to_onnx(MLP(), (torch.randn(3, 8),), dispatcher=None)
        with pytest.raises(OptionError, match="unknown option 'paterns'"):
            OptimizationOptions(paterns="default")


def test_a_level_that_onnxruntime_does_not_have_is_an_error() -> None:
    with pytest.raises(OptionError, match="ORT_ENABLE_ALL"):
        make_aot_ort(ort_optimization_level="ORT_ENABLE_SOME")


class Add(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y


X, Y = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0])


class TestOnnxMlir:
    """Another engine runs here: onnx-mlir itself has tests of its own."""

    def test_its_backend_takes_an_engine_and_the_old_options(self) -> None:
        options = {"engine": "reference", "compile_options": "-O3", "compile_tag": "7", "compiler_image_name": None}
        with collecting() as report:
            run = torch.compile(Add(), backend=onnxmlir_backend, options=options)
            assert run(X, Y).equal(X + Y)
        assert report.operators == {"Add": 1}

    def test_its_backend_works_without_options(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[Any] = []
        monkeypatch.setattr(compat.dynamo, "sardonyx", lambda graph, inputs, **how: asked.append(how) or graph)
        assert torch.compile(Add(), backend=onnxmlir_backend)(X, Y).equal(X + Y)
        assert asked == [{"options": {"engine": "onnx-mlir"}, "mode": None}]

    @pytest.mark.parametrize(
        ("old", "ours"),
        [
            ({"compile_options": "-O3"}, {"compile_options": "-O3"}),
            ({"compile_args": "-O3 --parallel"}, {"compile_options": "-O3 --parallel"}),
            ({"compiler_path": "/opt/onnx-mlir"}, {"compiler_path": "/opt/onnx-mlir"}),
            ({"compiler_image_name": None, "compiler_path": "/opt/om"}, {"compiler_path": "/opt/om"}),
            ({"compiler_image_name": "local", "compiler_path": "/opt/om"}, {"compiler_path": "/opt/om"}),
            ({"compiler_image_name": "an/image"}, {"compiler_image": "an/image"}),
            (
                {"compiler_image_name": "an/image", "compiler_path": "/in/it", "container_engine": "podman"},
                {"compiler_image": "an/image", "engine_options": {"binary": "/in/it", "container": "podman"}},
            ),
            ({"container_engine": None, "temp_dir": "x", "compile_tag": 3, "debug": True}, {}),
            ({"cache_size": 5, "engine_options": {"timeout": 9}}, {"cache_size": 5, "engine_options": {"timeout": 9}}),
        ],
    )
    def test_the_old_options_in_our_words(
        self, old: dict[str, Any], ours: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[Any] = []
        monkeypatch.setattr(compat.dynamo, "sardonyx", lambda graph, inputs, **how: asked.append(how["options"]))
        onnxmlir_backend(torch.fx.symbolic_trace(Add()), [X, Y], options=old)
        assert asked == [{"engine": "onnx-mlir", **ours}]
        sardonyx.Options.of(asked[0])

    @pytest.mark.parametrize(
        ("wrong", "hint"),
        [
            ({"compile_option": "-O3"}, "did you mean 'compile_options'"),
            ({"compiler_image_nam": "x"}, "did you mean 'compiler_image'"),
            ({"onnxmlir_intercept": True}, "did you mean 'intercept'"),
            ({"onnxmlir-intercept": "yes"}, "a function that takes the call"),
            (sardonyx.Options(), "use a dict"),
        ],
    )
    def test_a_wrong_option_is_an_error_with_a_suggestion(self, wrong: Any, hint: str) -> None:
        with pytest.raises(OptionError, match=hint):
            onnxmlir_backend(torch.fx.symbolic_trace(Add()), [X, Y], options=wrong)

    def test_an_option_without_effect_says_so(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, "sardonyx"):
            torch.compile(Add(), backend=onnxmlir_backend, options={"compile_tag": 7, "engine": "reference"})(X, Y)
        assert "compile_tag has no effect: every library gets a unique tag" in caplog.text

    def test_intercepted_graphs_are_shown_and_run_by_torch(self, capsys: pytest.CaptureFixture[str]) -> None:
        with collecting() as report:
            run = torch.compile(Add(), backend=onnxmlir_backend, options={"onnxmlir-intercept": True})
            assert run(X, Y).equal(X + Y)
        assert capsys.readouterr().out == (
            "call 0 of graph 0/0 (GraphModule)\n"
            "  x: float32[2] cpu, 1 to 2, mean 1.5: [1, 2]\n  y: float32[2] cpu, 3 to 5, mean 4: [3, 5]\n"
        )
        assert not report.graphs

    def test_interception_that_is_off_compiles(self) -> None:
        options = {"onnxmlir-intercept": False, "engine": "reference"}
        with collecting() as report:
            torch.compile(Add(), backend=onnxmlir_backend, options=options)(X, Y)
        assert report.operators == {"Add": 1}

    def test_forward_is_intercepted(self, capsys: pytest.CaptureFixture[str]) -> None:
        model = Add()
        assert compat.interceptForward(model) is model
        assert model(X, y=Y).equal(X + Y)
        assert capsys.readouterr().out.startswith("call 0 of Add\n  x: float32[2] cpu, 1 to 2")

    @pytest.mark.parametrize("wrap", [compat.ONNXMLIRTorch, compat.compile])
    def test_a_model_is_wrapped(self, wrap: Any) -> None:
        pytest.importorskip("sardonyx.doors.module")
        model = wrap(Add(), engine="reference", compile_options="-O3", compiler_image_name=None, cache_dir="")
        assert model(X, Y).equal(X + Y)
        assert model(X[:1], y=Y[:1]).equal(X[:1] + Y[:1])
