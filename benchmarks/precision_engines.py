"""Ways to run a float32 model in fewer bits: each is prepared from a module and its arguments, and gives a call.

Those of torch convert the module itself.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import nn

from benchmarks.engines import Args, Call, compiled, eager, exported, in_request, in_session, openvino, sardonyx

UNGUARDED = 0.1
"""The drop up to which ours may go where peers have no bound: at least what theirs come to."""
UNGUARDED_INT4 = 0.3


def _as_bf16(model: nn.Module, args: Args) -> tuple[nn.Module, Args]:
    converted: nn.Module = model.to(torch.bfloat16)
    return converted, tuple(x.to(torch.bfloat16) if x.is_floating_point() else x for x in args)


def eager_bf16(model: nn.Module, args: Args) -> Call:
    """PyTorch, with the model in bfloat16."""
    return eager(*_as_bf16(model, args))


def inductor_bf16(model: nn.Module, args: Args, **how: Any) -> Call:
    """`torch.compile`, with the model in bfloat16."""
    return compiled(*_as_bf16(model, args), **how)


def inductor_autocast(model: nn.Module, args: Args) -> Call:
    """`torch.compile` of the model in float32, called under autocast."""
    call = compiled(model, args)

    def under_autocast() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return call()

    return under_autocast


def torchao_int8(model: nn.Module, args: Args, **how: Any) -> Call:
    """torchao's dynamic int8, a scale for each row and each column, and `torch.compile`."""
    torchao = import_module("torchao.quantization")
    torchao.quantize_(model, torchao.Int8DynamicActivationInt8WeightConfig())
    return compiled(model, args, **how)


def onnxruntime_int8(model: nn.Module, args: Args) -> Call:
    """`torch.onnx.export` and ONNX Runtime's `quantize_dynamic` with its defaults."""
    quantization = import_module("onnxruntime.quantization")
    with tempfile.TemporaryDirectory() as folder:
        file, quantized = exported(model, args, folder), Path(folder) / "quantized.onnx"
        _remove_inferred_shapes(file)
        quantization.quantize_dynamic(file, quantized)
        return in_session(str(quantized), args)


def _remove_inferred_shapes(file: str) -> None:
    """Remove the shapes of values: weights have some, which quantize_dynamic transposes and infers shapes of again."""
    model = onnx.load(file, load_external_data=False)
    del model.graph.value_info[:]
    onnx.save(model, file)


def openvino_int8(model: nn.Module, args: Args) -> Call:
    """NNCF's static int8, calibrated with the arguments, and OpenVINO with its defaults: bfloat16 elsewhere."""
    nncf, core = import_module("nncf"), import_module("openvino").Core()
    attends = any("Attention" in type(module).__name__ for module in model.modules())
    calibration = nncf.Dataset([[x.numpy() for x in args]])
    with tempfile.TemporaryDirectory() as folder:
        read = core.read_model(exported(model, args, folder))
        quantized = nncf.quantize(read, calibration, model_type=nncf.ModelType.TRANSFORMER if attends else None)
        return in_request(core.compile_model(quantized, "CPU"), args)


def openvino_int4(model: nn.Module, args: Args) -> Call:
    """NNCF's weights in symmetric int4, in blocks of 64, and OpenVINO with its defaults."""
    nncf, core = import_module("nncf"), import_module("openvino").Core()
    with tempfile.TemporaryDirectory() as folder:
        read = core.read_model(exported(model, args, folder))
        mode = nncf.CompressWeightsMode.INT4_SYM
        compressed = nncf.compress_weights(read, mode=mode, group_size=64, all_layers=True)
        return in_request(core.compile_model(compressed, "CPU"), args)


def sardonyx_in(precision: str, **options: Any) -> Callable[[nn.Module, Args], Call]:
    """`torch.compile` with our backend and the option `precision`."""
    how = {"fallback": "error", "precision": precision, **options}
    return partial(compiled, backend="sardonyx", options=how)


ENGINES: Mapping[str, Callable[[nn.Module, Args], Call]] = {
    "eager": eager,
    "sardonyx": sardonyx,
    "eager-bf16": eager_bf16,
    "inductor-bf16": inductor_bf16,
    "inductor-bf16-frozen": partial(inductor_bf16, options={"freezing": True}),
    "inductor-autocast": inductor_autocast,
    "openvino-bf16": partial(openvino, precision="bf16"),
    "sardonyx-bf16": sardonyx_in("bf16", max_drop=UNGUARDED),
    "sardonyx-openvino-bf16": sardonyx_in("bf16", max_drop=UNGUARDED, engine="openvino"),
    "onnxruntime-int8": onnxruntime_int8,
    "torchao-int8": torchao_int8,
    "torchao-int8-frozen": partial(torchao_int8, options={"freezing": True}),
    "openvino-int8": openvino_int8,
    "sardonyx-int8": sardonyx_in("int8", max_drop=UNGUARDED),
    "sardonyx-openvino-int8": sardonyx_in("int8", max_drop=UNGUARDED, engine="openvino"),
    "openvino-int4": openvino_int4,
    "sardonyx-int4": sardonyx_in("int4", max_drop=UNGUARDED_INT4),
    "sardonyx-auto": sardonyx_in("auto"),
}
"""Every engine by name, in the order they take turns; `sardonyx-auto` has the default bound on the drop."""

ON_REQUEST = ("eager-bf16", "inductor-bf16-frozen", "inductor-autocast", "torchao-int8-frozen", "openvino-int4")
USUAL = tuple(name for name in ENGINES if name not in ON_REQUEST)
"""The engines measured unless others are asked for."""

_OPENVINO, _NNCF, _TORCHAO = ("openvino",), ("openvino", "nncf"), ("torchao",)
PEERS: Mapping[str, tuple[str, ...]] = {
    "openvino-bf16": _OPENVINO,
    "sardonyx-openvino-bf16": _OPENVINO,
    "sardonyx-openvino-int8": _OPENVINO,
    "torchao-int8": _TORCHAO,
    "torchao-int8-frozen": _TORCHAO,
    "openvino-int8": _NNCF,
    "openvino-int4": _NNCF,
}
"""The packages, not among those that sardonyx is installed with, of the engines that need some."""
