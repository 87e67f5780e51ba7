"""The ONNX compiler over AITemplate: its three steps, and the whole graph as one operator in ONNX Runtime.

Its document has no program of its own and needs a container with a GPU; its examples, a chain of operators, BERT and
GPT-2, are in `examples/native`, which `tests/native/test_compile_examples.py` runs.
"""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_ir as ir
import onnxruntime
import torch

import sardonyx
from sardonyx.native import compile, convert_graph, generate


def test_a_graph_becomes_an_operator_that_onnxruntime_loads(tmp_path: Path) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.softmax(torch.exp(-x.abs()) * 2, -1)

    module, x = Model().eval(), torch.randn(4, 16)
    sardonyx.export(module, (x,), input_names=["x"]).save(tmp_path / "model.onnx")
    graph = onnx.load(tmp_path / "model.onnx")

    compiled = compile(graph, select="all")
    generated = generate(graph, select="all")
    converted = convert_graph(graph, select="all")

    assert compiled.source == generated.source
    assert len(list(converted.graph)) == 1  # one custom operator in the place of the graph
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(compiled.library))
    session = onnxruntime.InferenceSession(ir.to_proto(converted).SerializeToString(), options)
    (found,) = session.run(None, {"x": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found).double(), module(x.double()), rtol=1e-5, atol=1e-6)
