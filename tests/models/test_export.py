"""Whole architectures exported: checked, and with eager's results in stock runtimes."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
import transformers as hf
from torch import nn
from torch.utils import _pytree as pytree

import sardonyx
from sardonyx.telemetry.verify import difference
from tests.models.architectures import ARCHITECTURES, GROUPED, TOLERANCE, ids
from tests.sizes import LARGE, agrees_at_the_edges


def without_cache(model: nn.Module) -> nn.Module:
    """torch.export returns tensors, and no cache."""
    for module in model.modules():
        if hasattr(module, "config"):
            module.config.use_cache = False
    return model.eval()


def results_of(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def in_onnxruntime(path: Path, feeds: dict[str, Any]) -> list[torch.Tensor]:
    return [torch.from_numpy(result) for result in onnxruntime.InferenceSession(str(path)).run(None, feeds)]


def in_openvino(path: Path, feeds: dict[str, Any]) -> list[torch.Tensor]:
    import openvino

    compiled = openvino.Core().compile_model(str(path), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return [torch.from_numpy(result.copy()) for result in compiled(feeds).to_tuple()]


RUNTIMES = {"onnxruntime": in_onnxruntime, **({"openvino": in_openvino} if find_spec("openvino") else {})}


@pytest.mark.parametrize("domains", [None, ()], ids=["of the engine", "of ONNX alone"])
@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.no_grad()
def test_an_architecture_is_exported_right(name: str, domains: Any, tmp_path: Path) -> None:
    build, make_inputs = ARCHITECTURES[name]
    model, inputs = without_cache(build()), make_inputs()
    program = sardonyx.export(model, (), inputs, domains=domains)
    path = program.save(tmp_path / "model.onnx")
    onnx.checker.check_model(str(path), full_check=True)
    feeds = {name: inputs[name].numpy() for name in program.inputs}
    expected = results_of(model(**inputs))
    for runtime, run in RUNTIMES.items():
        results = run(path, feeds)
        assert max(map(difference, results, expected)) <= TOLERANCE, runtime


@torch.no_grad()
def test_one_dynamic_model_serves_every_batch_and_length() -> None:
    model = without_cache(hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)))
    program = sardonyx.export(model, (), {"input_ids": ids()}, dynamic_shapes={"input_ids": {0: "batch", 1: "length"}})
    for batch, length in ((1, 1), (2, 5), (3, 16), (2, 100)):
        x = ids(batch, length)
        assert difference(program(input_ids=x).logits, model(input_ids=x).logits) <= TOLERANCE, (batch, length)
    run, eager = (lambda x, m=m: m(input_ids=x).logits for m in (program, model))
    agrees_at_the_edges(run, eager, lambda batch: (ids(batch, 5),), {"batch": 2})
    agrees_at_the_edges(run, eager, lambda length: (ids(2, length),), {"length": 5}, edges=(1, LARGE))


@torch.no_grad()
def test_graphs_are_as_small_as_promised() -> None:
    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 512}
    llama = without_cache(hf.LlamaModel(hf.LlamaConfig(**sizes, vocab_size=1024)))
    inputs = {"input_ids": ids(2, 30), "attention_mask": torch.ones(2, 30, dtype=torch.int64)}
    assert sardonyx.export(llama, (), inputs).report.nodes <= 120
    bert = without_cache(hf.BertModel(hf.BertConfig(hidden_size=96, num_attention_heads=12, intermediate_size=192)))
    assert sardonyx.export(bert, (ids(1, 128),)).report.nodes <= 150
