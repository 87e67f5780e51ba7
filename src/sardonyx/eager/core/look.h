// What a call looks like: everything that decides which model runs it, as words that can be compared.
#pragma once

#include <ATen/core/stack.h>
#include <c10/core/DefaultDtype.h>

#include <numeric>

namespace eager {

// How a tensor lies in memory: in order (both empty), as a permutation of tensors that do, or repeated without end along
// some axes. `sizes` are those of what lies there in order.
struct Layout {
  c10::SmallVector<int64_t, 6> sizes;
  uint32_t order = 0;      // four bits for each axis: which axis of the tensor is next in memory
  uint32_t repeated = 0;   // a bit for each axis of the tensor
  bool copied = false;     // it lies otherwise, and is put in order first

  void of(const at::Tensor& tensor) {
    sizes.assign(tensor.sizes().begin(), tensor.sizes().end());
    order = repeated = 0;
    copied = false;
    if (tensor.is_contiguous() || !tensor.numel()) return;
    const int64_t rank = tensor.dim();
    copied = rank > kMostAxes || !permuted(tensor, rank);
    if (copied) {
      order = repeated = 0;
      sizes.assign(tensor.sizes().begin(), tensor.sizes().end());
    }
  }

 private:
  static constexpr int64_t kMostAxes = 8;

  bool permuted(const at::Tensor& tensor, int64_t rank) {
    int64_t axes[kMostAxes];
    int64_t next = 0;
    for (int64_t i = 0; i < rank; ++i) {  // axes that take no room come first
      if (tensor.size(i) == 1 || tensor.stride(i) == 0) axes[next++] = i;
      if (tensor.size(i) != 1 && tensor.stride(i) == 0) repeated |= 1u << i;
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
      order |= uint32_t(axes[i]) << (4 * i);
      sizes[i] = repeated >> axes[i] & 1 ? 1 : tensor.size(axes[i]);
    }
    return true;
  }
};

struct Leaf {
  const at::Tensor* tensor = nullptr;
  Layout layout;

  // What it takes in memory.
  size_t bytes() const {
    return std::accumulate(layout.sizes.begin(), layout.sizes.end(), tensor->element_size(), std::multiplies<size_t>());
  }
};

class Look {
 public:
  c10::SmallVector<uint64_t, 48> words;
  c10::SmallVector<Leaf, 4> leaves;
  c10::SmallVector<double, 4> numbers;  // finite ones, of which a model may take any

  // False where a call is none that can be kept.
  bool of(const c10::IValue* arguments, size_t count) {
    words.clear();
    numbers.clear();
    places_.clear();
    used_ = 0;
    words.push_back(uint64_t(c10::get_default_dtype_as_scalartype()));  // which decides that of many results
    for (size_t i = 0; i < count; ++i) {
      if (!add(arguments[i])) return false;
    }
    leaves.resize(used_);
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

  // The same call with any numbers.
  void without_numbers() {
    for (size_t place : places_) words[place] = 0, words[place - 1] = kAnyNumber;
  }

 private:
  enum Tag : uint64_t { kNone = 1, kTensor, kInt, kBool, kNumber, kAnyNumber, kList, kString, kUndefined };

  c10::SmallVector<size_t, 4> places_;
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

  // Others than the first device are Python's.
  static bool is_first(c10::Device device) { return !(device.has_index() ? device.index() : t_current); }

  void number(double x) {
    uint64_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    add(kNumber, bits);
    if (!std::isfinite(x)) return;
    places_.push_back(words.size() - 1);
    numbers.push_back(x);
  }

  bool add(const at::Tensor& tensor) {
    if (!tensor.defined()) return words.push_back(kUndefined), true;
    if (tensor.is_sparse() || tensor.layout() != at::kStrided || tensor.is_conj() || tensor.is_neg()) return false;
    const auto type = tensor.scalar_type();
    if (!is_ours(tensor)) {
      if (tensor.device().type() != c10::kCPU || tensor.dim()) return false;
      if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) return wrapped(tensor, type);
    } else if (tensor.device().index() > 0) {
      return false;
    }
    if (!element_type(type)) return false;
    if (used_ == leaves.size()) leaves.emplace_back();
    Leaf& leaf = leaves[used_++];
    leaf.tensor = &tensor;
    leaf.layout.of(tensor);
    add(kTensor, uint64_t(type) | uint64_t(tensor.dim()) << 8 | uint64_t(leaf.layout.repeated) << 16);
    words.push_back(leaf.layout.order);
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
