// A call of a norm: what its operator reads, and its kernel computes.
#pragma once

namespace norm {

enum class Type { kFloat, kBfloat16 };

// y = (x − mean) / √(variance + ε) · scale + shift, for each row; with a mean of zero if it is not centered.
struct Call {
  int64_t rows, columns;
  const float *x, *scale;
  const float* shift;  // may be null
  void* y;
  float epsilon;
  bool centered;
  Type y_type;
};

// Computes a call, on ONNX Runtime's threads.
ort::Status* run(const ort::Context* context, const Call& call);

}  // namespace norm
