"""Stage two: ATen to ONNX, through one table."""
