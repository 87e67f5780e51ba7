"""The tutorial on custom operators: group norm in torch, its export by a symbolic function, its kernel in ONNX Runtime.

torch's operator is registered here as its C++ would be, with parameters that have no names and without a dispatch key;
building that C++ takes torch's headers and Eigen. Where the document gives one thing two names, as to the namespace,
the first is used throughout.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import onnx
import onnxruntime
import pytest
import torch

import sardonyx
from sardonyx.compat import onnx_export, register_custom_op_symbolic, unregister_custom_op_symbolic


def custom_group_norm(
    X: torch.Tensor, num_groups: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor, eps: torch.Tensor
) -> torch.Tensor:
    num_groups_i, epsilon_ = int(num_groups.tolist()[0]), eps.tolist()[0]
    return torch.nn.functional.group_norm(X, num_groups_i, scale, bias, epsilon_)


@pytest.fixture(scope="module", autouse=True)
def registry() -> Iterator[None]:
    library = torch.library.Library("mynamespace", "DEF")
    library.define("custom_group_norm(Tensor _0, Tensor _1, Tensor _2, Tensor _3, Tensor _4) -> Tensor _0")
    library.impl("custom_group_norm", custom_group_norm, "CompositeImplicitAutograd")
    yield
    library._destroy()


def my_group_norm(g: Any, input: Any, num_groups: Any, scale: Any, bias: Any, eps: Any) -> Any:
    return g.op("mydomain::mygroupnorm", input, num_groups, scale, bias, epsilon_f=eps)


class CustomModel(torch.nn.Module):
    def forward(
        self, x: torch.Tensor, num_groups: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        result: torch.Tensor = torch.ops.mynamespace.custom_group_norm(x, num_groups, scale, bias, torch.tensor([0.0]))
        return result


X = torch.randn(3, 2, 1, 2)
num_groups = torch.tensor([2.0])
scale = torch.tensor([2.0, 1.0])
bias = torch.tensor([1.0, 0.0])
inputs = (X, num_groups, scale, bias)


def export_custom_op() -> str:
    f = "./model.onnx"
    onnx_export(
        CustomModel(),
        inputs,
        f,
        opset_version=9,
        example_outputs=None,
        input_names=["X", "num_groups", "scale", "bias"],
        output_names=["Y"],
        custom_opsets={"mydomain": 2},
    )
    return f


@pytest.fixture
def symbolic() -> Iterator[None]:
    register_custom_op_symbolic("mynamespace::custom_group_norm", my_group_norm, 9)
    yield
    unregister_custom_op_symbolic("mynamespace::custom_group_norm", 9)


@pytest.mark.usefixtures("symbolic")
def test_the_export_has_the_custom_operator_with_its_attribute_names_and_version() -> None:
    model = onnx.load(export_custom_op())
    (node,) = model.graph.node
    assert (node.domain, node.op_type) == ("mydomain", "mygroupnorm")
    assert [(a.name, a.type, a.f) for a in node.attribute] == [("epsilon", onnx.AttributeProto.FLOAT, 0.0)]
    assert (list(node.input), list(node.output)) == (["X", "num_groups", "scale", "bias"], ["Y"])
    assert {opset.domain: opset.version for opset in model.opset_import} == {"": 18, "mydomain": 2}


@pytest.mark.usefixtures("symbolic")
def test_the_kernel_of_onnxruntime_runs_the_exported_file() -> None:
    """In ONNX Runtime the operator is a declaration: its name and domain are those of the symbolic function."""
    kernel = sardonyx.custom_op(
        "tutorial::group_norm(Tensor<float32> X, Tensor<float32> num_groups, Tensor<float32> scale, "
        "Tensor<float32> bias, *, float epsilon) -> Tensor<float32> Y",
        domain="mydomain",
        name="mygroupnorm",
        version=2,
        cpp="""
        void group_norm(In<float> X, In<float> num_groups, In<float> scale, In<float> bias, Out<float> Y,
                        double epsilon, Parallel) {
          const int64_t groups = num_groups[0], N = X.dim(0), C = X.dim(1) / groups;
          const int64_t sample_size = X.size() / (N * groups), area = sample_size / C;
          for (int64_t i = 0; i < N * groups; ++i) {
            const float* Xi = X.data() + sample_size * i;
            double mean = 0, squared_norm = 0;
            for (int64_t k = 0; k < sample_size; ++k) mean += Xi[k] / sample_size;
            for (int64_t k = 0; k < sample_size; ++k) squared_norm += (Xi[k] - mean) * (Xi[k] - mean);
            const double inv_stdev = 1 / std::sqrt(squared_norm / sample_size + epsilon);
            for (int64_t k = 0; k < sample_size; ++k) {
              const int64_t channel = i % groups * C + k / area;
              Y[sample_size * i + k] = (Xi[k] - mean) * inv_stdev * scale[channel] + bias[channel];
            }
          }
        }
        """,
        shape=lambda X: X,
    )
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(kernel.library))
    session = onnxruntime.InferenceSession(export_custom_op(), options)
    names = ["X", "num_groups", "scale", "bias"]
    (found,) = session.run(None, {name: x.numpy() for name, x in zip(names, inputs, strict=True)})
    expected = torch.nn.functional.group_norm(X.double(), 2, scale.double(), bias.double(), 0.0)
    torch.testing.assert_close(torch.from_numpy(found).double(), expected, rtol=1e-4, atol=1e-5)
    kernel.close()


def test_the_export_is_of_existing_operators_where_the_symbolic_function_says_so() -> None:
    def standard(g: Any, input: Any, num_groups: Any, scale: Any, bias: Any, eps: Any) -> Any:
        groups = g.op("Reshape", input, torch.tensor([0, 2, -1]))
        ones, zeros = torch.ones(2), torch.zeros(2)
        normed = g.op("InstanceNormalization", groups, ones, zeros, epsilon_f=eps)
        shaped = g.op("Reshape", normed, torch.tensor([3, 2, 1, 2]))
        columns = torch.tensor([1, 2])
        return g.op("Add", g.op("Mul", shaped, g.op("Unsqueeze", scale, columns)), g.op("Unsqueeze", bias, columns))

    register_custom_op_symbolic("mynamespace::custom_group_norm", standard, 9)
    session = onnxruntime.InferenceSession(export_custom_op())
    unregister_custom_op_symbolic("mynamespace::custom_group_norm", 9)
    given = {x.name: dict(zip(["X", "num_groups", "scale", "bias"], inputs, strict=True))[x.name].numpy()
             for x in session.get_inputs()}  # fmt: skip
    (found,) = session.run(None, given)
    torch.testing.assert_close(torch.from_numpy(found), CustomModel()(*inputs), rtol=1e-4, atol=1e-5)


def test_an_opset_older_than_the_symbolic_function_is_refused() -> None:
    register_custom_op_symbolic("mynamespace::custom_group_norm", my_group_norm, 21)
    with pytest.raises(sardonyx.UnsupportedOperator, match="its symbolic function is for opset 21 and newer"):
        export_custom_op()
    unregister_custom_op_symbolic("mynamespace::custom_group_norm", 21)


def test_an_operator_that_is_not_loaded_is_named() -> None:
    with pytest.raises(sardonyx.DeclarationError, match="torch has no operator 'mynamespace::no_such'"):
        register_custom_op_symbolic("mynamespace::no_such", my_group_norm, 9)


@pytest.mark.usefixtures("symbolic")
def test_sizes_that_the_example_does_not_have_are_asked_for() -> None:
    with pytest.raises(sardonyx.CaptureError, match="is known for the sizes of the example only"):
        onnx_export(CustomModel(), inputs, input_names=["X", "n", "s", "b"], dynamic_axes={"X": {0: "batch"}, "Y": [0]})
