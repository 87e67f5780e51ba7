// The operators of linear layers with packed weights. They are compiled for any processor of the architecture, and refuse
// to be made on one that lacks the instructions of the kernels.
//
// Inputs: x, residual, of weights in int8 what channels of x are multiplied by, and for each of up to three projections of x
// the weights in panels, bias and, of weights in int8, the scales and sums of their columns; residual, channels and bias are
// optional, and so are projections after the first. Attributes: depth, activation, activates_sum, is_gated, and of weights in
// blocks their size and whether they have zero points. The columns of a projection are attributes, too. x of a convolution
// has its channels last, and window are the sizes of the window, strides, padding and dilations as in ONNX; a depth of its
// weights is a place in the window and a channel.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <iterator>
#include <memory>
#include <new>

namespace {

using linear::Activation;
using linear::Call;
using linear::kMostProjections;
using linear::Projection;
using linear::Type;

constexpr int kFloat = 1, kUint8 = 2, kInt8 = 3, kInt32 = 6, kBfloat16 = 16;  // ONNX's numbers of the types
constexpr int64_t kPanelColumns = 32;

ort::Status* int_attribute(const ort::Info* info, const char* name, int64_t* value) {
  return ort::call<ort::Status*(const ort::Info*, const char*, int64_t*)>(ort::kInfoInt)(info, name, value);
}

struct Layer {
  int64_t depth = 0, activation = 0, activates_sum = 0, is_gated = 0, block = 0, has_zero_points = 0;
  int64_t columns[kMostProjections] = {};
  windows::Sizes window;

  ort::Status* make(const ort::Info* info, bool is_convolution) {
    const char* const names[kMostProjections] = {"columns", "columns_2", "columns_3"};
    for (int i = 0; i < kMostProjections; ++i) {
      if (auto s = int_attribute(info, names[i], &columns[i])) return s;
    }
    if (auto s = int_attribute(info, "depth", &depth)) return s;
    if (auto s = int_attribute(info, "activation", &activation)) return s;
    if (auto s = int_attribute(info, "activates_sum", &activates_sum)) return s;
    if (auto s = int_attribute(info, "is_gated", &is_gated)) return s;
    if (auto s = int_attribute(info, "block", &block)) return s;
    if (auto s = int_attribute(info, "has_zero_points", &has_zero_points)) return s;
    const bool known = activation >= 0 && activation <= static_cast<int64_t>(Activation::kSilu);
    const bool sized = depth >= 0 && std::all_of(std::begin(columns), std::end(columns), [](auto n) { return n >= 0; });
    constexpr int64_t kLeastBlock = 32;
    const bool valid = known && sized && block >= 0 && block % kLeastBlock == 0;
    if (!valid || (is_gated && columns[0] != columns[1])) return ort::failure("a linear layer has invalid attributes");
    return is_convolution ? window.read(info) : nullptr;
  }
};

// Whether the windows are the pixels of the image, one after the other.
bool is_pixel(const linear::Window& w) {
  return w.height * w.width == 1 && w.stride_y == 1 && w.stride_x == 1 && w.out_height == w.image_height &&
         w.out_width == w.image_width && w.top == 0 && w.left == 0;
}

bool place(const Layer& layer, const ort::Tensor& x, linear::Window& window) {
  return layer.window.place(x, window) && window.height * window.width * window.channels == layer.depth;
}

// Checks that an input is a row of the given size; returns its data, null if it is absent.
template <class T>
ort::Status* row(const ort::Context* context, size_t index, int64_t size, bool needed, const T** data) {
  ort::Tensor tensor;
  bool absent = false;
  if (auto s = ort::input(context, index, tensor, &absent)) return s;
  if (absent) return needed ? ort::failure("a linear layer lacks the scales of its weights") : nullptr;
  if (tensor.rank != 1 || tensor.dims[0] != size) return ort::failure("an input of a linear layer has another size");
  *data = static_cast<const T*>(tensor.data);
  return nullptr;
}

int64_t quotient(int64_t a, int64_t b) { return (a + b - 1) / b; }

bool has_dims(const ort::Tensor& tensor, std::initializer_list<int64_t> dims) {
  return tensor.rank == dims.size() && std::equal(dims.begin(), dims.end(), tensor.dims);
}

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

// A precision: `kWeights` is the type of its weights, and `kScaledColumns` whether each column has a scale.
struct InBfloat16 {
  static constexpr int kWeights = kBfloat16;
  static constexpr bool kScaledColumns = false;
  static bool has_instructions() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }
  static bool fits(const Layer& layer, int64_t columns, const ort::Tensor& weights) {
    return has_dims(weights, {quotient(columns, kPanelColumns), quotient(layer.depth, 2), kPanelColumns, 2});
  }
};
struct InInt8 {
  static constexpr int kWeights = kInt8;
  static constexpr bool kScaledColumns = true;
  static bool has_instructions() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
  static bool fits(const Layer& layer, int64_t columns, const ort::Tensor& weights) {
    return has_dims(weights, {quotient(columns, kPanelColumns), quotient(layer.depth, 4), kPanelColumns, 4});
  }
};
struct InInt4 {
  static constexpr int kWeights = kUint8;
  static constexpr bool kScaledColumns = false;
  static bool has_instructions() { return InBfloat16::has_instructions(); }
  static bool fits(const Layer& layer, int64_t columns, const ort::Tensor& weights) {
    if (!layer.block) return false;
    const int64_t header = kPanelColumns * sizeof(float) * (layer.has_zero_points ? 2 : 1);
    const int64_t blocks = quotient(layer.depth, layer.block), bytes = header + layer.block * kPanelColumns / 2;
    return has_dims(weights, {quotient(columns, kPanelColumns), blocks, bytes});
  }
};

// The inputs of a node: before those of projections, and of each of them.
template <class Precision>
constexpr size_t kFirstInputs = Precision::kScaledColumns ? 3 : 2;
template <class Precision>
constexpr size_t kProjectionInputs = Precision::kScaledColumns ? 4 : 2;

// Reads the projections of a node: the first, and those after it that it has.
template <class Precision>
ort::Status* read_projections(const ort::Context* context, const Layer& layer, Call& call) {
  for (; call.count < kMostProjections; ++call.count) {
    const size_t first = kFirstInputs<Precision> + call.count * kProjectionInputs<Precision>;
    Projection& projection = call.projections[call.count];
    ort::Tensor weights;
    bool absent = false;
    if (auto s = ort::input(context, first, weights, &absent)) return s;
    if (absent) break;
    projection.columns = layer.columns[call.count];
    if (!Precision::fits(layer, projection.columns, weights)) {
      return ort::failure("the weights of a linear layer have another size");
    }
    projection.weights = weights.data;
    if (auto s = row(context, first + 1, projection.columns, false, &projection.bias)) return s;
    if constexpr (Precision::kScaledColumns) {
      if (auto s = row(context, first + 2, projection.columns, true, &projection.scales)) return s;
      if (auto s = row(context, first + 3, projection.columns, true, &projection.sums)) return s;
    }
  }
  const bool fits = layer.is_gated ? call.count == 2 : call.count > 0;
  return fits ? nullptr : ort::failure("a linear layer has another number of weights");
}

template <class Precision>
ort::Status* run_layer(ort::Context* context, const Layer& layer, bool is_convolution, Type x_type, Type y_type) {
  ort::Tensor x, residual;
  if (auto s = ort::input(context, 0, x)) return s;
  linear::Window window{};
  const bool fits = is_convolution ? place(layer, x, window) : x.rank >= 1 && x.dims[x.rank - 1] == layer.depth;
  if (!fits) return ort::failure("x of a linear layer has another size");
  Call call{};
  if (auto s = read_projections<Precision>(context, layer, call)) return s;
  if constexpr (Precision::kScaledColumns) {
    if (auto s = row(context, 2, layer.depth, false, &call.channels)) return s;
  }
  int64_t dims[ort::Tensor::kMostDims];
  std::copy(x.dims, x.dims + x.rank, dims);
  if (is_convolution) dims[1] = window.out_height, dims[x.rank - 2] = window.out_width;
  call.window = is_convolution && !is_pixel(window) ? &window : nullptr;
  call.images = x.dims[0];
  call.rows = 1;
  for (size_t axis = 0; axis + 1 < x.rank; ++axis) call.rows *= dims[axis];
  call.depth = layer.depth;
  call.block = layer.block, call.has_zero_points = layer.has_zero_points != 0;
  call.x = x.data;
  call.activation = static_cast<Activation>(layer.activation);
  call.activates_sum = layer.activates_sum != 0, call.is_gated = layer.is_gated != 0;
  call.x_type = x_type, call.y_type = y_type;
  for (int i = 0; i < (call.is_gated ? 1 : call.count); ++i) {
    dims[x.rank - 1] = call.projections[i].columns;
    if (auto s = ort::output(context, i, dims, x.rank, &call.projections[i].y)) return s;
  }
  bool absent = false;
  if (auto s = ort::input(context, 1, residual, &absent)) return s;
  const bool same = residual.rank == x.rank && std::equal(dims, dims + x.rank, residual.dims);
  if (!absent && !(same && call.count == 1)) return ort::failure("the residual of a linear layer has another size");
  call.residual = absent ? nullptr : residual.data;
  return linear::run(context, call);
}

template <class Precision, int kX, int kY, bool kIsConvolution>
struct LinearOperator : ort::CustomOp {
  static constexpr size_t kFirst = kFirstInputs<Precision>, kEach = kProjectionInputs<Precision>;
  static constexpr int kRequired = 0, kOptional = 1;

  explicit LinearOperator(const char* (*called)(const CustomOp*)) {
    name = called;
    provider = [](const CustomOp*) { return "CPUExecutionProvider"; };
    input_count = [](const CustomOp*) -> size_t { return kFirst + kMostProjections * kEach; };
    output_count = [](const CustomOp*) -> size_t { return kMostProjections; };
    input_type = [](const CustomOp*, size_t i) {
      const int first[] = {kX, kY, kFloat}, each[] = {Precision::kWeights, kFloat, kFloat, kInt32};
      return i < kFirst ? first[i] : each[(i - kFirst) % kEach];
    };
    output_type = [](const CustomOp*, size_t) { return kY; };
    input_characteristic = [](const CustomOp*, size_t i) { return i == 0 || i == kFirst ? kRequired : kOptional; };
    output_characteristic = [](const CustomOp*, size_t i) { return i == 0 ? kRequired : kOptional; };
    input_memory = [](const CustomOp*, size_t) { return 0; };
    create_kernel_v2 = [](const CustomOp*, const void* const*, const ort::Info* info, void** kernel) -> ort::Status* {
      if (!Precision::has_instructions()) return ort::failure("this processor lacks the instructions of the kernels");
      auto made = std::unique_ptr<Layer>(new (std::nothrow) Layer);
      if (!made) return ort::failure("out of memory for a linear layer");
      if (auto s = made->make(info, kIsConvolution)) return s;
      *kernel = made.release();
      return nullptr;
    };
    compute_v2 = [](void* kernel, ort::Context* context) -> ort::Status* {
      constexpr auto type = [](int element) { return element == kFloat ? Type::kFloat : Type::kBfloat16; };
      try {
        const Layer& layer = *static_cast<const Layer*>(kernel);
        return run_layer<Precision>(context, layer, kIsConvolution, type(kX), type(kY));
      } catch (const std::bad_alloc&) {
        return ort::failure("out of memory in a linear layer");
      }
    };
    destroy = [](void* kernel) { delete static_cast<Layer*>(kernel); };
  }
};

// The operators of a precision: by the types of x and y.
#define LINEAR_OPERATOR(Precision, variable, x, y, is_convolution, called) \
  LinearOperator<Precision, x, y, is_convolution> variable([](const ort::CustomOp*) { return called; });
#define LINEAR_OPERATORS(Precision)                                                          \
  LINEAR_OPERATOR(Precision, linear_float, kFloat, kFloat, false, "Linear")                  \
  LINEAR_OPERATOR(Precision, linear_to_bfloat, kFloat, kBfloat16, false, "LinearToBfloat16") \
  LINEAR_OPERATOR(Precision, linear_to_float, kBfloat16, kFloat, false, "LinearToFloat32")   \
  LINEAR_OPERATOR(Precision, linear_bfloat, kBfloat16, kBfloat16, false, "LinearBfloat16")   \
  LINEAR_OPERATOR(Precision, conv_float, kFloat, kFloat, true, "Conv")                       \
  LINEAR_OPERATOR(Precision, conv_to_bfloat, kFloat, kBfloat16, true, "ConvToBfloat16")      \
  LINEAR_OPERATOR(Precision, conv_to_float, kBfloat16, kFloat, true, "ConvToFloat32")        \
  LINEAR_OPERATOR(Precision, conv_bfloat, kBfloat16, kBfloat16, true, "ConvBfloat16")

}  // namespace
