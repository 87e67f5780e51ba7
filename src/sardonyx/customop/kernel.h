// The API for kernels: typed views of tensors, a parallel loop, and errors.
//
// A kernel is a function with the operator's name. It takes the tensors of the signature as `In<T>`, its results as
// `Out<T>`, then the attributes in order, and a `Parallel` last:
//
//   template <class T>
//   void Scale(In<T> x, Out<T> y, double factor, Parallel parallel) {
//     parallel(x.size(), 1024, [&](int64_t begin, int64_t end) {
//       for (int64_t i = begin; i < end; ++i) y[i] = x[i] * factor;
//     });
//   }
//
// An optional tensor is an `In<T>`, present if `if (x)` is true; a tensor list is an `Ins<T>`. Attributes are
// int64_t, double, bool, std::string_view, List<int64_t> and List<double>.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

namespace sardonyx {

#ifdef __CUDACC__
using half = __half;
using bfloat16 = __nv_bfloat16;
#else
struct half {
  uint16_t bits;
  half() = default;
  template <class Number, class = std::enable_if_t<std::is_arithmetic_v<Number>>>
  half(Number x) : bits(narrow::half_of_float(static_cast<float>(x))) {}
  operator float() const { return narrow::float_of_half(bits); }
};

struct bfloat16 {
  uint16_t bits;
  bfloat16() = default;
  template <class Number, class = std::enable_if_t<std::is_arithmetic_v<Number>>>
  bfloat16(Number x) : bits(narrow::bfloat16_of_float(static_cast<float>(x))) {}
  operator float() const { return narrow::float_of_bfloat16(bits); }
};
#endif

// The type to compute in: float for the narrow ones, else the type itself.
template <class T>
using Wide = std::conditional_t<std::is_same_v<T, half> || std::is_same_v<T, bfloat16>, float, T>;

// Ends the kernel; the message reaches the caller, in torch and in ONNX Runtime, after the operator's name.
[[noreturn]] inline void fail(const std::string& message) { throw std::runtime_error(message); }

inline void check(bool holds, const char* message) {
  if (!holds) fail(message);
}

namespace detail {

constexpr int kMaxDims = 16;

// A tensor of a call, of any type.
struct Array {
  void* data = nullptr;
  int64_t rank = -1;  // -1: absent
  int64_t count = 0;
  bool ready = false;  // a result that is allocated
  int64_t dims[kMaxDims];

  bool present() const { return rank >= 0; }
  void set(const int64_t* sizes, int64_t number) {
    if (number > kMaxDims) fail("a tensor has more than " + std::to_string(kMaxDims) + " dimensions");
    rank = number;
    count = 1;
    for (int64_t i = 0; i < number; ++i) count *= dims[i] = sizes[i];
  }
};

// Allocates a result once its sizes are known.
struct Allocator {
  void (*allocate)(void* call, int index, Array& result);
  void* call;

  void operator()(int index, Array& result) const {
    allocate(call, index, result);
    result.ready = true;
  }
};

}  // namespace detail

template <class T>
class View {
 public:
  explicit View(const detail::Array* array) : array_(array) {}
  T* data() const { return static_cast<T*>(array_->data); }
  int64_t size() const { return array_->count; }
  int64_t rank() const { return array_->rank; }
  const int64_t* dims() const { return array_->dims; }
  // The size of a dimension; from the last one backwards if negative.
  int64_t dim(int64_t i) const {
    const int64_t at = i < 0 ? i + rank() : i;
    if (at < 0 || at >= rank()) {
      fail("it reads dimension " + std::to_string(i) + " of a tensor of rank " + std::to_string(rank()));
    }
    return array_->dims[at];
  }
  T& operator[](int64_t i) const { return data()[i]; }
  T* begin() const { return data(); }
  T* end() const { return data() + size(); }

 protected:
  const detail::Array* array_;
};

template <class T>
class In : public View<const T> {
 public:
  explicit In(const detail::Array* array) : View<const T>(array) {}
  explicit operator bool() const { return this->array_->present(); }
};

template <class T>
class Ins {
 public:
  Ins(const detail::Array* first, int64_t count) : first_(first), count_(count) {}
  int64_t size() const { return count_; }
  In<T> operator[](int64_t i) const { return In<T>(first_ + i); }

 private:
  const detail::Array* first_;
  int64_t count_;
};

template <class T>
class Out : public View<T> {
 public:
  Out(detail::Array* array, detail::Allocator allocator, int index)
      : View<T>(array), result_(array), allocator_(allocator), index_(index) {}

  // Sets the sizes that the shape rule left unknown, and allocates the result.
  T* resize(std::initializer_list<int64_t> sizes) { return resize(sizes.begin(), static_cast<int64_t>(sizes.size())); }
  T* resize(const int64_t* sizes, int64_t rank) {
    check_sizes(sizes, rank);
    if (!result_->ready) {
      result_->set(sizes, rank);
      allocator_(index_, *result_);
    }
    return this->data();
  }

 private:
  void check_sizes(const int64_t* sizes, int64_t rank) const {
    bool agrees = rank == result_->rank;
    for (int64_t i = 0; agrees && i < rank; ++i) {
      agrees = sizes[i] >= 0 && (result_->dims[i] == sizes[i] || result_->dims[i] < 0);
    }
    if (!agrees) {
      fail("result " + std::to_string(index_) + " is resized to (" + listed(sizes, rank) +
           "), and the shape rule says (" + listed(result_->dims, result_->rank) + ")");
    }
  }
  static std::string listed(const int64_t* sizes, int64_t rank) {
    std::string text;
    for (int64_t i = 0; i < rank; ++i) {
      text += (i ? ", " : "") + (sizes[i] == -1 ? "?" : std::to_string(sizes[i]));
    }
    return text;
  }

  detail::Array* result_;
  detail::Allocator allocator_;
  int index_;
};

template <class T>
struct List {
  const T* values;
  int64_t count;
  int64_t size() const { return count; }
  T operator[](int64_t i) const { return values[i]; }
  const T* begin() const { return values; }
  const T* end() const { return values + count; }
};

// Runs `body(begin, end)` for ranges that cover 0…count, on the threads of torch or ONNX Runtime.
//
// There are at most ⌈count / grain⌉ ranges. An exception of a body is rethrown on the kernel's own thread.
class Parallel {
 public:
  using Range = void (*)(void* body, int64_t begin, int64_t end);
  using Run = void (*)(void* pool, int64_t count, int64_t grain, Range range, void* body);
  Parallel(Run run, void* pool) : run_(run), pool_(pool) {}

  template <class F>
  void operator()(int64_t count, int64_t grain, const F& body) const {
    if (count <= 0) return;
    if (count <= grain) return body(int64_t{0}, count);
    Guarded<F> guarded{body};
    run_(pool_, count, grain < 1 ? 1 : grain, &Guarded<F>::range, &guarded);
    if (guarded.error) std::rethrow_exception(guarded.error);
  }
  template <class F>
  void operator()(int64_t count, const F& body) const { (*this)(count, 1, body); }

 private:
  template <class F>
  struct Guarded {
    const F& body;
    std::atomic<bool> failed{false};
    std::exception_ptr error;

    explicit Guarded(const F& given) : body(given) {}
    static void range(void* given, int64_t begin, int64_t end) {
      auto* self = static_cast<Guarded*>(given);
      try {
        if (!self->failed) self->body(begin, end);
      } catch (...) {
        if (!self->failed.exchange(true)) self->error = std::current_exception();
      }
    }
  };
  Run run_;
  void* pool_;
};

}  // namespace sardonyx
