// A call of a linear layer with packed weights: what its operator reads, and its kernels compute.
#pragma once

namespace linear {

enum class Activation { kNone, kRelu, kGelu, kTanhGelu, kSilu };
enum class Type { kFloat, kBfloat16 };

using windows::Window;

// y[m, n] = activation(Σₖ x[m, k] · w[k, n] + bias[n]) + residual[m, n], or activation(… + residual[m, n])
struct Call {
  int64_t rows, columns, depth;
  const void *x, *weights;
  const float* scales;     // of the columns of w, if each has one
  const int32_t* sums;     // of the columns of w, if each has a scale
  const float* channels;   // multiply x before its rows are quantized; may be null
  int64_t block;           // the weights of a column that share a scale, if it has several
  bool has_zero_points;    // of these blocks
  const float* bias;       // may be null
  const void* residual;    // of the type of y; may be null
  void* y;
  Activation activation;
  bool activates_sum;      // with the residual
  const Window* window;    // of a convolution, whose rows are the windows of images; null, if x has the rows themselves
  int64_t images;          // of a convolution
  Type x_type, y_type;
};

// Computes a call, on ONNX Runtime's threads.
ort::Status* run(const ort::Context* context, const Call& call);

}  // namespace linear
