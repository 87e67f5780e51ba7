"""Linear layers in bf16, int8 and int4, ours, ONNX Runtime's and torch's: `python -m benchmarks.precision_kernels`.

All engines take turns in one process. With one thread, which works in the caller's, its processor time counts, so that
other programs disturb little; the least of all turns is shown, and the relative error of the result beside it. Each
engine has several copies of a layer for one row, so that weights come from memory as they do in a model.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import torch
import torch.nn.functional as F
from onnx import helper, numpy_helper

from benchmarks.machine import describe
from benchmarks.tables import Table, say
from sardonyx.native.linear import PRECISIONS, Int4Weight, build, linear_node, pack_int4, quantize_int4, quantize_int8
from sardonyx.options import Options

SIZES = (
    (1, 2048, 8192),
    (8, 768, 3072),
    (128, 768, 768),
    (128, 768, 3072),
    (128, 3072, 768),
    (256, 2048, 2048),
    (512, 768, 3072),
    (1024, 768, 3072),
)
"""Rows, depth and columns."""
_COPIES_OF_ONE_ROW = 4
_LEAST_TURNS = 5
_BLOCK = 64

Call = Callable[[], Any]
Make = Callable[[torch.Tensor, torch.Tensor, int], Call]
"""Makes a call of a layer from x, a weight of depth × columns and the number of threads."""


def _options(threads: int) -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return options


def _call(model: bytes, options: onnxruntime.SessionOptions, x: torch.Tensor) -> Call:
    """Return a call that binds x once; it returns the result as an array."""
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    binding.bind_ortvalue_input("x", onnxruntime.OrtValue.ortvalue_from_numpy(x.numpy()))
    binding.bind_output("y")

    def call() -> Any:
        session.run_with_iobinding(binding)
        return binding

    return call


def _stock(
    nodes: Sequence[onnx.NodeProto], constants: Mapping[str, torch.Tensor], x: torch.Tensor, threads: int
) -> Call:
    """Return a call of ONNX Runtime's own operators."""
    graph = helper.make_graph(
        nodes,
        "layer",
        [helper.make_tensor_value_info("x", 1, list(x.shape))],
        [helper.make_tensor_value_info("y", 1, None)],
        [numpy_helper.from_array(tensor.contiguous().numpy(), name) for name, tensor in constants.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return _call(model.SerializeToString(), _options(threads), x)


def _ort_float32(x: torch.Tensor, weight: torch.Tensor, threads: int) -> Call:
    return _stock([helper.make_node("MatMul", ["x", "w"], ["y"])], {"w": weight}, x, threads)


def _ort_int8(x: torch.Tensor, weight: torch.Tensor, threads: int) -> Call:
    codes, scales = quantize_int8(weight)
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["codes", "scale", "zero"]),
        helper.make_node(
            "MatMulIntegerToFloat", ["codes", "w", "scale", "scales", "zero"], ["y"], domain="com.microsoft"
        ),
    ]
    return _stock(nodes, {"w": codes, "scales": scales}, x, threads)


def _ort_int4(x: torch.Tensor, weight: torch.Tensor, threads: int) -> Call:
    quantized = quantize_int4(weight, _BLOCK)
    depth, columns = weight.shape
    attributes: dict[str, Any] = {"K": depth, "N": columns, "bits": 4, "block_size": _BLOCK, "accuracy_level": 4}
    node = helper.make_node("MatMulNBits", ["x", "w", "scales"], ["y"], domain="com.microsoft", **attributes)
    return _stock([node], {"w": _as_n_bits(quantized), "scales": quantized.scales.t()}, x, threads)


def _as_n_bits(weight: Int4Weight) -> torch.Tensor:
    """Return the codes in the order of MatMulNBits: columns × blocks × bytes."""
    by_column = weight.codes.t().reshape(weight.codes.shape[1], -1, weight.block // 2, 2)
    return by_column[..., 0] | by_column[..., 1] << 4


def _torch(dtype: torch.dtype) -> Make:
    def make(x: torch.Tensor, weight: torch.Tensor, threads: int) -> Call:
        operand, transposed = x.to(dtype), weight.t().to(dtype).contiguous()
        return lambda: F.linear(operand, transposed)

    return make


def _torch_int8(x: torch.Tensor, weight: torch.Tensor, threads: int) -> Call:
    codes, scales = quantize_int8(weight)
    zeros = torch.zeros(len(scales), dtype=torch.int64)
    quantized = torch._make_per_channel_quantized_tensor(codes.t().contiguous(), scales, zeros, 0)
    packed = torch.ops.quantized.linear_prepack(quantized, None)
    return lambda: torch.ops.quantized.linear_dynamic(x, packed, False)


def _ours(name: str) -> Make:
    def make(x: torch.Tensor, weight: torch.Tensor, threads: int) -> Call:
        precision = PRECISIONS[name]
        packed = pack_int4(quantize_int4(weight, _BLOCK)) if name == "int4" else precision.pack(weight)
        operand = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(x.shape))
        node, constants = linear_node(precision, operand, packed, name="layer")
        node.outputs[0].name = "y"
        opsets = {"": 21, node.domain: 1}
        graph = ir.Graph([operand], node.outputs, nodes=[node], initializers=constants, opset_imports=opsets, name="g")
        options = _options(threads)
        options.register_custom_ops_library(str(build(precision, Options.of())))
        return _call(ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString(), options, x)

    return make


ENGINES: Mapping[str, Make] = {
    "onnxruntime float32": _ort_float32,
    "torch float32": _torch(torch.float32),
    "torch bf16": _torch(torch.bfloat16),
    "sardonyx bf16": _ours("bf16"),
    "onnxruntime int8": _ort_int8,
    "torch int8": _torch_int8,
    "sardonyx int8": _ours("int8"),
    "onnxruntime int4": _ort_int4,
    "sardonyx int4": _ours("int4"),
}
_REFERENCE = "onnxruntime float32"


@dataclass
class Measured:
    """What one engine took for a layer."""

    engine: str
    rows: int
    depth: int
    columns: int
    error: float
    seconds: list[float]

    @property
    def operations(self) -> float:
        """Multiplications and additions a second, in the fastest turn."""
        return 2 * self.rows * self.depth * self.columns / min(self.seconds)


def _array(result: Any) -> np.ndarray:
    if isinstance(result, torch.Tensor):
        return result.double().numpy()
    (array,) = result.copy_outputs_to_cpu()
    return np.asarray(array, np.float64)


def _measure(size: tuple[int, int, int], engines: Sequence[str], seconds: float, threads: int) -> list[Measured]:
    """Let the engines take turns for some seconds."""
    rows, depth, columns = size
    generator = torch.Generator().manual_seed(0)
    copies = _COPIES_OF_ONE_ROW if rows == 1 else 1
    weights = [torch.randn(depth, columns, generator=generator) * depth**-0.5 for _ in range(copies)]
    x = torch.randn(rows, depth, generator=generator)
    wanted = (x.double() @ weights[-1].double()).numpy()
    calls = {name: [ENGINES[name](x, weight, threads) for weight in weights] for name in engines}
    measured = []
    for name in engines:
        errors = [float(np.linalg.norm(_array(call()) - wanted) / np.linalg.norm(wanted)) for call in calls[name]]
        measured.append(Measured(name, *size, errors[-1], []))
    in_turn = {name: itertools.cycle(calls[name]) for name in engines}
    for _ in _turns(seconds):
        for one in measured:
            one.seconds.append(_timed(next(in_turn[one.engine]), threads))
    return measured


def _turns(seconds: float) -> Iterator[int]:
    end = time.perf_counter() + seconds
    for turn in itertools.count():
        if turn >= _LEAST_TURNS and time.perf_counter() > end:
            return
        yield turn


def _timed(call: Call, threads: int) -> float:
    clock = time.thread_time if threads == 1 else time.perf_counter
    started = clock()
    call()
    return clock() - started


def _table(measured: Sequence[Measured]) -> Table:
    table = Table(
        "linear layers", ["layer", "engine", "least µs", "median µs", "× float32", "G/s", "error"], text_columns=2
    )
    for size, group in itertools.groupby(measured, key=lambda m: (m.rows, m.depth, m.columns)):
        members = list(group)
        least = {m.engine: min(m.seconds) for m in members}
        for m in members:
            faster = f"{least[_REFERENCE] / least[m.engine]:.2f}" if _REFERENCE in least else ""
            numbers = (f"{least[m.engine] * 1e6:.0f}", f"{median(m.seconds) * 1e6:.0f}", faster)
            table.add(" × ".join(map(str, size)), m.engine, *numbers, f"{m.operations / 1e9:.0f}", f"{m.error:.1e}")
        table.end_section()
    return table


def main() -> None:
    """Measure, show, and write what was measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.precision_kernels", description=__doc__)
    parser.add_argument("--seconds", type=float, default=5, help="for the turns at each size")
    parser.add_argument("--threads", type=int, default=1, help="of every engine")
    parser.add_argument("--engines", default=",".join(ENGINES), help="names, with commas between them")
    parser.add_argument("--json", type=Path, help="where to write everything measured")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    missing = {name: precision.missing() for name, precision in PRECISIONS.items()}
    engines = [name for name in given.engines.split(",") if not missing.get(name.removeprefix("sardonyx "))]
    measured = []
    for size in SIZES:
        say(f"measuring {' × '.join(map(str, size))}")
        with torch.inference_mode():
            measured += _measure(size, engines, given.seconds, given.threads)
    _table(measured).show()
    if given.json:
        content = {**describe(), "threads": given.threads, "results": [asdict(m) for m in measured]}
        given.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
