"""Operators that the tests here share: each is declared, and built, when the first test asks for it."""

from __future__ import annotations

from functools import cache
from typing import Any

import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper

import sardonyx
from sardonyx.customop import CustomOp
from sardonyx.toolchain.operator_libraries import libraries_of

DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "bool")


@cache
def scale() -> CustomOp:
    """One tensor, one attribute, every dtype; its backward is a function."""
    return sardonyx.custom_op(
        "tried::Scale(Tensor x, *, float factor=2.0) -> Tensor",
        cpp="""
        template <class T>
        void Scale(In<T> x, Out<T> y, double factor, Parallel parallel) {
          parallel(x.size(), 8, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i) y[i] = static_cast<T>(static_cast<double>(x[i]) * factor);
          });
        }
        """,
        dtypes=DTYPES,
        backward=lambda grad, factor: grad * factor,
    )


@cache
def weigh() -> CustomOp:
    """Two tensors that broadcast; its backward is another declaration, whose results are found by their names."""
    backward = sardonyx.custom_op(
        "tried::WeighBackward(Tensor grad, Tensor x, Tensor<T, 1> weight) -> (Tensor grad_weight, Tensor grad_x)",
        cpp="""
        template <class T>
        void WeighBackward(In<T> grad, In<T> x, In<T> weight, Out<T> grad_weight, Out<T> grad_x, Parallel) {
          std::fill(grad_weight.begin(), grad_weight.end(), T(0));
          for (int64_t i = 0; i < x.size(); ++i) {
            const int64_t c = i % weight.size();
            grad_x[i] = grad[i] * weight[c];
            grad_weight[c] = grad_weight[c] + grad[i] * x[i];
          }
        }
        """,
        shape=lambda x, weight: (weight, x),
        dtypes=["float32", "float64"],
    )
    return sardonyx.custom_op(
        "tried::Weigh(Tensor x, Tensor<T, 1> weight) -> Tensor",
        cpp="""
        template <class T>
        void Weigh(In<T> x, In<T> weight, Out<T> y, Parallel) {
          check(x.dim(-1) == weight.size(), "there must be a weight for each column");
          for (int64_t i = 0; i < x.size(); ++i) y[i] = x[i] * weight[i % weight.size()];
        }
        """,
        shape=lambda x: x,
        dtypes=["float32", "float64"],
        backward=backward,
    )


@cache
def mix() -> CustomOp:
    """Optional tensors, several, attributes of every type, some by position, and several results."""

    def backward(grad_sum: Any, grad_first: Any, more: list[Any], bias: Any, by: int) -> dict[str, Any]:
        return {
            "bias": None if bias is None else grad_sum * by,
            "more": [grad_sum + (grad_first if i == 0 else 0) for i in range(len(more))],
        }

    return sardonyx.custom_op(
        "tried::Mix(Tensor? bias, int by, Tensor[] more, str mode='sum', *, bool flip=False, int[] axes=[], "
        "float[] offsets=[0.5]) -> (Tensor sum, Tensor first, Tensor<int64, 1> counts)",
        cpp="""
        template <class T>
        void Mix(In<T> bias, Ins<T> more, Out<T> sum, Out<T> first, Out<int64_t> counts, int64_t by,
                 std::string_view mode, bool flip, List<int64_t> axes, List<double> offsets, Parallel) {
          if (mode != "sum") fail("the mode " + std::string(mode) + " is unknown");
          for (int64_t i = 0; i < sum.size(); ++i) {
            T total = bias ? bias[i] * T(by) : T(0);
            for (int64_t k = 0; k < more.size(); ++k) total = total + more[k][i];
            for (double offset : offsets) total = total + T(offset);
            sum[i] = total;
            first[i] = more[0][i];
          }
          counts[0] = more.size();
          counts[1] = flip;
          counts[2] = axes.size() ? axes[axes.size() - 1] : -1;
        }
        """,
        shape=lambda more: (more[0], more[0], (3,)),
        dtypes=["float32", "float64"],
        backward=backward,
    )


@cache
def positive() -> CustomOp:
    """How many there are only the kernel knows."""
    return sardonyx.custom_op(
        "tried::Positive(Tensor<T, 1> x) -> Tensor",
        cpp="""
        template <class T>
        void Positive(In<T> x, Out<T> y, Parallel) {
          y.resize({std::count_if(x.begin(), x.end(), [](T v) { return v > 0; })});
          std::copy_if(x.begin(), x.end(), y.begin(), [](T v) { return v > 0; });
        }
        """,
        shape=lambda: (None,),
        dtypes=["float32", "int64"],
    )


@cache
def filled() -> CustomOp:
    """It takes no tensor, or one."""
    return sardonyx.custom_op(
        "tried::Filled(int[] sizes, Tensor<float32>? start=None, *, int step=1) -> Tensor<float32>",
        cpp="""
        void Filled(In<float> start, Out<float> y, List<int64_t>, int64_t step, Parallel) {
          for (int64_t i = 0; i < y.size(); ++i) y[i] = (start ? start[0] : 0) + i * step;
        }
        """,
        shape=lambda sizes: sizes,
    )


@cache
def faulty() -> CustomOp:
    """Goes wrong in the way that it is told to."""
    return sardonyx.custom_op(
        "tried::Faulty(Tensor<float32> x, str how, *, int size=3) -> (Tensor<float32> y, Tensor<float32> open)",
        cpp="""
        std::string Faulty(In<float> x, Out<float> y, Out<float> open, std::string_view how, int64_t, Parallel parallel)
        {
          if (how == "not resized") return "";
          if (how == "resized to another rank") open.resize({1, 2});
          if (how == "resized to another size") y.resize({77});
          if (how == "resized to less than nothing") open.resize({-5});
          open.resize({2});
          open[0] = open[1] = 1;
          if (how == "text") return "it says so";
          if (how == "exception") throw std::out_of_range("thrown on purpose");
          if (how == "int") throw 42;
          if (how == "failed") fail("failed on purpose");
          if (how == "dimension") x.dim(9);
          if (how == "in parallel") {
            parallel(1000, [&](int64_t begin, int64_t) { if (begin >= 0) throw std::runtime_error("thrown inside"); });
          }
          if (how == "int in parallel") parallel(1000, [&](int64_t, int64_t) { throw 42; });
          std::copy(x.begin(), x.begin() + std::min(x.size(), y.size()), y.begin());
          return "";
        }
        """,
        shape=lambda size: ((size,), (None,)),
    )


# Models of ONNX with them


def node(op: CustomOp, inputs: list[str], outputs: list[str], **attributes: Any) -> onnx.NodeProto:
    made = helper.make_node(op.name, inputs, outputs, domain=op.domain)
    given = [v if isinstance(v, onnx.AttributeProto) else helper.make_attribute(k, v) for k, v in attributes.items()]
    made.attribute.extend(given)
    return made


def value(name: str, shape: Any = None, dtype: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def model(
    nodes: list[onnx.NodeProto], inputs: list[onnx.ValueInfoProto], outputs: list[onnx.ValueInfoProto]
) -> onnx.ModelProto:
    domains = {n.domain for n in nodes} | {"", "tried"}
    opsets = [helper.make_opsetid(domain, 1 if domain else 20) for domain in sorted(domains)]
    return helper.make_model(helper.make_graph(nodes, "g", inputs, outputs), opset_imports=opsets, ir_version=10)


def session(proto: onnx.ModelProto) -> onnxruntime.InferenceSession:
    """A plain session that knows the operators by their libraries."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    content = proto.SerializeToString()
    for library in libraries_of(content):
        options.register_custom_ops_library(str(library))
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def run(proto: onnx.ModelProto, *tensors: torch.Tensor) -> list[torch.Tensor]:
    made = session(proto)
    names = [given.name for given in made.get_inputs()]
    return [torch.from_numpy(x) for x in made.run(None, dict(zip(names, (t.numpy() for t in tensors), strict=True)))]
