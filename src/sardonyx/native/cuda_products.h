// Matrix products on a GPU by cuBLASLt: one operator computes x·w₀ + b₀, x·w₁ + b₁, … of one x.
//
// ONNX Runtime adds the bias of a product by a second kernel, and runs products of the same x one after another, though
// each may be too small to fill the GPU. Here the bias is added by the product's kernel, and the products run side by
// side where that is faster. cuBLASLt proposes several algorithms for a product; the second call of a shape measures them,
// also side by side, where the fastest is rarely the one that is fastest alone, which takes all of the GPU.
//
// Nothing is linked, and no header of CUDA is needed: torch has loaded the libraries.
#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

namespace {

using Handle = void*;
using Address = unsigned long long;

constexpr int kMostProducts = 4;
constexpr int kMostAlgorithms = 16;
constexpr int kAlignment = 16;  // bytes that algorithms may assume
constexpr size_t kWorkspace = size_t{16} << 20, kBranchWorkspace = size_t{4} << 20;
constexpr int kMeasuredCalls = 5;
constexpr size_t kCacheBytes = size_t{128} << 20;  // more than a GPU's L2 cache has
constexpr size_t kMostGroups = 64;

// CUDA's driver, and cuBLASLt: functions by name.
struct Libraries {
  int (*stream_create)(Handle*, unsigned);
  int (*stream_wait)(Handle, Handle, unsigned);
  int (*stream_capturing)(Handle, int*);
  int (*event_create)(Handle*, unsigned);
  int (*event_record)(Handle, Handle);
  int (*event_synchronize)(Handle);
  int (*event_elapsed)(float*, Handle, Handle);
  int (*allocate)(Address*, size_t);
  int (*allocate_in_stream)(Address*, size_t, Handle);
  int (*free_in_stream)(Address, Handle);
  int (*copy)(Address, Address, size_t, Handle);
  int (*fill)(Address, unsigned char, size_t, Handle);
  int (*lt_create)(Handle*);
  int (*matmul_create)(Handle*, int, int);
  int (*matmul_set)(Handle, int, const void*, size_t);
  int (*matmul_destroy)(Handle);
  int (*layout_create)(Handle*, int, uint64_t, uint64_t, int64_t);
  int (*layout_destroy)(Handle);
  int (*preference_create)(Handle*);
  int (*preference_set)(Handle, int, const void*, size_t);
  int (*preference_destroy)(Handle);
  int (*heuristic)(Handle, Handle, Handle, Handle, Handle, Handle, Handle, int, void*, int*);
  int (*matmul)(Handle, Handle, const void*, const void*, Handle, const void*, Handle, const void*, const void*, Handle,
                void*, Handle, const void*, void*, size_t, Handle);

  template <class F>
  static void find(void* library, const char* name, F& function, bool& found) {
    function = library ? reinterpret_cast<F>(dlsym(library, name)) : nullptr;
    found = found && function;
  }

  bool load() {
    void* cuda = dlopen("libcuda.so.1", RTLD_NOW);
    void* lt = nullptr;
    for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12"}) lt = lt ? lt : dlopen(name, RTLD_NOW);
    bool found = true;
    find(cuda, "cuStreamCreate", stream_create, found);
    find(cuda, "cuStreamWaitEvent", stream_wait, found);
    find(cuda, "cuStreamIsCapturing", stream_capturing, found);
    find(cuda, "cuEventCreate", event_create, found);
    find(cuda, "cuEventRecord", event_record, found);
    find(cuda, "cuEventSynchronize", event_synchronize, found);
    find(cuda, "cuEventElapsedTime", event_elapsed, found);
    find(cuda, "cuMemAlloc_v2", allocate, found);
    find(cuda, "cuMemAllocAsync", allocate_in_stream, found);
    find(cuda, "cuMemFreeAsync", free_in_stream, found);
    find(cuda, "cuMemcpyDtoDAsync_v2", copy, found);
    find(cuda, "cuMemsetD8Async", fill, found);
    find(lt, "cublasLtCreate", lt_create, found);
    find(lt, "cublasLtMatmulDescCreate", matmul_create, found);
    find(lt, "cublasLtMatmulDescSetAttribute", matmul_set, found);
    find(lt, "cublasLtMatmulDescDestroy", matmul_destroy, found);
    find(lt, "cublasLtMatrixLayoutCreate", layout_create, found);
    find(lt, "cublasLtMatrixLayoutDestroy", layout_destroy, found);
    find(lt, "cublasLtMatmulPreferenceCreate", preference_create, found);
    find(lt, "cublasLtMatmulPreferenceSetAttribute", preference_set, found);
    find(lt, "cublasLtMatmulPreferenceDestroy", preference_destroy, found);
    find(lt, "cublasLtMatmulAlgoGetHeuristic", heuristic, found);
    find(lt, "cublasLtMatmul", matmul, found);
    return found;
  }
};

// Null if a library or function is missing.
const Libraries* libraries() {
  static Libraries loaded;
  static const bool complete = loaded.load();
  return complete ? &loaded : nullptr;
}

// Numbers of the enumerations in cublasLt.h, library_types.h and cuda.h.
enum : int {
  kComputeFloat = 68,
  kFloat = 0,
  kHalf = 2,
  kBfloat = 14,
  kTransA = 3,
  kEpilogue = 7,
  kBiasPointer = 8,
  kMaxWorkspace = 1,
  kReductionSchemes = 3,
  kMinAlignmentA = 5,
  kEpilogueBias = 4,
  kTransposed = 1,
  kNoTiming = 2,
  kNonBlocking = 1,
};

struct Algorithm {
  uint64_t data[8];
};
struct Proposal {
  Algorithm algorithm;
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
};

ort::Status* lt_status(int code, const char* what) {
  static thread_local char message[96];
  if (code == 0) return nullptr;
  snprintf(message, sizeof message, "%s failed with error %d", what, code);
  return ort::failure(message);
}

// A product y = x·w + b of one shape, in row-major order. To cuBLASLt, whose matrices are column-major, it is
// yᵀ = wᵀ·xᵀ, and the bias is a column.
struct Shape {
  int64_t rows, columns, depth;
  int type;         // of the elements of x, w and the bias
  int result;       // of those of y
  bool transposed;  // w is stored as columns × depth
  bool bias;
  size_t workspace;
  using Key = std::array<int64_t, 8>;
  Key key() const { return {rows, columns, depth, type, result, transposed, bias, static_cast<int64_t>(workspace)}; }
};

// The sizes of the matrices of a product, with a number of columns.
struct Layouts {
  Handle w = nullptr, x = nullptr, y = nullptr;

  Layouts() = default;
  Layouts(const Layouts&) = delete;
  Layouts& operator=(const Layouts&) = delete;
  ~Layouts() {
    for (Handle layout : {w, x, y}) {
      if (layout) libraries()->layout_destroy(layout);
    }
  }

  ort::Status* make(const Shape& shape, int64_t columns) {
    const Libraries& l = *libraries();
    const int64_t k = shape.depth, m = shape.rows;
    const int64_t w_rows = shape.transposed ? k : columns, w_columns = shape.transposed ? columns : k;
    int code = l.layout_create(&w, shape.type, w_rows, w_columns, w_rows);
    if (!code) code = l.layout_create(&x, shape.type, k, m, k);
    if (!code) code = l.layout_create(&y, shape.result, columns, m, columns);
    return lt_status(code, "cublasLtMatrixLayoutCreate");
  }
};

class Plan {
 public:
  Plan() = default;
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;
  ~Plan() {
    if (matmul_) libraries()->matmul_destroy(matmul_);
  }

  // `joined` is the number of columns of all products of the group.
  ort::Status* make(Handle lt, const Shape& shape, int64_t joined) {
    const Libraries& l = *libraries();
    lt_ = lt, shape_ = shape;
    if (auto s = lt_status(l.matmul_create(&matmul_, kComputeFloat, kFloat), "cublasLtMatmulDescCreate")) return s;
    const int transposed = kTransposed, epilogue = kEpilogueBias;
    if (shape.transposed) l.matmul_set(matmul_, kTransA, &transposed, sizeof transposed);
    if (shape.bias) l.matmul_set(matmul_, kEpilogue, &epilogue, sizeof epilogue);
    if (auto s = layouts_.make(shape, shape.columns)) return s;
    if (auto s = propose(layouts_)) return s;
    if (joined == shape.columns) return nullptr;
    Layouts wide;  // its algorithms leave multiprocessors to the other products
    if (auto s = wide.make(shape, joined)) return s;
    propose(wide);
    return nullptr;
  }

  int proposals() const { return static_cast<int>(proposals_.size()); }

  // By the algorithm of this index. The bias is part of the descriptor: calls of one plan must not overlap on the host.
  int run(int algorithm, const void* x, const void* w, const void* bias, void* y, Address workspace, Handle stream) {
    const Libraries& l = *libraries();
    if (shape_.bias) l.matmul_set(matmul_, kBiasPointer, &bias, sizeof bias);
    const float one = 1, zero = 0;
    return l.matmul(lt_, matmul_, &one, w, layouts_.w, x, layouts_.x, &zero, y, layouts_.y, y, layouts_.y,
                    &proposals_[algorithm].algorithm, reinterpret_cast<void*>(workspace), shape_.workspace, stream);
  }

 private:
  // Adds the algorithms that cuBLASLt proposes for matrices of these sizes.
  ort::Status* propose(const Layouts& layouts) {
    const Libraries& l = *libraries();
    Handle preference = nullptr;
    if (auto s = lt_status(l.preference_create(&preference), "cublasLtMatmulPreferenceCreate")) return s;
    const uint32_t alignment = kAlignment, in_float = 3;  // partial sums are added in float
    l.preference_set(preference, kMaxWorkspace, &shape_.workspace, sizeof shape_.workspace);
    l.preference_set(preference, kReductionSchemes, &in_float, sizeof in_float);
    for (int i = 0; i < 4; ++i) l.preference_set(preference, kMinAlignmentA + i, &alignment, sizeof alignment);
    Proposal proposed[kMostAlgorithms];
    int found = 0;
    const int code = l.heuristic(lt_, matmul_, layouts.w, layouts.x, layouts.y, layouts.y, preference, kMostAlgorithms,
                                 proposed, &found);
    l.preference_destroy(preference);
    if (code || found == 0) return lt_status(code ? code : -1, "cublasLtMatmulAlgoGetHeuristic");
    proposals_.insert(proposals_.end(), proposed, proposed + found);
    return nullptr;
  }

  Handle lt_ = nullptr, matmul_ = nullptr;
  Shape shape_ = {};
  Layouts layouts_;
  std::vector<Proposal> proposals_;
};

// What products need besides their operands, for each stream of a session: streams for all but the first product, and
// workspaces. It stays, since a session that ends gives its stream to the next one.
struct Branches {
  Handle lt = nullptr, begin = nullptr, end = nullptr, forked = nullptr;
  Address workspace = 0;
  struct Branch {
    Handle stream = nullptr, joined = nullptr;
    Address workspace = 0;
  } others[kMostProducts - 1];

  ort::Status* make() {
    const Libraries& l = *libraries();
    int code = l.lt_create(&lt);
    if (!code) code = l.event_create(&begin, 0);
    if (!code) code = l.event_create(&end, 0);
    if (!code) code = l.event_create(&forked, kNoTiming);
    if (!code) code = l.allocate(&workspace, kWorkspace);
    for (auto& other : others) {
      if (!code) code = l.stream_create(&other.stream, kNonBlocking);
      if (!code) code = l.event_create(&other.joined, kNoTiming);
      if (!code) code = l.allocate(&other.workspace, kBranchWorkspace);
    }
    return lt_status(code, "preparing streams for matrix products");
  }

  static ort::Status* of(Handle stream, Branches*& found) {
    static std::mutex making;
    static std::map<Handle, std::unique_ptr<Branches>> all;
    const std::lock_guard<std::mutex> alone(making);
    auto& mine = all[stream];
    if (!mine) {
      auto made = std::make_unique<Branches>();
      if (auto s = made->make()) return s;
      mine = std::move(made);
    }
    found = mine.get();
    return nullptr;
  }
};

struct Operands {
  const void* x = nullptr;
  int count = 0;
  struct Product {
    const void* w = nullptr;
    const void* bias = nullptr;
    void* y = nullptr;
  } products[kMostProducts];
};

// Measures work of a stream with a cold cache: in a model, other layers have been in it since the last call.
class Stopwatch {
 public:
  Stopwatch(Branches& branches, Handle stream) : branches_(branches), stream_(stream) {
    failed_ = libraries()->allocate_in_stream(&flushed_, kCacheBytes, stream);
  }
  ~Stopwatch() {
    if (!failed_) libraries()->free_in_stream(flushed_, stream_);
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

  // The shortest of several calls.
  template <class F>
  int time(float& milliseconds, const F& run) {
    const Libraries& l = *libraries();
    int code = failed_ ? failed_ : run();
    milliseconds = std::numeric_limits<float>::infinity();
    for (int i = 0; i < kMeasuredCalls && !code; ++i) {
      float once = 0;
      code = l.fill(flushed_, static_cast<unsigned char>(i), kCacheBytes, stream_);
      if (!code) code = l.event_record(branches_.begin, stream_);
      if (!code) code = run();
      if (!code) code = l.event_record(branches_.end, stream_);
      if (!code) code = l.event_synchronize(branches_.end);
      if (!code) code = l.event_elapsed(&once, branches_.begin, branches_.end);
      milliseconds = std::min(milliseconds, once);
    }
    return code;
  }

 private:
  Branches& branches_;
  Handle stream_;
  Address flushed_ = 0;
  int failed_ = 0;
};

// The algorithm of each product of a group, whether they run side by side, and the milliseconds that they take.
struct Choice {
  std::vector<int> algorithms;
  bool side_by_side = false;
  float time = std::numeric_limits<float>::infinity();
};

// The products of a node for one number of rows.
class Group {
 public:
  ort::Status* make(Handle lt, const std::vector<Shape>& shapes) {
    int64_t joined = 0;
    for (const Shape& shape : shapes) joined += shape.columns;
    for (const Shape& shape : shapes) {
      key_.push_back(shape.key());
      plans_.push_back(std::make_unique<Plan>());
      if (auto s = plans_.back()->make(lt, shape, joined)) return s;
    }
    choice_.algorithms.resize(plans_.size());
    return nullptr;
  }

  ort::Status* run(const Operands& o, Branches& branches, Handle stream) {
    return lt_status(run_as(choice_, o, branches, stream), "cublasLtMatmul");
  }

  // Chooses what was measured to be fastest. What cannot be measured, as without memory to flush the cache, stays as it is.
  void measure(const Operands& o, Branches& branches, Handle stream) {
    static std::mutex measuring;
    static std::map<std::vector<Shape::Key>, Choice> known;
    const std::lock_guard<std::mutex> alone(measuring);
    const auto found = known.find(key_);
    if (found != known.end() && has(found->second)) {
      choice_ = found->second;
      return;
    }
    Stopwatch stopwatch(branches, stream);
    const auto attempt = [&](Choice tried) {
      const int code = stopwatch.time(tried.time, [&] { return run_as(tried, o, branches, stream); });
      if (code == 0 && tried.time < choice_.time) choice_ = tried;
    };
    attempt(fastest_in_turn(stopwatch, o, branches, stream));
    if (o.count > 1) try_side_by_side(attempt);
    known[key_] = choice_;
  }

 private:
  // Another GPU may have fewer algorithms.
  bool has(const Choice& choice) const {
    for (size_t i = 0; i < plans_.size(); ++i) {
      if (choice.algorithms[i] >= plans_[i]->proposals()) return false;
    }
    return true;
  }

  Choice fastest_in_turn(Stopwatch& stopwatch, const Operands& o, Branches& branches, Handle stream) {
    Choice fastest = choice_;
    for (int i = 0; i < o.count; ++i) {
      float best = std::numeric_limits<float>::infinity();
      for (int candidate = 0; candidate < plans_[i]->proposals(); ++candidate) {
        float time = 0;
        const int code =
            stopwatch.time(time, [&] { return run_one(i, candidate, o, branches.workspace, stream); });
        if (code == 0 && time < best) best = time, fastest.algorithms[i] = candidate;
      }
    }
    return fastest;
  }

  // Tries each algorithm for all products, then each for one of them.
  template <class F>
  void try_side_by_side(const F& attempt) {
    Choice tried = choice_;
    tried.side_by_side = true;
    attempt(tried);
    int most = 0;
    for (const auto& plan : plans_) most = std::max(most, plan->proposals());
    for (int candidate = 0; candidate < most; ++candidate) {
      for (size_t i = 0; i < plans_.size(); ++i) {
        tried.algorithms[i] = std::min(candidate, plans_[i]->proposals() - 1);
      }
      attempt(tried);
    }
    for (size_t i = 0; i < plans_.size() && choice_.side_by_side; ++i) {
      for (int candidate = 0; candidate < plans_[i]->proposals(); ++candidate) {
        tried = choice_;
        tried.algorithms[i] = candidate;
        attempt(tried);
      }
    }
  }

  int run_one(int i, int algorithm, const Operands& o, Address workspace, Handle stream) {
    const auto& p = o.products[i];
    return plans_[i]->run(algorithm, o.x, p.w, p.bias, p.y, workspace, stream);
  }

  int run_as(const Choice& choice, const Operands& o, Branches& branches, Handle stream) {
    const Libraries& l = *libraries();
    int code = choice.side_by_side ? l.event_record(branches.forked, stream) : 0;
    for (int i = 1; i < o.count && choice.side_by_side && !code; ++i) {
      auto& other = branches.others[i - 1];
      code = l.stream_wait(other.stream, branches.forked, 0);
      if (!code) code = run_one(i, choice.algorithms[i], o, other.workspace, other.stream);
      if (!code) code = l.event_record(other.joined, other.stream);
    }
    const int in_turn = choice.side_by_side ? 1 : o.count;
    for (int i = 0; i < in_turn && !code; ++i) {
      code = run_one(i, choice.algorithms[i], o, branches.workspace, stream);
    }
    for (int i = 1; i < o.count && choice.side_by_side && !code; ++i) {
      code = l.stream_wait(stream, branches.others[i - 1].joined, 0);
    }
    return code;
  }

  std::vector<Shape::Key> key_;
  std::vector<std::unique_ptr<Plan>> plans_;
  Choice choice_;
};

// Operands whose address is not aligned are copied; the copies are freed in stream order.
class AlignedCopies {
 public:
  explicit AlignedCopies(Handle stream) : stream_(stream) {}
  ~AlignedCopies() {
    for (Address copy : copies_) libraries()->free_in_stream(copy, stream_);
  }
  AlignedCopies(const AlignedCopies&) = delete;
  AlignedCopies& operator=(const AlignedCopies&) = delete;

  ort::Status* align(const void*& data, size_t bytes) {
    if (reinterpret_cast<uintptr_t>(data) % kAlignment == 0) return nullptr;
    const Libraries& l = *libraries();
    Address copy = 0;
    if (auto s = lt_status(l.allocate_in_stream(&copy, bytes, stream_), "cuMemAllocAsync")) return s;
    copies_.push_back(copy);
    const int code = l.copy(copy, reinterpret_cast<Address>(data), bytes, stream_);
    data = reinterpret_cast<const void*>(copy);
    return lt_status(code, "cuMemcpyDtoDAsync");
  }

 private:
  Handle stream_;
  std::vector<Address> copies_;
};

// A node: inputs x, then for each product w and, if it has one, its bias.
class Products {
 public:
  ort::Status* make(const ort::Info* info, int type, int result) {
    type_ = type, result_ = result;
    if (!libraries()) return ort::failure("libcuda or libcublasLt was not found");
    if (auto s = read(info, "transposed", transposed_)) return s;
    if (auto s = read(info, "biased", biased_)) return s;
    return transposed_.size() == biased_.size() && !biased_.empty() && biased_.size() <= kMostProducts
               ? nullptr
               : ort::failure("Products has invalid attributes");
  }

  ort::Status* run(ort::Context* context) {
    ort::Tensor x;
    if (auto s = ort::input(context, 0, x)) return s;
    if (x.rank < 1) return ort::failure("x of Products is a scalar");
    Handle stream = nullptr;
    if (auto s = ort::stream(context, &stream)) return s;
    AlignedCopies copies(stream);
    std::vector<Shape> shapes;
    Operands operands;
    if (auto s = operands_of(context, x, copies, shapes, operands)) return s;
    if (shapes[0].rows == 0) return nullptr;
    const std::lock_guard<std::mutex> alone(running_);
    Branches* branches = nullptr;
    if (auto s = Branches::of(stream, branches)) return s;
    Group* group = nullptr;
    if (auto s = group_of(shapes, operands, *branches, stream, group)) return s;
    return group->run(operands, *branches, stream);
  }

 private:
  static ort::Status* read(const ort::Info* info, const char* name, std::vector<int64_t>& values) {
    auto get = ort::call<ort::Status*(const ort::Info*, const char*, int64_t*, size_t*)>(ort::kInfoInts);
    size_t count = 0;
    if (auto s = get(info, name, nullptr, &count)) return s;
    values.resize(count);
    return get(info, name, values.data(), &count);
  }

  ort::Status* operands_of(ort::Context* context, ort::Tensor& x, AlignedCopies& copies, std::vector<Shape>& shapes,
                           Operands& operands) {
    constexpr size_t kBytes = 2;
    const int64_t depth = x.dims[x.rank - 1];
    int64_t rows = 1;
    for (size_t axis = 0; axis + 1 < x.rank; ++axis) rows *= x.dims[axis];
    operands.x = x.data;
    operands.count = static_cast<int>(biased_.size());
    if (auto s = copies.align(operands.x, rows * depth * kBytes)) return s;
    size_t next = 1;
    for (int i = 0; i < operands.count; ++i) {
      auto& product = operands.products[i];
      ort::Tensor w, bias;
      if (auto s = ort::input(context, next++, w)) return s;
      const bool transposed = transposed_[i] != 0;
      const int64_t columns = w.dims[transposed ? 0 : 1];
      if (w.rank != 2 || w.dims[transposed ? 1 : 0] != depth) return ort::failure("w of Products has another depth");
      product.w = w.data;
      if (auto s = copies.align(product.w, columns * depth * kBytes)) return s;
      if (biased_[i]) {
        if (auto s = ort::input(context, next++, bias)) return s;
        if (bias.rank != 1 || bias.dims[0] != columns) return ort::failure("a bias of Products has another size");
        product.bias = bias.data;
        if (auto s = copies.align(product.bias, columns * kBytes)) return s;
      }
      int64_t dims[ort::Tensor::kMostDims];
      std::copy(x.dims, x.dims + x.rank, dims);
      dims[x.rank - 1] = columns;
      if (auto s = ort::output(context, i, dims, x.rank, &product.y)) return s;
      const size_t workspace = i ? kBranchWorkspace : kWorkspace;
      shapes.push_back({rows, columns, depth, type_, result_, transposed, biased_[i] != 0, workspace});
    }
    return nullptr;
  }

  // The group for this number of rows. Its second call measures, unless the stream is being captured: most sizes of
  // dynamic shapes are seen once.
  ort::Status* group_of(const std::vector<Shape>& shapes, const Operands& operands, Branches& branches, Handle stream,
                        Group*& found) {
    if (groups_.size() > kMostGroups) groups_.clear();
    auto& known = groups_[shapes[0].rows];
    if (!known.group) {
      auto made = std::make_unique<Group>();
      if (auto s = made->make(branches.lt, shapes)) return s;
      known.group = std::move(made);
    } else if (!known.measured) {
      int capturing = 0;
      libraries()->stream_capturing(stream, &capturing);
      if (!capturing) {
        known.measured = true;
        known.group->measure(operands, branches, stream);
      }
    }
    found = known.group.get();
    return nullptr;
  }

  struct Known {
    std::unique_ptr<Group> group;
    bool measured = false;
  };
  int type_ = kHalf, result_ = kHalf;
  std::vector<int64_t> transposed_, biased_;
  std::mutex running_;
  std::map<int64_t, Known> groups_;
};

constexpr int kElementFloat = 1, kElementHalf = 10, kElementBfloat = 16;  // ONNX's numbers of the types
constexpr int type_of(int element) { return element == kElementFloat ? kFloat : element == kElementHalf ? kHalf : kBfloat; }

template <int kElement, int kResult>
struct ProductsOperator : ort::CustomOp {
  explicit ProductsOperator(const char* (*called)(const CustomOp*)) {
    name = called;
    provider = [](const CustomOp*) { return "CUDAExecutionProvider"; };
    input_count = [](const CustomOp*) -> size_t { return 2; };
    output_count = [](const CustomOp*) -> size_t { return 1; };
    input_type = [](const CustomOp*, size_t) { return kElement; };
    output_type = [](const CustomOp*, size_t) { return kResult; };
    input_characteristic = [](const CustomOp*, size_t i) { return i == 0 ? 0 : 2; };  // required, variadic
    output_characteristic = [](const CustomOp*, size_t) { return 2; };
    input_memory = [](const CustomOp*, size_t) { return 0; };
    variadic_input_least = variadic_output_least = [](const CustomOp*) { return 1; };
    variadic_input_homogeneous = variadic_output_homogeneous = [](const CustomOp*) { return 1; };
    create_kernel_v2 = [](const CustomOp*, const void* const*, const ort::Info* info, void** kernel) -> ort::Status* {
      try {
        auto made = std::make_unique<Products>();
        if (auto s = made->make(info, type_of(kElement), type_of(kResult))) return s;
        *kernel = made.release();
        return nullptr;
      } catch (const std::bad_alloc&) {
        return ort::failure("out of memory for a matrix product");
      }
    };
    compute_v2 = [](void* kernel, ort::Context* context) -> ort::Status* {
      try {
        return static_cast<Products*>(kernel)->run(context);
      } catch (const std::bad_alloc&) {
        return ort::failure("out of memory in a matrix product");
      }
    };
    destroy = [](void* kernel) { delete static_cast<Products*>(kernel); };
  }
};

ProductsOperator<kElementHalf, kElementHalf> products_half([](const ort::CustomOp*) { return "ProductsFloat16"; });
ProductsOperator<kElementHalf, kElementFloat> products_half_to_float([](const ort::CustomOp*) {
  return "ProductsFloat16ToFloat32";
});
ProductsOperator<kElementBfloat, kElementBfloat> products_bfloat([](const ort::CustomOp*) {
  return "ProductsBfloat16";
});
ProductsOperator<kElementBfloat, kElementFloat> products_bfloat_to_float([](const ort::CustomOp*) {
  return "ProductsBfloat16ToFloat32";
});

}  // namespace
