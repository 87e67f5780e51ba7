// The operators of attention in bfloat16. They are compiled for any processor of the architecture, and refuse to be made
// on one that lacks the instructions of the kernels.
//
// Inputs: q, k, v, optionally a bias of floats that broadcasts to (batch, heads, queries, keys) but for its last axis, and
// optionally past keys and values, which come before k and v. q, k and v are (batch, heads, length, size), or (batch, length,
// heads · size); past keys and values are the former. Attributes: scale, causal, and of the latter heads and key_heads.
#pragma once

#include <algorithm>
#include <new>
#include <memory>

namespace {

using attention::Call;
using attention::Rows;
using attention::Type;

constexpr int kFloat = 1, kBfloat16 = 16;  // ONNX's numbers of the types

struct Attributes {
  float scale = 0;
  int64_t causal = 0, heads = 0, key_heads = 0;

  ort::Status* make(const ort::Info* info) {
    auto number = ort::call<ort::Status*(const ort::Info*, const char*, int64_t*)>(ort::kInfoInt);
    auto real = ort::call<ort::Status*(const ort::Info*, const char*, float*)>(ort::kInfoFloat);
    if (auto s = real(info, "scale", &scale)) return s;
    if (auto s = number(info, "causal", &causal)) return s;
    if (auto s = number(info, "heads", &heads)) return s;
    return number(info, "key_heads", &key_heads);
  }
};

// The sizes of an operand, and where its rows are.
struct Operand {
  int64_t batches = 0, heads = 0, tokens = 0, size = 0;
  Rows rows{};

  bool read(const ort::Tensor& x, int64_t heads_of_flat) {
    if (x.rank == 4) batches = x.dims[0], heads = x.dims[1], tokens = x.dims[2], size = x.dims[3];
    else if (x.rank != 3 || heads_of_flat <= 0 || x.dims[2] % heads_of_flat) return false;
    else batches = x.dims[0], heads = heads_of_flat, tokens = x.dims[1], size = x.dims[2] / heads_of_flat;
    rows = rows_of(x.data, x.rank == 4);
    return true;
  }
  Rows rows_of(const void* data, bool by_heads) const {
    if (by_heads) return {data, heads * tokens * size, tokens * size, size};
    return {data, tokens * heads * size, size, heads * size};
  }
};

// Reads a bias; false, if it does not fit.
bool broadcast(const ort::Tensor& bias, const Call& call, Rows& rows) {
  if (bias.rank < 2 || bias.rank > 4 || bias.dims[bias.rank - 1] != call.keys) return false;
  const int64_t wanted[] = {call.batches, call.heads, call.queries};
  int64_t* const strides[] = {&rows.batch, &rows.head, &rows.token};
  int64_t stride = call.keys;
  for (int axis = 2, from_end = 2; axis >= 0; --axis, ++from_end) {
    const int64_t size = from_end <= static_cast<int>(bias.rank) ? bias.dims[bias.rank - from_end] : 1;
    if (size != 1 && size != wanted[axis]) return false;
    *strides[axis] = size == 1 ? 0 : stride;
    stride *= size;
  }
  rows.data = bias.data;
  return true;
}

bool has_instructions() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512bf16");
}

// Reads past keys or values, which differ from the others at most in their number; none, if they are absent.
ort::Status* read_past(const ort::Context* context, size_t index, const Operand& others, Operand& past) {
  ort::Tensor x;
  bool absent = false;
  if (auto s = ort::input(context, index, x, &absent)) return s;
  if (absent) return nullptr;
  const bool fits = x.rank == 4 && past.read(x, 0) && past.batches == others.batches && past.heads == others.heads &&
                    past.size == others.size;
  return fits ? nullptr : ort::failure("past keys and values of attention have another size");
}

ort::Status* attend(ort::Context* context, const Attributes& attributes, Type x_type, Type y_type) {
  ort::Tensor x[3], bias;
  Operand q, k, v, past_k, past_v;
  for (size_t i = 0; i < 3; ++i) {
    if (auto s = ort::input(context, i, x[i])) return s;
  }
  bool absent = false;
  if (auto s = ort::input(context, 3, bias, &absent)) return s;
  const bool reads = q.read(x[0], attributes.heads) && k.read(x[1], attributes.key_heads) && v.read(x[2], attributes.key_heads);
  if (reads) {
    if (auto s = read_past(context, 4, k, past_k)) return s;
    if (auto s = read_past(context, 5, v, past_v)) return s;
  }
  const bool fits = reads && q.batches == k.batches && q.batches == v.batches && k.heads == v.heads && k.heads &&
                    q.heads % k.heads == 0 && k.tokens == v.tokens && past_k.tokens == past_v.tokens && q.size == k.size;
  if (!fits) return ort::failure("queries, keys and values of attention do not fit together");
  Call call{};
  call.batches = q.batches, call.heads = q.heads, call.key_heads = k.heads, call.queries = q.tokens;
  call.past = past_k.tokens, call.keys = call.past + k.tokens, call.size = q.size, call.value_size = v.size;
  call.q = q.rows, call.k = k.rows, call.v = v.rows, call.past_k = past_k.rows, call.past_v = past_v.rows;
  call.scale = attributes.scale, call.causal = attributes.causal != 0, call.x_type = x_type, call.y_type = y_type;
  if (!absent && !broadcast(bias, call, call.bias)) return ort::failure("the bias of attention has another size");
  const bool by_heads = x[0].rank == 4;
  int64_t dims[] = {q.batches, q.heads, q.tokens, v.size};
  if (!by_heads) dims[1] = q.tokens, dims[2] = q.heads * v.size;
  void* y = nullptr;
  if (auto s = ort::output(context, 0, dims, x[0].rank, &y)) return s;
  q.size = v.size;
  call.y = q.rows_of(y, by_heads);
  return attention::run(context, call);
}

template <int kX, int kY>
struct AttentionOperator : ort::CustomOp {
  explicit AttentionOperator(const char* (*called)(const CustomOp*)) {
    name = called;
    provider = [](const CustomOp*) { return "CPUExecutionProvider"; };
    input_count = [](const CustomOp*) -> size_t { return 6; };
    output_count = [](const CustomOp*) -> size_t { return 1; };
    input_type = [](const CustomOp*, size_t i) { return i == 3 ? kFloat : kX; };
    output_type = [](const CustomOp*, size_t) { return kY; };
    input_characteristic = [](const CustomOp*, size_t i) { return i >= 3 ? 1 : 0; };  // optional, required
    output_characteristic = [](const CustomOp*, size_t) { return 0; };
    input_memory = [](const CustomOp*, size_t) { return 0; };
    create_kernel_v2 = [](const CustomOp*, const void* const*, const ort::Info* info, void** kernel) -> ort::Status* {
      if (!has_instructions()) return ort::failure("this processor lacks the instructions of the kernels");
      auto made = std::unique_ptr<Attributes>(new (std::nothrow) Attributes);
      if (!made) return ort::failure("out of memory for attention");
      if (auto s = made->make(info)) return s;
      *kernel = made.release();
      return nullptr;
    };
    compute_v2 = [](void* kernel, ort::Context* context) -> ort::Status* {
      constexpr auto type = [](int element) { return element == kFloat ? Type::kFloat : Type::kBfloat16; };
      try {
        return attend(context, *static_cast<const Attributes*>(kernel), type(kX), type(kY));
      } catch (const std::bad_alloc&) {
        return ort::failure("out of memory in attention");
      }
    };
    destroy = [](void* kernel) { delete static_cast<Attributes*>(kernel); };
  }
};

#define ATTENTION_OPERATOR(variable, x, y, called) \
  AttentionOperator<x, y> variable([](const ort::CustomOp*) { return called; });
ATTENTION_OPERATOR(attention_float, kFloat, kFloat, "Attention")
ATTENTION_OPERATOR(attention_to_bfloat, kFloat, kBfloat16, "AttentionToBfloat16")
ATTENTION_OPERATOR(attention_to_float, kBfloat16, kFloat, "AttentionToFloat32")
ATTENTION_OPERATOR(attention_bfloat, kBfloat16, kBfloat16, "AttentionBfloat16")

}  // namespace
