"""Damaged model files, made at random: each is read, or refused with an error that says what is wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

import sardonyx
from sardonyx.errors import SardonyxError

from .cli.calling import run

_TEXT = """<ir_version: 10, opset_import: ["" : 21]>
g (float[2,4] x, int64[2] i) => (float[2,3] y, float[?,?] z)
<float[5,4] table = {0,1,2,3,4,5,6,7,8,9,0,1,2,3,4,5,6,7,8,9}, float[4,3] w = {1,2,3,4,5,6,7,8,9,0,1,2},
 float[3] b = {1,2,3}, int64[2] sizes = {4,2}, float zero = {0}, int64[1] axis = {0}>
{
    e = Gather <axis: int = 0> (table, i)
    h = Add (x, e)
    m = MatMul (h, w)
    p = Add (m, b)
    y = Softmax <axis: int = 1> (p)
    r = Reshape (x, sizes)
    s = ReduceSum <keepdims: int = 0> (x)
    c = Greater (s, zero)
    z = If (c) <then_branch = t () => (float[4,2] v) { v = Sin (r) }, else_branch = f () => (float[1,4,2] u) {
        u = Unsqueeze (r, axis) }>
}"""

Damage = Callable[[random.Random, onnx.ModelProto], object]


def flipped(draw: random.Random, content: bytes) -> bytes:
    """A few bits, bytes or ranges of bytes are others, or the end is missing."""
    data = bytearray(content)
    if draw.random() < 0.2:
        return bytes(data[: draw.randrange(len(data))])
    for _ in range(draw.choice([1, 2, 8])):
        at, kind = draw.randrange(len(data)), draw.random()
        if kind < 0.6:
            data[at] ^= 1 << draw.randrange(8)
        elif kind < 0.8:
            del data[at : at + draw.randrange(1, 9)]
        else:
            data[at:at] = draw.randbytes(draw.randrange(1, 9))
    return bytes(data)


def rewired(draw: random.Random, model: onnx.ModelProto) -> None:
    node = draw.choice(model.graph.node)
    written = [name for other in model.graph.node for name in other.output]
    node.input[draw.randrange(len(node.input))] = draw.choice(["", "nowhere", "w", "sizes", *written])


def retyped(draw: random.Random, model: onnx.ModelProto) -> None:
    draw.choice(model.graph.initializer).data_type = draw.choice([0, 1, 2, 7, 8, 9, 11, 16, 99])


def resized(draw: random.Random, model: onnx.ModelProto) -> None:
    draw.choice(model.graph.initializer[:4]).dims[0] = draw.choice([-1, 0, 3, 10**12])


def renamed(draw: random.Random, model: onnx.ModelProto) -> None:
    node = draw.choice(model.graph.node)
    node.op_type = draw.choice(["Unheard", "MatMul", "If", "Constant", "Loop", "Reshape", ""])


def without_something(draw: random.Random, model: onnx.ModelProto) -> None:
    held = draw.choice([model.graph.node, model.graph.initializer, model.graph.output])
    del held[draw.randrange(len(held))]


def of_another_opset(draw: random.Random, model: onnx.ModelProto) -> None:
    model.opset_import[0].version = draw.choice([-1, 0, 1, 7, 99, 2**40])


def with_other_attributes(draw: random.Random, model: onnx.ModelProto) -> None:
    node = draw.choice([node for node in model.graph.node if node.attribute])
    draw.choice(node.attribute).type = draw.choice([0, 1, 2, 3, 4, 5, 7, 13])


def with_other_names(draw: random.Random, model: onnx.ModelProto) -> None:
    node = draw.choice(model.graph.node)
    node.output[0] = draw.choice(["", "x", "h", "y"])
    draw.choice([*model.graph.input, *model.graph.output]).name = draw.choice(["", "h", "w"])


DAMAGES: list[Damage] = [
    *(rewired, retyped, resized, renamed, without_something),
    *(of_another_opset, with_other_attributes, with_other_names),
]


def damaged(seed: int) -> bytes:
    """A model with damage that is the same for a seed: of its bytes for every third, else of what it says."""
    draw, model = random.Random(seed), onnx.parser.parse_model(_TEXT)
    if seed % 3 == 0:
        return flipped(draw, model.SerializeToString())
    for damage in draw.sample(DAMAGES, draw.choice([1, 1, 2])):
        damage(draw, model)
    return model.SerializeToString()


def optimized(path: Path) -> str:
    """What the rewrite rules say of a file: that it is valid, or why it is not."""
    try:
        sardonyx.optimize(path)
    except SardonyxError as error:
        return error.what
    return "valid"


@pytest.mark.parametrize("seed", range(36))
def test_a_damaged_file_is_read_or_refused_with_what_is_wrong(
    seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(damaged(seed))
    assert optimized(path)
    done = run("run", path)
    assert done.exit_code in (0, 3), done.output
    assert done.exit_code == 0 or "error: " in done.output
    assert "Traceback" not in done.output
    assert "Traceback" not in caplog.text
