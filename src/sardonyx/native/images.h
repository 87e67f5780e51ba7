// Operators over images with their channels last: pooling, and depthwise convolutions, of each channel by itself.
//
// Inputs: x, and of a convolution the weights of each place of the window, and a bias, which is optional. Attributes: the
// window, and of pooling whether averages count the padding.
#pragma once

namespace images {

using namespace lanes;
using windows::Inside;
using windows::Window;

struct Call {
  const Window& window;
  int64_t images;
  const void* x;
  const float *weights, *bias;
  void* y;
  bool counts_padding;
};

struct Maximum {  // NaN, if there is one
  template <class V> static V start(const Call&, int64_t) { return all<V>(-std::numeric_limits<float>::infinity()); }
  template <class V> LANES_INLINE static V join(V sum, V x, const float*) { return maximum(x, sum); }
  template <class V> static V end(V sum, const Call&, int64_t) { return sum; }
};
struct Average {
  template <class V> static V start(const Call&, int64_t) { return V{}; }
  template <class V> LANES_INLINE static V join(V sum, V x, const float*) { return sum + x; }
  template <class V> static V end(V sum, const Call& call, int64_t inside) {
    const int64_t count = call.counts_padding ? call.window.height * call.window.width : inside;
    return sum / static_cast<float>(count);
  }
};
struct Depthwise {
  template <class V> static V start(const Call& call, int64_t channel) {
    return call.bias ? row<kWidth<V>>(call.bias + channel) : V{};
  }
  template <class V> LANES_INLINE static V join(V sum, V x, const float* weight) { return sum + x * row<kWidth<V>>(weight); }
  template <class V> static V end(V sum, const Call&, int64_t) { return sum; }
};

// Some channels of the result at one place.
template <class Op, int W, class T>
LANES_INLINE void at_place(const Call& call, const T* image, int64_t y, int64_t x, int64_t channel, T* to) {
  using V = Of<float, W>;
  const Window& w = call.window;
  const int64_t top = y * w.stride_y - w.top, left = x * w.stride_x - w.left;
  const Inside rows(top, w.dilation_y, w.height, w.image_height), columns(left, w.dilation_x, w.width, w.image_width);
  V sum = Op::template start<V>(call, channel);
  for (int64_t i = rows.first; i < rows.end; ++i) {
    const int64_t place = (top + i * w.dilation_y) * w.image_width + left + columns.first * w.dilation_x;
    const T* from = image + place * w.channels + channel;
    const float* weight = call.weights + (i * w.width + columns.first) * w.channels + channel;
    for (int64_t j = columns.first; j < columns.end; ++j) {
      sum = Op::template join<V>(sum, row<W>(from), weight);
      from += w.dilation_x * w.channels;
      weight += w.channels;
    }
  }
  put(to + channel, Op::template end<V>(sum, call, (rows.end - rows.first) * (columns.end - columns.first)));
}

// One row of the result: as many channels at once as there are registers to hide latency.
template <class Op, class T>
void along_row(const Call& call, int64_t row) {
  constexpr int kMany = 4 * kNative;
  const Window& w = call.window;
  const int64_t y = row % w.out_height;
  const T* const image = static_cast<const T*>(call.x) + row / w.out_height * w.image_height * w.image_width * w.channels;
  T* const to = static_cast<T*>(call.y) + row * w.out_width * w.channels;
  const auto each_place = [&](auto at) {
    for (int64_t x = 0; x < w.out_width; ++x) at(x, to + x * w.channels);
  };
  int64_t channel = 0;
  for (; channel + kMany <= w.channels; channel += kMany) {
    each_place([&](int64_t x, T* result) { at_place<Op, kMany>(call, image, y, x, channel, result); });
  }
  for (; channel + kNative <= w.channels; channel += kNative) {
    each_place([&](int64_t x, T* result) { at_place<Op, kNative>(call, image, y, x, channel, result); });
  }
  for (; channel < w.channels; ++channel) {
    each_place([&](int64_t x, T* result) { at_place<Op, 1>(call, image, y, x, channel, result); });
  }
}

template <class Op, class T>
ort::Status* run(const ort::Context* context, const Call& call) {
  const Window& w = call.window;
  const int64_t cost = w.out_width * w.channels * w.height * w.width / 4;
  return spread(context, call.images * w.out_height, cost, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) along_row<Op, T>(call, row);
  });
}

}  // namespace images

namespace {

constexpr int kFloat = 1, kBfloat16 = 16;  // ONNX's numbers of the types

// Reads an optional input of some sizes.
inline ort::Status* numbers(const ort::Context* context, size_t index, int64_t count, const float** data) {
  ort::Tensor tensor;
  bool absent = false;
  if (auto s = ort::input(context, index, tensor, &absent)) return s;
  if (absent) return nullptr;
  int64_t found = 1;
  for (size_t axis = 0; axis < tensor.rank; ++axis) found *= tensor.dims[axis];
  if (found != count) return ort::failure("an input of an operator over images has another size");
  *data = static_cast<const float*>(tensor.data);
  return nullptr;
}

struct Attributes {
  windows::Sizes window;
  int64_t counts_padding = 0;
};

template <class Op, class T>
ort::Status* run_images(ort::Context* context, const Attributes& attributes) {
  constexpr bool kConvolves = std::is_same_v<Op, images::Depthwise>;
  ort::Tensor x;
  if (auto s = ort::input(context, 0, x)) return s;
  windows::Window window{};
  if (x.rank != 4 || !attributes.window.place(x, window)) return ort::failure("x of an operator over images has another size");
  images::Call call{window, x.dims[0], x.data, nullptr, nullptr, nullptr, attributes.counts_padding != 0};
  if constexpr (kConvolves) {
    if (auto s = numbers(context, 1, window.height * window.width * window.channels, &call.weights)) return s;
    if (auto s = numbers(context, 2, window.channels, &call.bias)) return s;
  }
  const int64_t dims[] = {x.dims[0], window.out_height, window.out_width, window.channels};
  if (auto s = ort::output(context, 0, dims, 4, &call.y)) return s;
  return images::run<Op, T>(context, call);
}

template <class Op, class T>
struct ImageOperator : ort::CustomOp {
  explicit ImageOperator(const char* (*called)(const CustomOp*)) {
    constexpr int kType = std::is_same_v<T, float> ? kFloat : kBfloat16;
    constexpr bool kConvolves = std::is_same_v<Op, images::Depthwise>;
    name = called;
    provider = [](const CustomOp*) { return "CPUExecutionProvider"; };
    input_count = [](const CustomOp*) -> size_t { return kConvolves ? 3 : 1; };
    output_count = [](const CustomOp*) -> size_t { return 1; };
    input_type = [](const CustomOp*, size_t i) { return i == 0 ? kType : kFloat; };
    output_type = [](const CustomOp*, size_t) { return kType; };
    input_characteristic = [](const CustomOp*, size_t i) { return i == 2 ? 1 : 0; };  // optional, required
    output_characteristic = [](const CustomOp*, size_t) { return 0; };
    input_memory = [](const CustomOp*, size_t) { return 0; };
    create_kernel_v2 = [](const CustomOp*, const void* const*, const ort::Info* info, void** kernel) -> ort::Status* {
      auto made = std::unique_ptr<Attributes>(new (std::nothrow) Attributes);
      if (!made) return ort::failure("out of memory for an operator over images");
      if (auto s = made->window.read(info)) return s;
      if constexpr (!kConvolves) {
        auto get = ort::call<ort::Status*(const ort::Info*, const char*, int64_t*)>(ort::kInfoInt);
        if (auto s = get(info, "counts_padding", &made->counts_padding)) return s;
      }
      *kernel = made.release();
      return nullptr;
    };
    compute_v2 = [](void* kernel, ort::Context* context) -> ort::Status* {
      return run_images<Op, T>(context, *static_cast<const Attributes*>(kernel));
    };
    destroy = [](void* kernel) { delete static_cast<Attributes*>(kernel); };
  }
};

#define IMAGE_OPERATOR(Op, T, variable, called) \
  ImageOperator<images::Op, T> variable([](const ort::CustomOp*) { return called; });
IMAGE_OPERATOR(Maximum, float, maximum_float, "MaxPool")
IMAGE_OPERATOR(Maximum, lanes::bfloat, maximum_bfloat, "MaxPoolBfloat16")
IMAGE_OPERATOR(Average, float, average_float, "AveragePool")
IMAGE_OPERATOR(Average, lanes::bfloat, average_bfloat, "AveragePoolBfloat16")
IMAGE_OPERATOR(Depthwise, float, depthwise_float, "DepthwiseConv")
IMAGE_OPERATOR(Depthwise, lanes::bfloat, depthwise_bfloat, "DepthwiseConvBfloat16")

}  // namespace
