"""The engine `reference`: ONNX's reference evaluator, slow and independent of any runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch

from sardonyx import dtypes
from sardonyx.engines.engine import Availability, Engine, Job, Runner
from sardonyx.errors import EngineError


class Reference(Engine):
    """Runs a model in Python with numpy."""

    name = "reference"

    def probe(self) -> Availability:
        """Always available: it is part of onnx."""
        return Availability(self.name, onnx.__version__)

    def load(self, job: Job, artifact: Path | None) -> ReferenceRunner:
        """Prepare the evaluator."""
        return ReferenceRunner(job)


class ReferenceRunner(Runner):
    """One model in the reference evaluator."""

    def __init__(self, job: Job) -> None:
        from onnx.reference import ReferenceEvaluator

        self._job, model = job, job.whole()
        try:
            self._evaluator = ReferenceEvaluator(ir.to_proto(model))
        except Exception as error:
            custom = ", ".join(sorted({_name(node) for node in model.graph.all_nodes() if node.domain}))
            raise EngineError(
                f"onnx's evaluator refused the model: {_first_line(error)}"
                + (f"; the model has {custom}" if custom else ""),
                hint=_HINT,
            ) from error
        for step in self._evaluator.rt_nodes_:
            step.run = _name_operator_in_errors(step.onnx_node, step.run)

    def __call__(self, inputs: Sequence[torch.Tensor | int]) -> list[torch.Tensor]:
        """Run once."""
        arrays = [dtypes.to_array(torch.as_tensor([x] if isinstance(x, int) else x).cpu()) for x in inputs]
        results = self._evaluator.run(None, dict(zip(self._job.inputs, arrays, strict=True)))
        return [
            _tensor(result).to(self._job.device, dtype)
            for result, dtype in zip(results, self._job.output_types, strict=True)
        ]


_HINT = "the engine 'onnxruntime' may have a kernel for it; optimize=\"none\" avoids operators of other domains"


def _name_operator_in_errors(node: onnx.NodeProto, run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a step of the evaluator so that its exceptions name the operator."""

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except Exception as error:
            text = f"{type(error).__name__}: {_first_line(error)}"
            raise EngineError(f"onnx's evaluator failed at {_name(node)} ({node.name}): {text}", hint=_HINT) from error

    return call


def _name(node: ir.Node | onnx.NodeProto) -> str:
    return f"{node.domain}::{node.op_type}" if node.domain else node.op_type


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _tensor(result: np.ndarray) -> torch.Tensor:
    """Convert a result to torch, which does not support ml_dtypes' bfloat16."""
    return torch.as_tensor(result.astype(np.float32) if result.dtype == ir.DataType.BFLOAT16.numpy() else result)
