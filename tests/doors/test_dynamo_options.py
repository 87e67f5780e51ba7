"""torch.compile(backend="sardonyx"): operators that stay in torch, and options."""

from __future__ import annotations

import logging
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

from .compiled import close, compiled, mlp


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

    @pytest.mark.parametrize(
        ("given", "hint"),
        [
            ({"no_such": 1}, "known attributes: .*intra_op_num_threads"),
            ({"intra_op_threads": 1}, "did you mean 'intra_op_num_threads'"),
            ({"intra_op_num_threads": "x"}, "use a value of type int"),
            ({"config": 3}, "use a dict"),
            ({"custom_ops": "operators.so"}, "use a list of paths"),
            ({3: 4}, "known attributes"),
        ],
    )
    def test_a_wrong_session_option_says_what_would_be_right(self, given: dict[Any, Any], hint: str) -> None:
        with pytest.raises(sardonyx.OptionError, match=hint):
            compiled(torch.sin, session_options=given)(torch.randn(3))

    @pytest.mark.parametrize(
        ("name", "hint"),
        [
            ("aten::sinn", "did you mean 'aten::sin'"),
            ("aten::sin.default", "its name is 'aten::sin'"),
            ("aten::zzzzzz", "a name such as"),
            ("nobodys::op", "load the library"),
        ],
    )
    def test_a_translation_of_no_operator_is_an_error(self, name: str, hint: str) -> None:
        with pytest.raises(BackendCompilerFailed, match=hint):
            compiled(torch.sin, translations={name: lambda g, x: x})(torch.randn(3))
        with pytest.raises(sardonyx.OptionError, match=hint):
            sardonyx.export(torch.sin, (torch.randn(3),), translations={name: lambda g, x: x})

    @pytest.mark.parametrize("opset", [99, 2**40])
    def test_an_opset_that_onnx_does_not_have_is_an_error(self, opset: int) -> None:
        supported = r"use an integer from 18 to \d\d"
        with pytest.raises(BackendCompilerFailed, match=supported):
            compiled(torch.sin, opset=opset)(torch.randn(3))
        with pytest.raises(sardonyx.OptionError, match=supported):
            sardonyx.compile(nn.ReLU(), opset=opset)
        with pytest.raises(sardonyx.OptionError, match=supported):
            sardonyx.export(torch.sin, (torch.randn(3),), opset=opset)

    def test_an_opset_that_onnxruntime_does_not_have_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError("Current official support for domain ai.onnx is till opset 22.")

        monkeypatch.setattr(onnxruntime, "InferenceSession", refuse)
        with pytest.raises(sardonyx.OptionError, match=r"(?s)opset is 23.*use an integer from 18 to 22"):
            compiled(torch.cos, opset=23)(torch.randn(3))

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

    @pytest.mark.parametrize("name", ["preferred_execution_providers", "default_execution_providers"])
    @pytest.mark.parametrize("value", ["CPUExecutionProvider", [3], 3, [()]], ids=str)
    def test_providers_are_a_list(self, name: str, value: Any) -> None:
        with pytest.raises(sardonyx.OptionError, match=f"(?s){name} is .*use a list"):
            convert_legacy_options({name: value})

    def test_new_names_work_there_too(self) -> None:
        x = torch.randn(3)
        close(torch.compile(torch.sin, backend="onnxrt", options={"fallback": "error"})(x), x.sin())
