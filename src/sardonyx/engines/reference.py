"""ONNX's own reference evaluator: slow, portable, independent of any runtime."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import torch

from sardonyx.engines.engine import Availability, Engine, Job, Runner
from sardonyx.translate import dtypes


class Reference(Engine):
    """Runs a model in Python with numpy."""

    name = "reference"

    def probe(self) -> Availability:
        """Always there: it ships with onnx."""
        return Availability(self.name, onnx.__version__)

    def load(self, job: Job, artifact: Path | None) -> ReferenceRunner:
        """Prepare the evaluator."""
        return ReferenceRunner(job)


class ReferenceRunner(Runner):
    """One model in the reference evaluator."""

    def __init__(self, job: Job) -> None:
        from onnx.reference import ReferenceEvaluator

        self._evaluator = ReferenceEvaluator(ir.to_proto(job.whole()))
        self._job = job

    def __call__(self, inputs: Sequence[torch.Tensor | int]) -> list[torch.Tensor]:
        """Run once."""
        arrays = [dtypes.to_array(torch.as_tensor([x] if isinstance(x, int) else x).cpu()) for x in inputs]
        results = self._evaluator.run(None, dict(zip(self._job.inputs, arrays, strict=True)))
        return [
            _tensor(result).to(self._job.device, dtype)
            for result, dtype in zip(results, self._job.output_types, strict=True)
        ]


def _tensor(result: np.ndarray) -> torch.Tensor:
    """A result in torch, which does not take ml_dtypes' bfloat16 as it is."""
    return torch.as_tensor(result.astype(np.float32) if result.dtype == ir.DataType.BFLOAT16.numpy() else result)
