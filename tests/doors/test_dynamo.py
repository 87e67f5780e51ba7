"""torch.compile(backend="sardonyx"): what a user can rely on."""

from __future__ import annotations

import copy
import logging
import threading
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

import sardonyx
from sardonyx.doors.dynamo import convert_legacy_options
from sardonyx.telemetry.report import collecting
from sardonyx.translate.translator import NotExpressible, Refusal, translate
from tests.sizes import agrees_at_the_edges


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()


def compiled(model: Any, dynamic: bool | None = None, **options: Any) -> Any:
    return torch.compile(model, backend="sardonyx", dynamic=dynamic, options={"fallback": "error", **options})


def close(result: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)


def test_a_model_gives_eagers_result() -> None:
    model, x = mlp(), torch.randn(3, 8)
    close(compiled(model)(x), model(x))


@pytest.mark.parametrize("name", ["sardonyx", "onnxrt"])
def test_both_names_are_registered(name: str) -> None:
    assert name in torch._dynamo.list_backends(exclude_tags=())
    close(torch.compile(torch.sin, backend=name)(torch.ones(3)), torch.ones(3).sin())


def test_modes_are_accepted() -> None:
    close(torch.compile(torch.sin, backend="sardonyx", mode="reduce-overhead")(torch.ones(3)), torch.ones(3).sin())


class TestWeights:
    """A session holds weights as constants; no edit of them may go unnoticed."""

    def test_an_edit_in_place_is_noticed(self) -> None:
        model, x = mlp(), torch.randn(3, 8)
        run = compiled(model)
        run(x)
        model[0].weight.add_(1.0)
        close(run(x), model(x))

    def test_an_edit_behind_the_version_counter_is_noticed(self) -> None:
        model, x = mlp(), torch.randn(3, 8)
        run = compiled(model)
        run(x)
        model[0].weight.data.mul_(2.0)
        close(run(x), model(x))
        model[2].bias.detach().numpy()[:] = 5.0
        close(run(x), model(x))

    def test_a_new_tensor_under_data_is_noticed(self) -> None:
        model, x = mlp(), torch.randn(3, 8)
        run = compiled(model)
        run(x)
        model[0].weight.data = torch.randn(16, 8)
        close(run(x), model(x))

    def test_load_state_dict_is_noticed(self) -> None:
        model, x = mlp(), torch.randn(3, 8)
        run = compiled(model)
        run(x)
        model.load_state_dict(mlp().state_dict())
        close(run(x), model(x))

    def test_a_replaced_parameter_is_noticed(self) -> None:
        model, x = mlp(), torch.randn(3, 8)
        run = compiled(model)
        run(x)
        model[0].weight = nn.Parameter(torch.randn(16, 8))
        close(run(x), model(x))

    def test_weights_that_keep_changing_become_inputs(self) -> None:
        model, x = mlp(), torch.randn(3, 8)
        with collecting() as report:
            run = compiled(model)
            for _ in range(8):
                model[0].weight.add_(0.1)
                close(run(x), model(x))
        assert report.graphs[0].regions[0].sessions <= 5

    @pytest.mark.parametrize("freeze", [True, False])
    def test_edits_of_a_weight_in_another_memory_format(self, freeze: bool) -> None:
        conv, x = nn.Conv2d(8, 16, 3).eval().to(memory_format=torch.channels_last), torch.randn(1, 8, 10, 10)
        run = compiled(conv, freeze=freeze)
        for _ in range(7):
            conv.weight.mul_(1.5)
            close(run(x), conv(x), 1e-3)
            conv.weight.data.mul_(0.7)
            close(run(x), conv(x), 1e-3)

    def test_a_buffer_is_noticed(self) -> None:
        norm, x = nn.BatchNorm1d(8).eval(), torch.randn(4, 8)
        run = compiled(norm)
        run(x)
        norm.running_mean.fill_(3.0)
        close(run(x), norm(x))

    def test_half_after_compiling(self) -> None:
        model, x = mlp(), torch.randn(3, 8)
        run = compiled(model)
        run(x)
        model.half()
        close(run(x.half()), model(x.half()), 5e-3)

    def test_train_and_eval_after_compiling(self) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        x = torch.randn(4, 8)
        model.eval()
        run = torch.compile(model, backend="sardonyx", options={"fallback": "quiet"})
        close(run(x), model(x))
        model.train()
        other = copy.deepcopy(model)
        close(run(x), other(x))
        close(model[1].running_mean, other[1].running_mean)
        model.eval()
        other.eval()
        close(run(x), other(x))

    def test_weights_are_not_copied(self) -> None:
        model = nn.Embedding(1000, 64).eval()
        run = compiled(model)
        run(torch.tensor([1]))
        model.weight.data[1].fill_(7.0)
        assert run(torch.tensor([1])).eq(7.0).all(), "an initializer that is not pre-packed shares torch's memory"

    def test_freeze_can_be_switched_off(self) -> None:
        model, x = mlp(), torch.randn(3, 8)
        with collecting() as report:
            close(compiled(model, freeze=False)(x), model(x))
        assert report.graphs[0].regions[0].weights == 0


class TestDynamicShapes:
    def test_one_graph_serves_many_shapes(self) -> None:
        model = mlp()
        with collecting() as report:
            run = compiled(model, dynamic=True)
            for batch in (2, 3, 7, 31):
                x = torch.randn(batch, 8)
                close(run(x), model(x))
        assert len(report.graphs) == 1

    def test_sizes_of_zero_one_and_many(self) -> None:
        model = mlp()
        agrees_at_the_edges(compiled(model, dynamic=True), model, lambda batch: (torch.randn(batch, 8),), {"batch": 3})

    def test_a_number_taken_for_constant_may_change(self) -> None:
        def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
            return x * factor + factor

        run = compiled(scaled, dynamic=True)
        for factor in (0.5, 0.5, 0.25, 3.0):
            x = torch.randn(4, 5)
            close(run(x, factor), scaled(x, factor))

    def test_an_integer_argument_may_change(self) -> None:
        def repeated(x: torch.Tensor, n: int) -> torch.Tensor:
            return x.new_ones(n) * x.sum() + n

        run = compiled(repeated, dynamic=True)
        for n in (3, 4, 9):
            close(run(torch.ones(3), n), repeated(torch.ones(3), n))


class TestResults:
    def test_views_of_inputs_stay_views(self) -> None:
        run = compiled(lambda x: (x.t(), x + 1))
        x = torch.randn(3, 4)
        view, _ = run(x)
        assert view.data_ptr() == x.data_ptr()
        assert view.stride() == x.t().stride()

    def test_views_of_an_input_that_is_edited_are_where_symbolic_sizes_say(self) -> None:
        def last(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            row, rest = x[x.shape[0] - 1], x[x.shape[0] // 2 :]
            x.add_(1)
            return row, rest

        run = compiled(last, dynamic=True)
        for rows in (3, 9, 4):
            ours, theirs = torch.randn(rows, 2), torch.empty(rows, 2)
            theirs.copy_(ours)
            for got, want in zip(run(ours), last(theirs), strict=True):
                close(got, want)
                assert got.storage_offset() == want.storage_offset()

    def test_an_input_can_be_returned(self) -> None:
        x = torch.randn(3)
        same, more = compiled(lambda x: (x, x + 1))(x)
        assert same is x or same.data_ptr() == x.data_ptr()
        close(more, x + 1)

    def test_strides_are_torchs(self) -> None:
        def turned(x: torch.Tensor) -> torch.Tensor:
            return (x + 1).permute(2, 0, 1)

        x = torch.randn(2, 3, 4)
        result = compiled(turned)(x)
        close(result, turned(x))
        assert result.stride() == turned(x).stride()

    def test_an_output_can_come_twice_or_be_none(self) -> None:
        def twice(x: torch.Tensor) -> tuple[torch.Tensor, None, torch.Tensor]:
            y = x * 2
            return y, None, y

        a, nothing, b = compiled(twice)(torch.ones(3))
        assert nothing is None
        assert torch.equal(a, b)

    def test_a_mutated_input_is_mutated(self) -> None:
        def add_one(x: torch.Tensor) -> torch.Tensor:
            x.add_(1)
            return x * 2

        x, expected = torch.zeros(3), torch.zeros(3)
        close(compiled(add_one)(x), add_one(expected))
        close(x, expected)

    def test_non_contiguous_inputs(self) -> None:
        x = torch.randn(4, 6)[:, ::2]
        close(compiled(torch.exp)(x), x.exp())

    @pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (2, 0, 4)])
    def test_shapes_at_the_edge(self, shape: tuple[int, ...]) -> None:
        x = torch.randn(shape)
        close(compiled(lambda x: x.exp() + 1)(x), x.exp() + 1)

    def test_booleans_in_and_out(self) -> None:
        x = torch.tensor([True, False])
        assert torch.equal(compiled(lambda x: ~x)(x), ~x)

    def test_outputs_can_be_preallocated(self) -> None:
        model, x = mlp(), torch.randn(3, 8)
        close(compiled(model, preallocate_outputs=True)(x), model(x))

    def test_results_survive_the_next_call(self) -> None:
        run = compiled(lambda x: x + 1)
        first = run(torch.zeros(64))
        run(torch.ones(64))
        assert first.eq(1).all()


class TestFallback:
    @staticmethod
    def unexpressible(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.eigvalsh((x * 2).diag()) + 1

    def test_error_names_the_operator_the_line_and_the_next_step(self) -> None:
        with pytest.raises(BackendCompilerFailed) as caught:
            compiled(self.unexpressible)(torch.ones(3))
        message = str(caught.value)
        assert "aten._linalg_eigh" in message
        assert "torch.linalg.eigvalsh((x * 2).diag())" in message
        assert "fallback" in message
        assert isinstance(caught.value.inner_exception, sardonyx.UnsupportedOperator)

    def test_warn_runs_it_in_torch_and_says_so(self, caplog: pytest.LogCaptureFixture) -> None:
        x = torch.randn(3)
        with collecting() as report, caplog.at_level(logging.WARNING, "sardonyx"):
            close(compiled(self.unexpressible, fallback="warn")(x), self.unexpressible(x))
        assert [f.operator for f in report.fallbacks] == ["aten._linalg_eigh.default"]
        assert "_linalg_eigh" in caplog.text

    def test_a_check_that_only_raises_is_torchs_and_no_fallback(self) -> None:
        run = compiled(lambda a: torch.linalg.inv(a * 2) + 1)
        with collecting() as report:
            close(run(torch.eye(3)), torch.linalg.inv(torch.eye(3) * 2) + 1)
        assert not report.fallbacks
        with pytest.raises(torch.linalg.LinAlgError, match="zero"):
            run(torch.zeros(3, 3))

    def test_complex_tensors_beside_real_ones(self) -> None:
        def mixed(x: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return (x + 1).sum() + z.real, z * 2 + 1

        x, z = torch.randn(3), torch.randn(3, dtype=torch.complex64)
        for result, expected in zip(compiled(mixed, fallback="quiet")(x, z), mixed(x, z), strict=True):
            close(result, expected)

    def test_random_numbers_stay_torchs(self) -> None:
        run = compiled(lambda x: x + torch.rand_like(x), fallback="quiet")
        torch.manual_seed(3)
        result = run(torch.zeros(5))
        torch.manual_seed(3)
        close(result, torch.rand(5))

    def test_what_a_part_cannot_express_stays_in_torch_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def forgetful(graph: torch.fx.GraphModule, **how: Any) -> Any:
            tanh = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.tanh.default)
            if tanh and how["outputs"]:  # as if only the whole graph told a size that it needs
                raise NotExpressible([Refusal(tanh[0], "a size is missing")])
            return translate(graph, **how)

        monkeypatch.setattr("sardonyx.pipeline.translate", forgetful)

        def mixed(x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.eigvalsh((x @ x.mT).sin().tanh().cos()) + 1

        x = torch.randn(4, 4)
        with collecting() as report:
            close(compiled(mixed, fallback="quiet")(x), mixed(x), tolerance=1e-3)
        assert {fallback.operator for fallback in report.fallbacks} == {
            "aten._linalg_eigh.default",
            "aten.tanh.default",
        }
        assert len(report.graphs[0].regions) == 3


class TestOptions:
    def test_an_unknown_option_suggests_the_nearest(self) -> None:
        with pytest.raises(BackendCompilerFailed, match="did you mean 'providers'"):
            torch.compile(mlp(), backend="sardonyx", options={"provider": []})(torch.randn(3, 8))

    def test_dump_writes_numbered_models_with_their_graphs(self, tmp_path: Path) -> None:
        compiled(mlp(), dump=str(tmp_path))(torch.randn(3, 8))
        torch._dynamo.reset()
        compiled(mlp(), dump=str(tmp_path))(torch.randn(4, 8))
        assert sorted(p.name for p in tmp_path.iterdir()) == [
            "000_inference.onnx",
            "000_inference.onnx.data",
            "000_inference.txt",
            "001_inference.onnx",
            "001_inference.onnx.data",
            "001_inference.txt",
        ]
        model = onnx.load(tmp_path / "000_inference.onnx")
        assert {node.op_type for node in model.graph.node} == {"Gemm", "Relu"}
        scopes = {p.value for n in model.graph.node for p in n.metadata_props if p.key == "pkg.torch.onnx.name_scopes"}
        assert scopes == {"['', '0', 'addmm']", "['', '1', 'relu']", "['', '2', 'addmm_1']"}
        assert "aten.addmm" in (tmp_path / "000_inference.txt").read_text()

    def test_a_dumped_model_runs_in_onnxruntime_alone(self, tmp_path: Path) -> None:
        model, x = mlp(), torch.randn(3, 8)
        compiled(model, dump=str(tmp_path))(x)
        session = onnxruntime.InferenceSession(tmp_path / "000_inference.onnx")
        result = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
        close(torch.from_numpy(result), model(x))

    def test_transforms_see_the_model_before_the_session(self) -> None:
        def relu_to_sigmoid(model: onnx.ModelProto) -> None:
            for node in model.graph.node:
                node.op_type = "Sigmoid" if node.op_type == "Relu" else node.op_type

        x = torch.randn(3)
        close(compiled(torch.relu, transforms=[relu_to_sigmoid])(x), x.sigmoid())

    def test_verify_finds_where_a_result_differs(self) -> None:
        def spoil(model: onnx.ModelProto) -> None:
            for node in model.graph.node:
                node.op_type = "Cos" if node.op_type == "Sin" else node.op_type

        x = torch.randn(3)
        close(compiled(torch.sin, verify=True)(x), x.sin())
        torch._dynamo.reset()
        with pytest.raises(sardonyx.VerificationError, match=r"aten\.sin"):
            compiled(lambda x: (x + 1).sin() * 2, verify=True, transforms=[spoil])(x)

    def test_session_options_as_a_dict_and_as_an_object(self) -> None:
        x = torch.randn(3)
        level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        close(compiled(torch.sin, session_options={"graph_optimization_level": level})(x), x.sin())
        torch._dynamo.reset()
        given = onnxruntime.SessionOptions()
        given.enable_mem_pattern = False
        close(compiled(torch.sin, session_options=given)(x), x.sin())

    @pytest.mark.parametrize("providers", [["NoProvider"], ["CUDAExecutionProvider"]])
    def test_a_provider_that_is_not_there_is_an_error(self, providers: list[str]) -> None:
        with pytest.raises(sardonyx.OptionError, match="CPUExecutionProvider"):
            compiled(torch.sin, providers=providers)(torch.randn(3))

    def test_an_unknown_session_option_is_an_error(self) -> None:
        with pytest.raises(sardonyx.OptionError, match="no_such"):
            compiled(torch.sin, session_options={"no_such": 1})(torch.randn(3))

    @pytest.mark.parametrize("opset", [18, 20, 22, 23])
    def test_opset_can_be_chosen(self, opset: int, tmp_path: Path) -> None:
        model, x = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval(), torch.randn(2, 5, 16)
        torch.backends.mha.set_fastpath_enabled(False)
        close(compiled(model, opset=opset, dump=str(tmp_path))(x), model(x))
        saved = onnx.load(tmp_path / "000_inference.onnx", load_external_data=False)
        assert {i.domain: i.version for i in saved.opset_import}[""] == opset

    def test_the_reference_engine_agrees(self) -> None:
        model, x = mlp(), torch.randn(3, 8)
        close(compiled(model, engine="reference")(x), model(x))

    def test_an_unknown_engine_is_an_error(self) -> None:
        with pytest.raises(BackendCompilerFailed, match="known engines"):
            compiled(torch.sin, engine="tensorrt-rtx-9")(torch.randn(3))


class TestOldOptions:
    def test_the_names_of_torchs_onnxrt_backend(self) -> None:
        seen: list[str] = []
        options = {
            "preferred_execution_providers": ["CPUExecutionProvider"],
            "infer_execution_providers": True,
            "default_execution_providers": ["CPUExecutionProvider"],
            "preallocate_output": True,
            "use_aot_autograd": True,
            "ort_session_options": onnxruntime.SessionOptions(),
            "pre_ort_model_transforms": [lambda model: seen.append(model.graph.name)],
        }
        x = torch.randn(3)
        close(torch.compile(torch.sin, backend="onnxrt", options=options)(x), x.sin())
        assert seen

    @pytest.mark.parametrize("settings", [{}, {"use_arena": "0"}])
    def test_a_preferred_provider_may_come_with_settings(self, settings: dict[str, str]) -> None:
        options = {
            "preferred_execution_providers": [("CPUExecutionProvider", settings)],
            "default_execution_providers": ["CPUExecutionProvider"],
        }
        assert convert_legacy_options(options) == {"providers": [("CPUExecutionProvider", settings)]}
        x = torch.randn(3)
        close(torch.compile(torch.sin, backend="onnxrt", options=options)(x), x.sin())

    def test_new_names_work_there_too(self) -> None:
        x = torch.randn(3)
        close(torch.compile(torch.sin, backend="onnxrt", options={"fallback": "error"})(x), x.sin())


class TestSessions:
    def test_equal_graphs_over_the_same_weights_share_a_session(self) -> None:
        from sardonyx.run import sessions

        model, x = mlp(), torch.randn(3, 8)
        first = torch.compile(model, backend="sardonyx")
        first(x)
        alive = len(sessions._live)
        other = torch.compile(lambda x: model(x), backend="sardonyx")
        close(other(x), model(x))
        assert len(sessions._live) == alive

    def test_models_that_differ_in_a_constant_do_not(self) -> None:
        for factor in (2.0, 3.0):
            torch._dynamo.reset()
            close(compiled(lambda x, f=factor: x * f)(torch.ones(3)), torch.ones(3) * factor)

    def test_reset_clears_them(self) -> None:
        from sardonyx.run import sessions

        compiled(mlp())(torch.randn(3, 8))
        torch._dynamo.reset()
        assert not sessions._live

    def test_other_sessions_of_the_process_go_on_working(self) -> None:
        compiled(torch.sin)(torch.ones(3))
        model = onnx.parser.parse_model(
            '<ir_version: 10, opset_import: ["": 18]> g (float[3] x) => (float[3] y) { y = Relu(x) }'
        )
        session = onnxruntime.InferenceSession(model.SerializeToString(), onnxruntime.SessionOptions())
        assert session.run(None, {"x": torch.ones(3).numpy()})[0].sum() == 3

    def test_many_threads_get_right_results(self) -> None:
        model = mlp()
        run = compiled(model)
        inputs = [torch.randn(3, 8) for _ in range(8)]
        expected = [model(x) for x in inputs]
        run(inputs[0])
        wrong: list[int] = []

        def work(index: int) -> None:
            with torch.no_grad():
                results = [run(inputs[index]) for _ in range(125)]
            wrong.extend(index for result in results if not torch.allclose(result, expected[index], atol=1e-5))

        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


class TestTraining:
    def test_gradients_are_right_with_what_onnx_lacks_in_torch(self) -> None:
        with torch.enable_grad():
            model, x = mlp().train(), torch.randn(5, 8)
            other = copy.deepcopy(model)
            torch.compile(model, backend="sardonyx", options={"fallback": "quiet"})(x).square().sum().backward()
            other(x).square().sum().backward()
        for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            close(ours.grad, theirs.grad)


def test_translations_of_the_users_own_come_before_the_tables_and_decompositions() -> None:
    def by_abs(g: Any, x: Any) -> Any:
        return g.Abs(x)

    x = torch.tensor([-2.0, 0.5])
    model = torch.nn.Module()
    model.forward = lambda x: torch.special.entr(x.sin())
    translations = {torch.ops.aten.special_entr.default: by_abs, "aten::sin": by_abs}
    compiled = torch.compile(model, backend="sardonyx", options={"translations": translations, "fallback": "error"})
    assert compiled(x).tolist() == [2.0, 0.5]
    assert sardonyx.compile(model, translations=translations, fallback="error")(x).tolist() == [2.0, 0.5]
    assert sardonyx.export(model, (x,), translations=translations)(x).tolist() == [2.0, 0.5]
