"""ONNX's own reference evaluator: slow, portable, independent of any runtime."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import onnx
import torch

from sardonyx.engines.registry import Availability, Job
from sardonyx.translate import dtypes
from sardonyx.translate.translator import WEIGHTS_LOCATION


class Reference:
    """Runs a model in Python with numpy."""

    name = "reference"
    domains: frozenset[str] = frozenset()

    def probe(self) -> Availability:
        """Always there: it ships with onnx."""
        return Availability(self.name, onnx.__version__)

    def local_domains(self, device: torch.device, operators: Set[str]) -> frozenset[str]:
        """None."""
        return frozenset()

    def kernels(self, device: torch.device) -> Any:
        """It computes every operator in every dtype."""
        return None

    def opset(self, device: torch.device, operators: Set[str]) -> int:
        """The newest that rewrite rules know."""
        return 23

    def freezes(self, device: torch.device) -> bool:
        """Constants can be folded."""
        return True

    def load(self, job: Job) -> ReferenceRunner:
        """Prepare the evaluator."""
        return ReferenceRunner(job)


class ReferenceRunner:
    """One model in the reference evaluator."""

    def __init__(self, job: Job) -> None:
        from onnx.reference import ReferenceEvaluator

        model = onnx.load_from_string(job.model)
        for tensor in model.graph.initializer:
            if tensor.data_location == onnx.TensorProto.EXTERNAL and _location(tensor) == WEIGHTS_LOCATION:
                tensor.ClearField("external_data")
                tensor.data_location = onnx.TensorProto.DEFAULT
                tensor.raw_data = dtypes.to_array(job.weights[tensor.name].cpu()).tobytes()
        self._evaluator = ReferenceEvaluator(model)
        self._job = job

    def __call__(self, inputs: Sequence[torch.Tensor | int]) -> list[torch.Tensor]:
        """Run once."""
        arrays = [dtypes.to_array(torch.as_tensor([x] if isinstance(x, int) else x).cpu()) for x in inputs]
        results = self._evaluator.run(None, dict(zip(self._job.inputs, arrays, strict=True)))
        return [
            torch.as_tensor(result).to(self._job.device, dtype)
            for result, dtype in zip(results, self._job.output_types, strict=True)
        ]

    def close(self) -> None:
        """Nothing is held."""


def _location(tensor: onnx.TensorProto) -> str:
    return next((entry.value for entry in tensor.external_data if entry.key == "location"), "")
