// A call of a linear layer with packed weights: what its operator reads, and its kernels compute.
#pragma once

namespace linear {

enum class Activation { kNone, kRelu, kGelu, kTanhGelu, kSilu };
enum class Type { kFloat, kBfloat16 };

using windows::Window;

// One product of a call: a weight, and the result that it computes.
struct Projection {
  int64_t columns;
  const void* weights;
  const float* scales;   // of the columns of w, if each has one
  const int32_t* sums;   // of the columns of w, if each has a scale
  const float* bias;     // may be null
  void* y;               // null of the second of two that are gated
};

constexpr int kMostProjections = 3;

// y[m, n] = activation(Σₖ x[m, k] · w[k, n] + bias[n]) + residual[m, n], or activation(… + residual[m, n]); several
// projections of one x, without a residual, have a y each. If they are gated, there are two of as many columns, and
// y[m, n] = activation(first[m, n]) · second[m, n].
struct Call {
  int64_t rows, depth;
  const void* x;
  Projection projections[kMostProjections];
  int count;               // of projections
  bool is_gated;
  const float* channels;   // multiply x before its rows are quantized; may be null
  int64_t block;           // the weights of a column that share a scale, if it has several
  bool has_zero_points;    // of these blocks
  const void* residual;    // of the type of y; may be null
  Activation activation;
  bool activates_sum;      // with the residual
  const Window* window;    // of a convolution, whose rows are the windows of images; null, if x has the rows themselves
  int64_t images;          // of a convolution
  Type x_type, y_type;
};

// Computes a call, on ONNX Runtime's threads.
ort::Status* run(const ort::Context* context, const Call& call);

}  // namespace linear
