"""Translate ATen graphs to ONNX with one table of translations."""
