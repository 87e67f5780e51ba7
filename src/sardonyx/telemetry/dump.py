"""Numbered files of what the engine is given, each with its FX graph beside it."""

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
    place: str, kind: str, proto: onnx.ModelProto, weights: Mapping[str, torch.Tensor], graph: torch.fx.GraphModule
) -> Path:
    """Write `NNN_kind.onnx` and `NNN_kind.txt` into a folder, NNN being the first number that is free.

    A place with `{number}` in it is the path of the files, less their suffixes. Weights go into a third file.
    """
    path = _next_path(place, kind)
    write_file(path, _externalize_weights(proto, weights, path.with_suffix(".onnx.data")).SerializeToString())
    write_file(path.with_suffix(".txt"), graph.print_readable(print_output=False))
    log.info("dumped %s", path)
    return path


def _externalize_weights(proto: onnx.ModelProto, weights: Mapping[str, torch.Tensor], path: Path) -> onnx.ModelProto:
    """A copy of the model whose weights are in the file, one after the other, instead of in torch."""
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    held = [tensor for tensor in copy.graph.initializer if tensor.name in weights]
    if not held:
        return copy
    with atomic_write(path) as file:
        for tensor in held:
            offset = file.tell()
            file.write(dtypes.to_array(weights[tensor.name].cpu()).tobytes())
            where = {"location": path.name, "offset": offset, "length": file.tell() - offset}
            del tensor.external_data[:]
            tensor.external_data.extend(onnx.StringStringEntryProto(key=k, value=str(v)) for k, v in where.items())
    return copy


def _next_path(place: str, kind: str) -> Path:
    for number in itertools.count():
        path = Path(f"{place.replace(NUMBER, str(number))}.onnx")
        if NUMBER not in place:
            path = Path(place) / f"{number:03d}_{kind}.onnx"
            if any(path.parent.glob(f"{number:03d}_*.onnx")):
                continue
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            continue  # it is there already, or another process was faster
        return path
    raise AssertionError("unreachable")


def clear(place: str) -> None:
    """Remove the files that were dumped at a place with `{number}` in it, and no others."""
    folder, name = Path(place).parent, re.escape(Path(place).name).replace(re.escape(NUMBER), r"\d+")
    for path in folder.glob("*"):
        if re.fullmatch(name + r"\.(onnx|onnx\.data|txt)", path.name):
            path.unlink()


def add_metadata(model: ir.Model) -> None:
    """Say of every node where it comes from."""
    for node in model.graph.all_nodes():
        annotate(node.metadata_props, node.meta.get("fx"))
