"""Models as text, made into jobs for the engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import parser

from sardonyx import dtypes
from sardonyx.engines.engine import Job, Runner
from sardonyx.engines.onnx_mlir import OnnxMlir
from sardonyx.options import Options
from sardonyx.translate.translator import WEIGHTS_LOCATION

ADD = "(float[2,3] x, float[2,3] y) => (float[2,3] z) { z = Add(x, y) }"
SCALE = "(float[N,3] x) => (float[N,3] y) { y = Mul(x, w) }"
TO_FILE = "--store-constants-to-file --constants-to-file-total-threshold=0 --constants-to-file-single-threshold=0"
"""Flags by which every weight goes into a file beside the library."""
NASTY = ["--note=$(touch pwned)", "--and=a b; touch pwned", '--quote=it\'s "so"', "--back=`touch pwned`", "--all=*"]
QUOTED = """'--note=$(touch pwned)' "--and=a b; touch pwned" --quote=it\\'s\\ '"so"' '--back=`touch pwned`' '--all=*'"""
"""The same flags, as one writes them for a shell."""


def job_of(text: str, weights: Mapping[str, torch.Tensor] | None = None, **options: Any) -> Job:
    """A job for a graph in ONNX's text form; weights are held by torch, as the doors leave them."""
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> main {text}')
    weights = dict(weights or {})
    for name, weight in weights.items():
        held = onnx.TensorProto(name=name, dims=weight.shape, data_type=int(dtypes.to_onnx(weight.dtype)))
        held.data_location = onnx.TensorProto.EXTERNAL
        held.external_data.add(key="location", value=WEIGHTS_LOCATION)
        model.graph.initializer.append(held)
    return Job(
        model=model.SerializeToString(),
        weights=weights,
        inputs=tuple(x.name for x in model.graph.input),
        outputs=tuple(x.name for x in model.graph.output),
        output_types=tuple(dtypes.to_torch(x.type.tensor_type.elem_type) for x in model.graph.output),
        output_shapes=(None,) * len(model.graph.output),
        fixed=frozenset(),
        device=torch.device("cpu"),
        options=Options(engine="onnx-mlir", **options),
    )


def built(job: Job, folder: Path) -> Runner:
    """The job, compiled into a folder and loaded from it."""
    folder.mkdir(parents=True, exist_ok=True)
    OnnxMlir().compile(job, folder)
    return OnnxMlir().load(job, folder)
