"""torch's onnxrt backend with the custom exporter: the patch of its file, and its programs that train a Llama.

A longer form of the first program is `examples/llama_training.py`.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from sardonyx.compat import (
    OptimizationOptions,
    OxsDispatcher,
    create_input_names,
    dump_onnx,
    make_aot_ort,
    to_onnx,
    train_loop,
)


def ids_tensor(shape: list[int], vocab_size: int) -> torch.Tensor:
    total_dims = 1
    for dim in shape:
        total_dims *= dim

    values = [np.random.randint(0, vocab_size - 1) for _ in range(total_dims)]
    return torch.tensor(data=values, dtype=torch.long).view(shape).contiguous()


@pytest.mark.parametrize(
    ("environment", "options"),
    [
        pytest.param({}, {"rewrite": True}, id="baseline"),
        pytest.param({"ONNXRT_CHANGE_REWRITER": "1"}, {}, id="with the custom exporter"),
    ],
)
def test_the_programs(
    environment: dict[str, str],
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers")
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaModel
    assert transformers

    config = LlamaConfig(
        hidden_size=16,
        num_hidden_layers=1,
        vocab_size=1024,
        intermediate_size=16,
        max_position_embeddings=1024,
        num_attention_heads=2,
    )
    config._attn_implementation = "eager"

    model = LlamaModel(config)

    batch, seq, vocab_size = 2, 1024, 1024

    input_ids = ids_tensor([batch, seq], vocab_size)
    input_mask = torch.tril(torch.ones(batch, seq, dtype=torch.float32))

    model(input_ids, input_mask)
    expected = train_loop(copy.deepcopy(model), input_ids, input_mask)

    for name, value in environment.items():
        monkeypatch.setitem(os.environ, name, value)

    local_aot_ort, _ = make_aot_ort(
        dynamic=True,
        verbose=1,
        **options,
    )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimized_mod = torch.compile(model, backend=local_aot_ort, fullgraph=True)
        with dump_onnx("dort-llama-ort", folder="dump_llama", clean=True):
            gradients = train_loop(optimized_mod, input_ids, input_mask)

    names = [_ for _ in os.listdir("dump_llama") if _.endswith(".onnx")]
    print(f"exported model: {sorted(names)}")
    for name in names:
        print(f"NODES in {name!r}")
        onx = onnx.load(os.path.join("dump_llama", name))
        for i, node in enumerate(onx.graph.node):
            print(f"{i + 1}/{len(onx.graph.node)}: {node.op_type} {node.input} -> {node.output}")

    for found, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5)
    printed = capsys.readouterr().out
    assert "exported model: ['dort-llama-ort_0.onnx', 'dort-llama-ort_1.onnx']" in printed
    assert ": Softmax [" in printed


class Backend:
    """What the document puts into the file of torch's backend: a graph by `to_onnx`, then a session."""

    def __init__(self) -> None:
        self.models: list[onnx.ModelProto] = []

    def __call__(self, graph_module: torch.fx.GraphModule, args: Sequence[Any]) -> Any:
        input_names = create_input_names(graph_module, args)
        dispatcher = OxsDispatcher()
        target_opset = 18
        options = OptimizationOptions(
            remove_unused=True,
            constant_folding=False,
            patterns="default",
            verbose=1,
        )
        onnx_model, builder = to_onnx(
            graph_module,
            tuple(args),
            input_names=input_names,
            options=options,
            verbose=1,
            target_opset=target_opset,
            return_builder=True,
            dispatcher=dispatcher,
        )
        assert builder.proto() == onnx_model
        self.models.append(onnx_model)
        session = onnxruntime.InferenceSession(onnx_model.SerializeToString(), providers=["CPUExecutionProvider"])

        def run(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
            feeds = {name: x.detach().numpy() for name, x in zip(input_names, given, strict=True)}
            return tuple(torch.from_numpy(x) for x in session.run(None, feeds))

        return run


def test_the_exporter_inside_of_a_backend() -> None:
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.SiLU()).eval(), torch.randn(3, 8)
    backend = Backend()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend=backend, fullgraph=True)(x), model(x))
    (proto,) = backend.models
    assert [opset.version for opset in proto.opset_import if not opset.domain] == [18]
    assert [node.op_type for node in proto.graph.node] == ["Gemm", "Sigmoid", "Mul"]


def test_files_are_dumped_where_the_variable_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose number and text beside each file `tests/compat/test_compat.py` checks."""
    monkeypatch.setenv("ONNXRT_DUMP_PATH", "dumped/dumped_model_")
    transforms: list[Any] = []
    options = {"pre_ort_model_transforms": [transforms.append], "preallocate_output": True}
    model, x = torch.nn.Linear(8, 4), torch.randn(3, 8)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend="onnxrt", options=options)(x), model(x))
    assert (tmp_path / "dumped" / "dumped_model_0.onnx").exists()
    assert len(transforms) == 1
