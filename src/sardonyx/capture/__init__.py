"""First stage: trace FX graphs of ATen operators, and partition them into regions that ONNX can express."""
