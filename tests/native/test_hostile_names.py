"""Names in a model are anybody's text: none of them becomes code."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from sardonyx import native
from sardonyx.customop import source
from sardonyx.customop.shapes import ShapeRule
from sardonyx.customop.signature import Identity, parse
from sardonyx.customop.source import Kernel, OperatorSource
from sardonyx.toolchain.literals import identifier, quoted
from tests.toolchain.hostile import CODE, HOSTILE


def _model(name: str) -> onnx.ModelProto:
    """Everything that may be named has the name: sizes, values, nodes, the graph; its kernels speak of the sizes."""
    rows, columns = f"{name}1", f"{name}2"
    nodes = [
        helper.make_node("Transpose", [f"{name}x"], [f"{name}t"], name=f"{name}n1", perm=[1, 0]),
        helper.make_node("MatMul", [f"{name}x", f"{name}t"], [f"{name}p"], name=f"{name}n2"),
        helper.make_node("Transpose", [f"{name}p"], [f"{name}u"], name=f"{name}n3", perm=[1, 0], doc_string=name),
        helper.make_node("Softmax", [f"{name}u"], [f"{name}y"], name=f"{name}n4", axis=0),
        helper.make_node("Identity", [f"{name}t"], [f"{name}z"], name=f"{name}n5"),
    ]
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        name,
        [info(f"{name}x", TensorProto.FLOAT, [rows, columns])],
        [info(f"{name}y", TensorProto.FLOAT, [rows, rows]), info(f"{name}z", TensorProto.FLOAT, [columns, rows])],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(name, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10, producer_name=name)


def _generated(name: str, target: str) -> str:
    """What is written for the model itself, after the headers."""
    whole = native.generate(_model(name), select="all", target=target).source
    return whole[whole.rindex("namespace {") :]


@pytest.mark.parametrize("target", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", HOSTILE)
def test_a_name_changes_nothing_but_identifiers_in_the_source(kind: str, target: str) -> None:
    name = HOSTILE[kind]
    renamed, plain = _generated(name, target), _generated("plain", target)
    for axis in ("1", "2"):
        renamed = renamed.replace(identifier(f"{name}{axis}"), identifier(f"plain{axis}"))
    assert re.sub(r"native\.\w+", "", renamed) == re.sub(r"native\.\w+", "", plain)


def test_a_model_with_hostile_names_compiles_and_runs(tmp_path: Path) -> None:
    name = "".join(text for kind, text in HOSTILE.items() if kind != "zero byte")
    made = native.compile(_model(name), select="all", cache_dir=str(tmp_path))
    x = np.arange(6, dtype=np.float32).reshape(2, 3) / 4
    found, turned = made.session().run(None, {f"{name}x": x})
    power = np.exp(x @ x.T - (x @ x.T).max())
    wanted = (power / power.sum(-1, keepdims=True)).T
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    np.testing.assert_array_equal(turned, x.T)


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_custom_operators_domain_and_file_are_literals_in_its_source(kind: str) -> None:
    text = HOSTILE[kind]
    signature = parse("plain::Op(Tensor x) -> Tensor", ["float32"])
    kernel = Kernel("template <class T> void Op(In<T> x, Out<T> y, Parallel p) {}", text, 1)
    written = source.library([OperatorSource(signature, Identity(text, text), ShapeRule(signature, None), kernel)])
    assert f"#line 1 {quoted(text)}\n" in written
    assert quoted(text) in written[written.rindex("const d::Operator") :]
    assert CODE not in written.replace(quoted(text), "")
    assert quoted(str(Path(text))) in source.joint_source([Path(text)])
