"""Translations in the style of torch.onnx's symbolic functions: `g.op("domain::name", x, epsilon_f=…)`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
import pytest
import torch

import sardonyx
from sardonyx.errors import UnsupportedOperator

X = torch.randn(2, 3)


@pytest.fixture(scope="module", autouse=True)
def operators() -> Iterator[None]:
    library = torch.library.Library("symbolic", "DEF")
    for schema in ("one(Tensor x, Tensor w, float eps) -> Tensor", "two(Tensor x) -> (Tensor, Tensor)"):
        library.define(schema)
    library.impl("one", lambda x, w, eps: x * w + eps, "CompositeExplicitAutograd")
    library.impl("two", lambda x: (x + 1, x * 2), "CompositeExplicitAutograd")
    yield
    library._destroy()


def exported(translation: Callable[..., Any], call: Callable[..., Any] | None = None, **how: Any) -> onnx.ModelProto:
    call = call or (lambda x: torch.ops.symbolic.one(x, torch.tensor([4.0]), 0.5))
    translations = {torch.ops.symbolic.one: translation, torch.ops.symbolic.two: translation}
    return sardonyx.export(call, (X,), translations=translations, **how).proto()


def foreign(proto: onnx.ModelProto) -> onnx.NodeProto:
    return next(node for node in proto.graph.node if node.domain)


ATTRIBUTES: dict[str, tuple[Any, Any, int]] = {
    "a_f": (0.5, 0.5, onnx.AttributeProto.FLOAT),
    "b_f": ([1, 2.5], [1.0, 2.5], onnx.AttributeProto.FLOATS),
    "c_i": (7, 7, onnx.AttributeProto.INT),
    "d_i": ((True, 2), [1, 2], onnx.AttributeProto.INTS),
    "e_s": ("mean", b"mean", onnx.AttributeProto.STRING),
    "f_s": (["x", "y"], [b"x", b"y"], onnx.AttributeProto.STRINGS),
    "with_underscore_i": (3, 3, onnx.AttributeProto.INT),
    "number_f": (torch.tensor([0.25]), 0.25, onnx.AttributeProto.FLOAT),
    "numbers_i": (torch.tensor([4, 5]), [4, 5], onnx.AttributeProto.INTS),
    "array_f": (np.float32(1.5), 1.5, onnx.AttributeProto.FLOAT),
    "none_f": ([], [], onnx.AttributeProto.FLOATS),
}
"""What is given, what the model has, and the type."""


def test_suffixes_are_the_types_of_attributes() -> None:
    given = {name: value for name, (value, _, _) in ATTRIBUTES.items()}
    node = foreign(exported(lambda g, x, w, eps: g.op("my::Norm", x, w, left_out_f=None, **given)))
    assert (node.domain, node.op_type, len(node.input)) == ("my", "Norm", 2)
    found = {a.name: (onnx.helper.get_attribute_value(a), a.type) for a in node.attribute}
    assert found == {name.rpartition("_")[0]: (value, kind) for name, (_, value, kind) in ATTRIBUTES.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_are_attributes_in_every_dtype(dtype: torch.dtype) -> None:
    value = torch.tensor([[1, 0, 3]]).to(dtype)
    node = foreign(exported(lambda g, x, w, eps: g.op("my::Norm", x, one_t=value, two_t=[value, value])))
    one, two = (onnx.helper.get_attribute_value(a) for a in node.attribute)
    for tensor in (one, *two):
        found = onnx.numpy_helper.to_array(tensor).astype(np.float32)
        assert torch.equal(torch.from_numpy(found), value.float())


def test_a_tensor_that_is_a_constant_is_an_attribute() -> None:
    node = foreign(exported(lambda g, x, w, eps: g.op("my::Norm", x, w_f=w, eps_f=eps)))
    assert {a.name: a.f for a in node.attribute} == {"w": 4.0, "eps": 0.5}


def test_one_that_is_not_is_refused() -> None:
    with pytest.raises(UnsupportedOperator, match="its w depends on the inputs, but is a constant attribute"):
        exported(lambda g, x, w, eps: g.op("my::Norm", x, w_f=w), lambda x: torch.ops.symbolic.one(x, x.sum(), 0.5))


def test_a_number_that_a_file_cannot_hold_is_refused() -> None:
    with pytest.raises(UnsupportedOperator, match="overflows an ONNX attribute, which is a float32"):
        exported(lambda g, x, w, eps: g.op("my::Norm", x, eps_f=1e200))


def test_an_attribute_without_a_type_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"'epsilon' of g\.op has no type suffix: use epsilon_f"):
        exported(lambda g, x, w, eps: g.op("my::Norm", x, epsilon=eps))


@pytest.mark.parametrize("prefix", ["", "onnx::"])
def test_onnxs_own_operators_compute(prefix: str) -> None:
    def translation(g: Any, x: Any, w: Any, eps: float) -> Any:
        return g.op(f"{prefix}Add", g.op(f"{prefix}Mul", x, w), eps)

    program = sardonyx.export(
        lambda x: torch.ops.symbolic.one(x, torch.tensor([4.0]), 0.5),
        (X,),
        translations={torch.ops.symbolic.one: translation},
    )
    torch.testing.assert_close(program(X), X * 4 + 0.5)


def test_attributes_of_onnxs_own_operators_and_several_outputs() -> None:
    def translation(g: Any, x: Any) -> Any:
        first, second = g.op("Split", g.op("Concat", g.op("Add", x, 1), g.op("Mul", x, 2), axis_i=0),
                             torch.tensor([2, 2]), axis_i=0, outputs=2)  # fmt: skip
        return first, second

    program = sardonyx.export(
        lambda x: torch.ops.symbolic.two(x), (X,), translations={torch.ops.symbolic.two: translation}
    )
    torch.testing.assert_close(tuple(program(X)), (X + 1, X * 2))


def test_a_foreign_operator_of_several_outputs_has_their_types() -> None:
    proto = exported(lambda g, x: g.op("my::Both", x, outputs=2), lambda x: torch.ops.symbolic.two(x))
    assert [output.type.tensor_type.elem_type for output in proto.graph.output] == [1, 1]
    assert {opset.domain: opset.version for opset in proto.opset_import}["my"] == 1


def test_a_declared_operator_is_imported_at_its_version() -> None:
    op = sardonyx.custom_op("my::Declared(Tensor x) -> Tensor", python=lambda x: x * 4, version=6)
    proto = exported(lambda g, x, w, eps: g.op("Add", g.op("my::Declared", x), eps))
    assert {opset.domain: opset.version for opset in proto.opset_import}["my"] == 6
    op.close()


def test_a_composition_has_it_too() -> None:
    op = sardonyx.custom_op(
        "my::Composed(Tensor x, *, float low=0.0) -> Tensor",
        onnx=lambda g, x, low: g.op("LeakyRelu", g.op("Sub", x, low), alpha_f=0.5),
    )
    torch.testing.assert_close(op(X, low=0.25), torch.nn.functional.leaky_relu(X - 0.25, 0.5))
    op.close()
