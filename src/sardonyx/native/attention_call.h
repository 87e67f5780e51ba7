// A call of attention in bfloat16: what its operator reads, and its kernel computes.
#pragma once

namespace attention {

enum class Type { kFloat, kBfloat16 };

// A tensor of rows, one for each head and token of a batch, and its strides in elements.
struct Rows {
  const void* data;
  int64_t batch, head, token;
};

// y = softmax(scale · q · kᵀ + bias) · v, for each head; a head of keys and values may serve several of queries. Rows of
// which every score is masked are zero.
struct Call {
  int64_t batches, heads, key_heads, queries, keys, size, value_size;
  int64_t past;  // the first of the keys and values, which are in memory of their own
  Rows q, k, v;  // k and v without the past ones
  Rows past_k, past_v;
  Rows bias;    // of float, broadcast by strides of zero; its data may be null
  Rows y;       // written
  float scale;
  bool causal;  // a query reads keys up to its own place
  Type x_type, y_type;
};

// Computes a call, on ONNX Runtime's threads.
ort::Status* run(const ort::Context* context, const Call& call);

}  // namespace attention
