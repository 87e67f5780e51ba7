"""Custom operators for torch, ONNX and ONNX Runtime from one declaration."""

from sardonyx.customop.declaration import CustomOp, custom_op
from sardonyx.customop.registry import library
from sardonyx.customop.shapes import broadcast

__all__ = ["CustomOp", "broadcast", "custom_op", "library"]
