// Layer norm and RMS norm of rows of floats, written as floats or as bfloat16.
#pragma once

namespace norm {

using namespace lanes;
constexpr int kWide = 2 * kNative;

// The mean of f(x) over a row.
template <class F>
float mean_of(const float* x, int64_t columns, const F& f) {
  Along<Sum, float, kWide> sum;
  sweep<kWide>(0, columns, [&](auto w, int64_t i) { sum(f(row<w>(x + i))); });
  return sum.total() / static_cast<float>(columns);
}

template <class Out>
void normalize(const Call& call, const float* x, Out* y) {
  const float mean = call.centered ? mean_of(x, call.columns, [](auto v) { return v; }) : 0.0f;
  const float variance = mean_of(x, call.columns, [mean](auto v) {
    const auto centered = v - mean;
    return centered * centered;
  });
  const float by = 1 / std::sqrt(variance + call.epsilon);
  sweep<kWide>(0, call.columns, [&](auto w, int64_t i) {
    auto v = (row<w>(x + i) - mean) * by * row<w>(call.scale + i);
    if (call.shift) v = v + row<w>(call.shift + i);
    put(y + i, v);
  });
}

template <class Out>
ort::Status* run_as(const ort::Context* context, const Call& call) {
  return spread(context, call.rows, call.columns, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      normalize(call, call.x + i * call.columns, static_cast<Out*>(call.y) + i * call.columns);
    }
  });
}
ort::Status* run(const ort::Context* context, const Call& call) {
  if (!call.rows || !call.columns) return nullptr;
  return call.y_type == Type::kFloat ? run_as<float>(context, call) : run_as<bfloat>(context, call);
}

}  // namespace norm
