"""Which nodes of a model with codes ONNX Runtime computes in integers."""

from __future__ import annotations

import pytest

from sardonyx.optimize.integers import is_computed_in_integers
from tests.optimize.rewriting import model_of

PARAMETERS = "<float s = {0.5}, uint8 z = {0}, uint8 h = {9}, float t = {0.1}>"
IN_INTEGERS = {
    "a = DequantizeLinear(q, s, z) b = DequantizeLinear(q, s, z) c = MatMul(a, b) y = Softmax(c)": "a b c",
    "a = DequantizeLinear(q, s, z) c = Gemm(a, a) d = Relu(c) y = QuantizeLinear(d, t, z)": "a c d y",
    "a = DequantizeLinear(q, s, z) c = Gemm(a, a) d = Relu(c) y = QuantizeLinear(d, t, h)": "",
    "a = DequantizeLinear(q, s, z) c = Gemm(a, a) y = Softmax(c)": "",
    "a = DequantizeLinear(q, s, z) b = Transpose(a) c = Add(a, b) y = QuantizeLinear(c, t, h)": "a b c y",
    "a = DequantizeLinear(q, s, z) c = Exp(a) y = QuantizeLinear(c, t, h)": "",
    "a = DequantizeLinear(q, s, z) y = QuantizeLinear(a, t, h)": "",
    "a = DequantizeLinear(q, s, z) b = Transpose(a) y = QuantizeLinear(b, t, h) w = Exp(b)": "",
    "a = Transpose(x) y = QuantizeLinear(a, t, h)": "",
}


@pytest.mark.parametrize("body", IN_INTEGERS)
def test_operators_between_codes_are_computed_in_integers(body: str) -> None:
    kind = "uint8" if "y = QuantizeLinear" in body else "float"
    also = ", float[4,4] w" if "w =" in body else ""
    model = model_of(f"g (uint8[4,4] q, float[4,4] x) => ({kind}[4,4] y{also}) {PARAMETERS} {{ {body} }}")
    found = [node.outputs[0].name for node in model.graph if is_computed_in_integers(node)]
    assert " ".join(map(str, found)) == IN_INTEGERS[body]
