"""ONNX operators in torch: `torch.ops.ort.<operator>`, generated from ONNX Runtime's schemas.

They do not need the eager device: they take CPU tensors too, and compiled and exported graphs contain them as nodes.
"""

from sardonyx.onnx_ops.registration import register
from sardonyx.onnx_ops.schemas import operators

__all__ = ["operators", "register"]
