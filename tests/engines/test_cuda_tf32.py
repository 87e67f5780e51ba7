"""Which kernels cuDNN may use: those for tensor cores, unless products of single precision would lose digits."""

from __future__ import annotations

import onnx
import pytest
import torch

from sardonyx.engines.cuda_tf32 import allows_tf32

HEADER = '<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>\n'


def allowed(text: str) -> bool:
    model = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(HEADER + text))
    return allows_tf32(model.SerializeToString())


CONV = "g (@T[1,2,5,5] x, @T[4,2,3,3] w, @T[4] b) => (@T[1,4,3,3] y)"


@pytest.mark.parametrize(("dtype", "tf32"), [("float16", True), ("bfloat16", True), ("float", False)])
def test_tensor_cores_are_used_for_half_precision(dtype: str, tf32: bool) -> None:
    assert allowed(CONV.replace("@T", dtype) + "{ y = Conv(x, w) }") == tf32


def test_torch_can_allow_tf32() -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        assert allowed(CONV.replace("@T", "float") + "{ y = Conv(x, w) }")
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def test_one_product_in_single_precision_forbids_tf32() -> None:
    single = "{ a = Conv(x, w) c = Cast<to=1>(a) d = MatMul(c, c) y = Cast<to=10>(d) }"
    assert not allowed(CONV.replace("@T", "float16") + single)


def test_other_operators_may_compute_in_single_precision() -> None:
    mixed = "{ a = Conv(x, w) c = Cast<to=1>(a) d = Softmax(c) y = Cast<to=10>(d) }"
    assert allowed(CONV.replace("@T", "float16") + mixed)


def test_a_product_in_a_branch_counts() -> None:
    text = """g (bool c, float[2,2] x, float16[2,2] h) => (float[2,2] y) {
        z = MatMul(h, h)
        y = If(c)<then_branch=t () => (float[2,2] p) { p = MatMul(x, x) }, else_branch=e () => (float[2,2] q)
        { q = Identity(x) }> }"""
    model = onnx.parser.parse_model(HEADER + text)
    model.graph.value_info.append(onnx.helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT16, [2, 2]))
    assert not allows_tf32(model.SerializeToString())
