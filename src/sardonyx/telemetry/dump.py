"""The option `dump`: numbered files of the models given to the engine, each with its FX graph as text."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Mapping
from pathlib import Path

import onnx
import onnx_ir as ir
import torch

from sardonyx import dtypes
from sardonyx.atomic_files import atomic_write, write_file
from sardonyx.options import NUMBER
from sardonyx.telemetry.source import annotate

log = logging.getLogger(__name__)


def dump(
    target: str, kind: str, proto: onnx.ModelProto, weights: Mapping[str, torch.Tensor], graph: torch.fx.GraphModule
) -> Path:
    """Write `NNN_kind.onnx` and `NNN_kind.txt` into a folder, NNN being the first free number.

    A target with `{number}` in it is the path of the files without their suffixes. Weights go to a third file.
    """
    path = _next_path(target, kind)
    write_file(path, _externalize_weights(proto, weights, path.with_suffix(".onnx.data")).SerializeToString())
    write_file(path.with_suffix(".txt"), graph.print_readable(print_output=False))
    log.info("dumped %s", path)
    return path


def _externalize_weights(proto: onnx.ModelProto, weights: Mapping[str, torch.Tensor], path: Path) -> onnx.ModelProto:
    """Return a copy of the model whose weights are in the file `path`, one after the other."""
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    initializers = [tensor for tensor in copy.graph.initializer if tensor.name in weights]
    if not initializers:
        return copy
    with atomic_write(path) as file:
        for tensor in initializers:
            offset = file.tell()
            file.write(dtypes.to_array(weights[tensor.name].cpu()).tobytes())
            entries = {"location": path.name, "offset": offset, "length": file.tell() - offset}
            del tensor.external_data[:]
            tensor.external_data.extend(onnx.StringStringEntryProto(key=k, value=str(v)) for k, v in entries.items())
    return copy


def _next_path(target: str, kind: str) -> Path:
    for number in itertools.count():
        path = Path(f"{target.replace(NUMBER, str(number))}.onnx")
        if NUMBER not in target:
            path = Path(target) / f"{number:03d}_{kind}.onnx"
            if any(path.parent.glob(f"{number:03d}_*.onnx")):
                continue
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            continue  # it exists, or another process was faster
        return path
    raise AssertionError("unreachable")


def clear(target: str) -> None:
    """Remove the files that were dumped to a target with `{number}` in it, and no others."""
    folder, name = Path(target).parent, re.escape(Path(target).name).replace(re.escape(NUMBER), r"\d+")
    for path in folder.glob("*"):
        if re.fullmatch(name + r"\.(onnx|onnx\.data|txt)", path.name):
            path.unlink()


def add_metadata(model: ir.Model) -> None:
    """Add the origin of every node to its metadata."""
    for node in model.graph.all_nodes():
        annotate(node.metadata_props, node.meta.get("fx"))
