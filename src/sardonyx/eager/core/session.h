// ONNX Runtime sessions over torch's memory, with one thread pool for all sessions.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>
#include <dlfcn.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

namespace ort {

struct Env;
struct Threading;
struct Session;
struct RunOptions;
struct MemoryInfo;

constexpr Slot kCreateSessionFromArray = Slot(8);
constexpr Slot kRun = Slot(9);
constexpr Slot kCreateSessionOptions = Slot(10);
constexpr Slot kDisableMemPattern = Slot(17);
constexpr Slot kSetSessionLogSeverityLevel = Slot(22);
constexpr Slot kSetIntraOpNumThreads = Slot(24);
constexpr Slot kRegisterCustomOpsLibrary = Slot(29);
constexpr Slot kCreateRunOptions = Slot(39);
constexpr Slot kCreateTensorWithData = Slot(49);
constexpr Slot kCreateCpuMemoryInfo = Slot(69);
constexpr Slot kReleaseSession = Slot(95);
constexpr Slot kReleaseValue = Slot(96);
constexpr Slot kReleaseSessionOptions = Slot(100);
constexpr Slot kCreateEnvWithGlobalThreadPools = Slot(119);
constexpr Slot kDisablePerSessionThreads = Slot(120);
constexpr Slot kCreateThreadingOptions = Slot(121);
constexpr Slot kReleaseThreadingOptions = Slot(122);
constexpr Slot kAddSessionConfigEntry = Slot(130);
constexpr Slot kSetGlobalIntraOpNumThreads = Slot(147);
constexpr Slot kSetGlobalInterOpNumThreads = Slot(148);
constexpr Slot kSetGlobalSpinControl = Slot(149);

}  // namespace ort

namespace eager {

inline void check(ort::Status* status) {
  if (!status) return;
  std::string message = ort::call<const char*(const ort::Status*)>(ort::kGetErrorMessage)(status);
  ort::ignore(status);
  TORCH_CHECK(false, "onnxruntime: ", message);
}


// Whether this process is a forked child: the thread pool does not exist here, so sessions run on the calling thread.
inline bool g_forked = false;

// A singleton: ONNX Runtime allows one environment per process.
struct Runtime {
  ort::Env* env = nullptr;
  ort::SessionOptions* options = nullptr;
  ort::RunOptions* run = nullptr;
  ort::MemoryInfo* memory = nullptr;

  static Runtime& the() {
    static Runtime runtime;
    return runtime;
  }

  void start(const char* library, int threads) {
    void* opened = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    TORCH_CHECK(opened, "cannot open onnxruntime's library: ", dlerror());
    auto base = reinterpret_cast<const ort::ApiBase* (*)()>(dlsym(opened, "OrtGetApiBase"));
    TORCH_CHECK(base, "onnxruntime's library lacks OrtGetApiBase");
    ort::g_api = base()->get_api(ort::kVersion);
    TORCH_CHECK(ort::g_api, "onnxruntime ", base()->version(), " lacks version ", ort::kVersion, " of its interface");
    using ort::Status;
    ort::Threading* pool = nullptr;
    check(ort::call<Status*(ort::Threading**)>(ort::kCreateThreadingOptions)(&pool));
    check(ort::call<Status*(ort::Threading*, int)>(ort::kSetGlobalIntraOpNumThreads)(pool, threads));
    check(ort::call<Status*(ort::Threading*, int)>(ort::kSetGlobalInterOpNumThreads)(pool, 1));
    check(ort::call<Status*(ort::Threading*, int)>(ort::kSetGlobalSpinControl)(pool, 0));
    auto make = ort::call<Status*(int, const char*, const ort::Threading*, ort::Env**)>(ort::kCreateEnvWithGlobalThreadPools);
    check(make(kErrors, "sardonyx", pool, &env));
    ort::call<void(ort::Threading*)>(ort::kReleaseThreadingOptions)(pool);
    check(ort::call<Status*(ort::RunOptions**)>(ort::kCreateRunOptions)(&run));
    check(ort::call<Status*(int, int, ort::MemoryInfo**)>(ort::kCreateCpuMemoryInfo)(kDeviceAllocator, kDefault, &memory));
  }

 private:
  static constexpr int kErrors = 3, kDeviceAllocator = 0, kDefault = 0;
};

inline int element_type(at::ScalarType type) {
  switch (type) {
    case at::kFloat: return 1;
    case at::kByte: return 2;
    case at::kChar: return 3;
    case at::kUInt16: return 4;
    case at::kShort: return 5;
    case at::kInt: return 6;
    case at::kLong: return 7;
    case at::kBool: return 9;
    case at::kHalf: return 10;
    case at::kDouble: return 11;
    case at::kUInt32: return 12;
    case at::kUInt64: return 13;
    case at::kBFloat16: return 16;
    default: return 0;
  }
}

inline at::ScalarType scalar_type(int element) {
  for (int i = 0; i < int(at::ScalarType::NumOptions); ++i) {
    if (element_type(at::ScalarType(i)) == element) return at::ScalarType(i);
  }
  TORCH_CHECK(false, "torch has no dtype for the ONNX type ", element);
}

// A tensor's memory, sizes and type.
struct TensorView {
  void* data;
  const int64_t* sizes;
  size_t rank;
  at::ScalarType type;
};

inline void release(ort::Value* value) { ort::call<void(ort::Value*)>(ort::kReleaseValue)(value); }

inline ort::Value* make_value(const TensorView& view) {
  size_t count = 1;
  for (size_t axis = 0; axis < view.rank; ++axis) count *= view.sizes[axis];
  TORCH_CHECK(!count || view.data, "a tensor has no memory: its storage was resized to 0 bytes");
  static char empty;
  ort::Value* value = nullptr;
  using Make = ort::Status*(const ort::MemoryInfo*, void*, size_t, const int64_t*, size_t, int, ort::Value**);
  check(ort::call<Make>(ort::kCreateTensorWithData)(Runtime::the().memory, count ? view.data : &empty,
                                                    count * at::elementSize(view.type), view.sizes, view.rank,
                                                    element_type(view.type), &value));
  return value;
}

// The inputs of a session, then its outputs. Values own no memory and are reused if the address is the same, for calls
// whose sizes and types are always the same.
class Values {
 public:
  explicit Values(size_t count) : values_(count, nullptr), addresses_(count, nullptr) {}
  Values(const Values&) = delete;
  ~Values() {
    for (auto* value : values_) {
      if (value) release(value);
    }
  }

  ort::Value** data() { return values_.data(); }

  void drop(size_t i) {
    if (auto* old = take(i)) release(old);
  }

  void put(size_t i, const TensorView& view) {
    if (values_[i] && addresses_[i] == view.data) return;
    drop(i);
    values_[i] = make_value(view);
    addresses_[i] = view.data;
  }

  // Outputs that are null when a session runs are allocated by ONNX Runtime, and must be taken.
  ort::Value* take(size_t i) { return std::exchange(values_[i], nullptr); }

 private:
  c10::SmallVector<ort::Value*, 4> values_;
  c10::SmallVector<void*, 4> addresses_;
};

// Caches the values of the last call, for one call at a time; concurrent calls create their own.
class ValuesCache {
 public:
  explicit ValuesCache(size_t count) : count_(count) {}
  ValuesCache(const ValuesCache&) = delete;
  ~ValuesCache() { delete cached_.load(); }

  class Lease {
   public:
    explicit Lease(const ValuesCache& cache) : cache_(cache), values_(cache.cached_.exchange(nullptr)) {
      if (!values_) values_ = new Values(cache.count_);
    }
    Lease(const Lease&) = delete;
    ~Lease() { delete cache_.cached_.exchange(values_); }
    Values& operator*() { return *values_; }

   private:
    const ValuesCache& cache_;
    Values* values_;
  };

 private:
  const size_t count_;
  mutable std::atomic<Values*> cached_{nullptr};
};

class Session {
 public:
  const std::vector<at::ScalarType> types;  // of the outputs
  const size_t inputs;

  Session(const void* model, size_t bytes, std::vector<std::string> names, std::vector<at::ScalarType> output_types,
          const std::vector<std::string>& libraries)
      : types(std::move(output_types)), inputs(names.size() - types.size()), names_(std::move(names)) {
    for (const auto& name : names_) pointers_.push_back(name.c_str());
    using ort::Status;
    ort::SessionOptions* options = nullptr;
    check(ort::call<Status*(ort::SessionOptions**)>(ort::kCreateSessionOptions)(&options));
    std::unique_ptr<ort::SessionOptions, void (*)(ort::SessionOptions*)> freed(
        options, ort::call<void(ort::SessionOptions*)>(ort::kReleaseSessionOptions));
    if (g_forked) {
      check(ort::call<Status*(ort::SessionOptions*, int)>(ort::kSetIntraOpNumThreads)(options, 1));
    } else {
      check(ort::call<Status*(ort::SessionOptions*)>(ort::kDisablePerSessionThreads)(options));
    }
    check(ort::call<Status*(ort::SessionOptions*)>(ort::kDisableMemPattern)(options));
    check(ort::call<Status*(ort::SessionOptions*, int)>(ort::kSetSessionLogSeverityLevel)(options, 3));
    // One rewrite rounds the scale of a double product to float.
    using Configure = Status*(ort::SessionOptions*, const char*, const char*);
    check(ort::call<Configure>(ort::kAddSessionConfigEntry)(options, "optimization.disable_specified_optimizers",
                                                            "MatMulScaleFusion"));
    for (const auto& library : libraries) {
      void* handle = nullptr;
      using Load = Status*(ort::SessionOptions*, const char*, void**);
      check(ort::call<Load>(ort::kRegisterCustomOpsLibrary)(options, library.c_str(), &handle));
    }
    using Make = Status*(const ort::Env*, const void*, size_t, const ort::SessionOptions*, ort::Session**);
    check(ort::call<Make>(ort::kCreateSessionFromArray)(Runtime::the().env, model, bytes, options, &session_));
  }
  Session(const Session&) = delete;
  ~Session() { ort::call<void(ort::Session*)>(ort::kReleaseSession)(session_); }

  void run(Values& values) const {
    using Run = ort::Status*(ort::Session*, const ort::RunOptions*, const char* const*, const ort::Value* const*, size_t,
                             const char* const*, size_t, ort::Value**);
    check(ort::call<Run>(ort::kRun)(session_, Runtime::the().run, pointers_.data(), values.data(), inputs,
                                    pointers_.data() + inputs, types.size(), values.data() + inputs));
  }

 private:
  ort::Session* session_ = nullptr;
  std::vector<std::string> names_;  // of the inputs, then of the outputs
  std::vector<const char*> pointers_;
};

}  // namespace eager
