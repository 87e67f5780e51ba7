"""Stage one: FX graphs of ATen operators, what in them ONNX can express, and how results must look."""
