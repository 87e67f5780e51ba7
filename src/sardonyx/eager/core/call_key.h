// The cache key of a call: everything that decides which model runs it, as a list of 64-bit words.
#pragma once

#include <ATen/core/stack.h>
#include <c10/core/DefaultDtype.h>

#include <numeric>

namespace eager {

// The memory layout of a tensor: contiguous (both zero), permuted, or expanded along some axes. `sizes` are those of the
// contiguous tensor under it.
struct Layout {
  c10::SmallVector<int64_t, 6> sizes;
  uint32_t permutation = 0;  // four bits per axis: axes of the tensor, outermost in memory first
  uint32_t expanded = 0;     // one bit per axis of the tensor: stride 0
  bool needs_copy = false;   // any other layout: copied to be contiguous

  void set(const at::Tensor& tensor) {
    sizes.assign(tensor.sizes().begin(), tensor.sizes().end());
    permutation = expanded = 0;
    needs_copy = false;
    if (tensor.is_contiguous() || !tensor.numel()) return;
    const int64_t rank = tensor.dim();
    needs_copy = rank > kMaxRank || !permuted(tensor, rank);
    if (needs_copy) {
      permutation = expanded = 0;
      sizes.assign(tensor.sizes().begin(), tensor.sizes().end());
    }
  }

 private:
  static constexpr int64_t kMaxRank = 8;

  bool permuted(const at::Tensor& tensor, int64_t rank) {
    int64_t axes[kMaxRank];
    int64_t next = 0;
    for (int64_t i = 0; i < rank; ++i) {  // axes of size 1 or stride 0 come first
      if (tensor.size(i) == 1 || tensor.stride(i) == 0) axes[next++] = i;
      if (tensor.size(i) != 1 && tensor.stride(i) == 0) expanded |= 1u << i;
    }
    const int64_t others = next;
    for (int64_t i = 0; i < rank; ++i) {
      if (tensor.size(i) != 1 && tensor.stride(i) != 0) axes[next++] = i;
    }
    std::stable_sort(axes + others, axes + rank, [&](int64_t a, int64_t b) { return tensor.stride(a) > tensor.stride(b); });
    int64_t expected = 1;
    for (int64_t i = rank - 1; i >= others; --i) {
      if (tensor.stride(axes[i]) != expected) return false;
      expected *= tensor.size(axes[i]);
    }
    for (int64_t i = 0; i < rank; ++i) {
      permutation |= uint32_t(axes[i]) << (4 * i);
      sizes[i] = expanded >> axes[i] & 1 ? 1 : tensor.size(axes[i]);
    }
    return true;
  }
};

struct TensorArgument {
  const at::Tensor* tensor = nullptr;
  Layout layout;

  size_t bytes() const {
    return std::accumulate(layout.sizes.begin(), layout.sizes.end(), tensor->element_size(), std::multiplies<size_t>());
  }
};

class CallKey {
 public:
  c10::SmallVector<uint64_t, 48> words;
  c10::SmallVector<TensorArgument, 4> tensors;
  c10::SmallVector<double, 4> scalars;  // finite floats, which a model may take as inputs

  // Returns false for a call that cannot be cached.
  bool set(const c10::IValue* arguments, size_t count) {
    words.clear();
    scalars.clear();
    scalar_positions_.clear();
    used_ = 0;
    words.push_back(uint64_t(c10::get_default_dtype_as_scalartype()));  // decides the dtype of many results
    for (size_t i = 0; i < count; ++i) {
      if (!add(arguments[i])) return false;
    }
    tensors.resize(used_);
    return true;
  }

  uint64_t hash() const {
    uint64_t mixed = 0x9e3779b97f4a7c15u ^ words.size();
    for (uint64_t word : words) {
      mixed = (mixed ^ word) * 0xff51afd7ed558ccdu;
      mixed ^= mixed >> 32;
    }
    return mixed;
  }

  // Turns the key into that of the same call with any scalars.
  void clear_scalars() {
    for (size_t slot : scalar_positions_) words[slot] = 0, words[slot - 1] = kAnyScalar;
  }

 private:
  enum Tag : uint64_t { kNone = 1, kTensor, kInt, kBool, kScalar, kAnyScalar, kList, kString, kUndefined };

  c10::SmallVector<size_t, 4> scalar_positions_;
  size_t used_ = 0;

  void add(Tag tag, uint64_t word) {
    words.push_back(tag);
    words.push_back(word);
  }

  bool add(const c10::IValue& value) {
    if (value.isTensor()) return add(value.toTensor());
    if (value.isNone()) return words.push_back(kNone), true;
    if (value.isInt()) return add(kInt, value.toInt()), true;
    if (value.isDouble()) return number(value.toDouble()), true;
    if (value.isBool()) return add(kBool, value.toBool()), true;
    if (value.isString()) {
      const auto& text = value.toStringRef();
      add(kString, text.size());
      for (char c : text) words.push_back(c);
      return true;
    }
    if (value.isDevice()) return words.push_back(kNone), is_first(value.toDevice());
    if (value.isList()) {
      const auto list = value.toListRef();
      add(kList, list.size());
      for (const auto& x : list) {
        if (!add(x)) return false;
      }
      return true;
    }
    return false;
  }

  // Calls on other devices run in Python.
  static bool is_first(c10::Device device) { return !(device.has_index() ? device.index() : t_current); }

  void number(double x) {
    uint64_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    add(kScalar, bits);
    if (!std::isfinite(x)) return;
    scalar_positions_.push_back(words.size() - 1);
    scalars.push_back(x);
  }

  bool add(const at::Tensor& tensor) {
    if (!tensor.defined()) return words.push_back(kUndefined), true;
    if (tensor.is_sparse() || tensor.layout() != at::kStrided || tensor.is_conj() || tensor.is_neg()) return false;
    const auto type = tensor.scalar_type();
    if (!is_on_device(tensor)) {
      if (tensor.device().type() != c10::kCPU || tensor.dim()) return false;
      if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) return wrapped(tensor, type);
    } else if (tensor.device().index() > 0) {
      return false;
    }
    if (!element_type(type)) return false;
    if (used_ == tensors.size()) tensors.emplace_back();
    TensorArgument& argument = tensors[used_++];
    argument.tensor = &tensor;
    argument.layout.set(tensor);
    add(kTensor, uint64_t(type) | uint64_t(tensor.dim()) << 8 | uint64_t(argument.layout.expanded) << 16);
    words.push_back(argument.layout.permutation);
    for (int64_t size : tensor.sizes()) words.push_back(size);
    return true;
  }

  bool wrapped(const at::Tensor& tensor, at::ScalarType type) {
    if (type == at::kDouble) return number(*tensor.const_data_ptr<double>()), true;
    if (type == at::kLong) return add(kInt, *tensor.const_data_ptr<int64_t>()), true;
    if (type == at::kBool) return add(kBool, *tensor.const_data_ptr<bool>()), true;
    return false;
  }
};

}  // namespace eager
