// A call of a linear layer with packed weights: what its operator reads, and its kernels compute.
#pragma once

namespace linear {

enum class Activation { kNone, kRelu, kGelu, kTanhGelu, kSilu };
enum class Type { kFloat, kBfloat16 };

// Of a convolution: a row of its product is the window of an image at one place, of channels that lie side by side.
struct Window {
  int64_t image_height, image_width, channels, out_height, out_width;
  int64_t height, width, stride_y, stride_x, top, left, dilation_y, dilation_x;
};

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
  const Window* window;    // null, if x has the rows themselves
  Type x_type, y_type;
};

// Computes a call, on ONNX Runtime's threads.
ort::Status* run(const ort::Context* context, const Call& call);

}  // namespace linear
