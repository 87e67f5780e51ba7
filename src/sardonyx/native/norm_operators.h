// The operators of norms. Inputs: x, the scale of each column, and optionally its shift. Attributes: epsilon, and whether
// rows are centered.
#pragma once

#include <memory>
#include <new>

namespace {

using norm::Call;
using norm::Type;

constexpr int kFloat = 1, kBfloat16 = 16;  // ONNX's numbers of the types

struct Attributes {
  float epsilon = 0;
  int64_t centered = 0;

  ort::Status* make(const ort::Info* info) {
    auto number = ort::call<ort::Status*(const ort::Info*, const char*, int64_t*)>(ort::kInfoInt);
    auto real = ort::call<ort::Status*(const ort::Info*, const char*, float*)>(ort::kInfoFloat);
    if (auto s = real(info, "epsilon", &epsilon)) return s;
    return number(info, "centered", &centered);
  }
};

ort::Status* normalize(ort::Context* context, const Attributes& attributes, Type type) {
  ort::Tensor x, scale, shift;
  if (auto s = ort::input(context, 0, x)) return s;
  if (auto s = ort::input(context, 1, scale)) return s;
  bool absent = false;
  if (auto s = ort::input(context, 2, shift, &absent)) return s;
  const auto fits = [&](const ort::Tensor& row) { return row.rank == 1 && row.dims[0] == x.dims[x.rank - 1]; };
  if (!x.rank || !fits(scale) || (!absent && !fits(shift))) return ort::failure("a row of a norm has another size");
  Call call{1, x.dims[x.rank - 1]};
  for (size_t axis = 0; axis + 1 < x.rank; ++axis) call.rows *= x.dims[axis];
  call.x = static_cast<const float*>(x.data), call.scale = static_cast<const float*>(scale.data);
  call.shift = absent ? nullptr : static_cast<const float*>(shift.data);
  call.epsilon = attributes.epsilon, call.centered = attributes.centered != 0, call.y_type = type;
  if (auto s = ort::output(context, 0, x.dims, x.rank, &call.y)) return s;
  return norm::run(context, call);
}

template <int kY>
struct NormOperator : ort::CustomOp {
  explicit NormOperator(const char* (*called)(const CustomOp*)) {
    name = called;
    provider = [](const CustomOp*) { return "CPUExecutionProvider"; };
    input_count = [](const CustomOp*) -> size_t { return 3; };
    output_count = [](const CustomOp*) -> size_t { return 1; };
    input_type = [](const CustomOp*, size_t) { return kFloat; };
    output_type = [](const CustomOp*, size_t) { return kY; };
    input_characteristic = [](const CustomOp*, size_t i) { return i == 2 ? 1 : 0; };  // optional, required
    output_characteristic = [](const CustomOp*, size_t) { return 0; };
    input_memory = [](const CustomOp*, size_t) { return 0; };
    create_kernel_v2 = [](const CustomOp*, const void* const*, const ort::Info* info, void** kernel) -> ort::Status* {
      auto made = std::unique_ptr<Attributes>(new (std::nothrow) Attributes);
      if (!made) return ort::failure("out of memory for a norm");
      if (auto s = made->make(info)) return s;
      *kernel = made.release();
      return nullptr;
    };
    compute_v2 = [](void* kernel, ort::Context* context) -> ort::Status* {
      constexpr Type type = kY == kFloat ? Type::kFloat : Type::kBfloat16;
      return normalize(context, *static_cast<const Attributes*>(kernel), type);
    };
    destroy = [](void* kernel) { delete static_cast<Attributes*>(kernel); };
  }
};

NormOperator<kFloat> norm_float([](const ort::CustomOp*) { return "Norm"; });
NormOperator<kBfloat16> norm_to_bfloat([](const ort::CustomOp*) { return "NormToBfloat16"; });

}  // namespace
