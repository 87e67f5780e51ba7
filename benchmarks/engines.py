"""Ways to run a model: each is prepared from a module and its arguments, and gives a call without arguments."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

Args: TypeAlias = tuple[torch.Tensor, ...]
Call: TypeAlias = Callable[[], torch.Tensor]


def eager(model: nn.Module, args: Args) -> Call:
    """PyTorch as it is."""
    return lambda: model(*args)


def inductor(model: nn.Module, args: Args) -> Call:
    """`torch.compile` as it comes."""
    return compiled(model, args)


def inductor_frozen(model: nn.Module, args: Args) -> Call:
    """`torch.compile` with the weights as constants, as sardonyx has them by default."""
    return compiled(model, args, options={"freezing": True})


def sardonyx(model: nn.Module, args: Args) -> Call:
    """`torch.compile` with our backend; an operator that would stay in torch is an error."""
    return compiled(model, args, backend="sardonyx", options={"fallback": "error"})


def onnxruntime(model: nn.Module, args: Args) -> Call:
    """`torch.onnx.export` and a session with default options."""
    with tempfile.TemporaryDirectory() as folder:
        return in_session(exported(model, args, folder), args)


def in_session(path: str, args: Args) -> Call:
    """A file in a session of ONNX Runtime with default options."""
    session = import_module("onnxruntime").InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [x.name for x in session.get_inputs()]
    feeds = {name: x.numpy() for name, x in zip(names, args, strict=True)}
    return lambda: torch.from_numpy(session.run(None, feeds)[0])


def openvino(model: nn.Module, args: Args, precision: str = "f32") -> Call:
    """`torch.onnx.export` and OpenVINO, in float32 unless told otherwise."""
    with tempfile.TemporaryDirectory() as folder:
        core = import_module("openvino").Core()
        properties = {"INFERENCE_PRECISION_HINT": precision}
        return in_request(core.compile_model(exported(model, args, folder), "CPU", properties), args)


def in_request(compiled: Any, args: Args) -> Call:
    """A model that OpenVINO compiled, in one request, with its inputs and its result in shared memory."""
    feeds = [x.numpy() for x in args]
    request = compiled.create_infer_request()
    return lambda: torch.from_numpy(request.infer(feeds, share_inputs=True, share_outputs=True)[0])


def compiled(model: nn.Module, args: Args, **how: Any) -> Call:
    """`torch.compile` called with these arguments."""
    run: Any = torch.compile(model, **how)
    return lambda: run(*args)


def exported(model: nn.Module, args: Args, folder: str) -> str:
    """The file that `torch.onnx.export` writes into a folder."""
    path = str(Path(folder) / "model.onnx")
    program = torch.onnx.export(model, args, dynamo=True, verbose=False)
    assert program is not None
    program.save(path, external_data=True)
    return path


ENGINES: Mapping[str, Callable[[nn.Module, Args], Call]] = {
    "eager": eager,
    "inductor": inductor,
    "sardonyx": sardonyx,
    "onnxruntime": onnxruntime,
    "openvino": openvino,
    "inductor-frozen": inductor_frozen,
}
"""Every engine by name, in the order they take turns."""

USUAL = ("eager", "inductor", "sardonyx", "onnxruntime", "openvino")
"""The engines measured unless others are asked for."""
