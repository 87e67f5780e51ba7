"""An operator's name, domain and version in ONNX, which need not be those in torch."""

from __future__ import annotations

import pickle
from typing import Any

import onnx
import onnxruntime
import pytest
import torch

import sardonyx
from sardonyx.customop import CustomOp
from sardonyx.errors import DeclarationError

from .operators import model, node, run, session, value

X = torch.randn(5)


@pytest.fixture(scope="module")
def renamed() -> CustomOp:
    return sardonyx.custom_op(
        "naming::in_torch(Tensor x, *, float by=1.0) -> Tensor",
        cpp="""
        template <class T>
        void in_torch(In<T> x, Out<T> y, double by, Parallel) {
          for (int64_t i = 0; i < x.size(); ++i) y[i] = x[i] + by;
        }
        """,
        dtypes=["float32"],
        domain="org.naming",
        name="InOnnx",
        version=3,
    )


def imports(proto: onnx.ModelProto) -> dict[str, int]:
    return {opset.domain: opset.version for opset in proto.opset_import}


def test_torch_has_it_under_its_own_name(renamed: CustomOp) -> None:
    torch.testing.assert_close(torch.ops.naming.in_torch(X, by=2.0), X + 2)
    with pytest.raises(RuntimeError, match="naming::in_torch: x is int64"):
        renamed(torch.ones(2, dtype=torch.int64))


def test_a_model_has_the_name_and_imports_the_version(renamed: CustomOp) -> None:
    program = sardonyx.export(lambda x: renamed(x, by=2.0), (X,))
    assert [(n.domain, n.op_type) for n in program.model.graph] == [("org.naming", "InOnnx")]
    proto = program.proto()
    assert imports(proto)["org.naming"] == 3
    onnx.checker.check_model(proto, full_check=True)
    torch.testing.assert_close(program(X), X + 2)
    torch.testing.assert_close(run(proto, X)[0], X + 2)
    compiled = torch.compile(lambda x: renamed(x) * 2, backend="sardonyx", options={"fallback": "error"})
    torch.testing.assert_close(compiled(X), (X + 1) * 2)


def test_onnx_knows_it_from_its_version_on(renamed: CustomOp) -> None:
    assert (renamed.domain, renamed.name, renamed.version) == ("org.naming", "InOnnx", 3)
    assert renamed.schema.since_version == 3
    assert not onnx.defs.has("in_torch", "naming")


@pytest.mark.parametrize(("version", "there"), [(2, False), (3, True), (9, True)])
def test_a_session_takes_models_from_its_version_on(renamed: CustomOp, version: int, there: bool) -> None:
    proto = model([node(renamed, ["x"], ["y"])], [value("x", [5])], [value("y")])
    next(opset for opset in proto.opset_import if opset.domain == "org.naming").version = version
    if there:
        torch.testing.assert_close(run(proto, X)[0], X + 1)
    else:
        with pytest.raises(Exception, match="InOnnx"):
            session(proto)


def test_torchs_exporter_has_both_too(renamed: CustomOp) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return renamed(x, by=4.0)

    made = torch.onnx.export(
        Model(), (X,), dynamo=True, custom_translation_table=renamed.translations, verbose=False, optimize=False
    )
    assert made is not None
    assert imports(made.model_proto)["org.naming"] == 3
    torch.testing.assert_close(run(made.model_proto, X)[0], X + 4)


def test_it_is_found_by_its_name_in_onnx(renamed: CustomOp) -> None:
    assert pickle.loads(pickle.dumps(renamed)) is renamed


def test_operators_of_one_domain_import_the_newest_version_among_them(renamed: CustomOp) -> None:
    older = sardonyx.custom_op(
        "naming::older(Tensor x) -> Tensor", python=lambda x: x * 2, domain="org.naming", dtypes=["float32"]
    )
    program = sardonyx.export(lambda x: older(renamed(older(x))), (X,))
    assert imports(program.proto())["org.naming"] == 3
    torch.testing.assert_close(program(X), (X * 2 + 1) * 2)
    older.close()


def test_the_function_of_a_composition_has_them_too() -> None:
    op = sardonyx.custom_op(
        "naming::composed(Tensor x) -> Tensor",
        onnx=lambda op, x: op.Add(op.Abs(x), 1.0),
        inline=False,
        domain="org.naming.functions",
        name="Composed",
        version=5,
    )
    proto = sardonyx.export(lambda x: op(x), (X,)).proto()
    assert [(f.domain, f.name) for f in proto.functions] == [("org.naming.functions", "Composed")]
    assert imports(proto)["org.naming.functions"] == 5
    (found,) = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, {"x": X.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), X.abs() + 1)
    op.close()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"version": 0}, "has the version 0"),
        ({"version": 1001}, "from 1 to 1000"),
        ({"version": True}, "has the version True"),
        ({"version": "2"}, "has the version '2'"),
        ({"name": ""}, "has the name ''"),
        ({"name": "two words"}, "has the name 'two words'"),
    ],
)
def test_what_is_no_name_or_version_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(DeclarationError, match=said):
        sardonyx.custom_op("naming::refused(Tensor x) -> Tensor", python=lambda x: x, **given)
