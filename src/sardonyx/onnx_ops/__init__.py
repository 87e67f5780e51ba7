"""ONNX's operators as torch's: `torch.ops.ort.<operator>`, made from the schemas that ONNX Runtime has.

They stand apart from the eager device because they need none: they take tensors of the CPU as well, and compiled and
exported graphs have them as the nodes they are.
"""

from sardonyx.onnx_ops.registration import register
from sardonyx.onnx_ops.schemas import operators

__all__ = ["operators", "register"]
