// ONNX Runtime's C API for custom operators, as indices into its function table.
//
// The table only grows, so a library for version 18 runs in every later onnxruntime. Nothing is linked: the library gets
// the table when it is loaded.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>

namespace ort {

struct Status;
struct TypeShape;
struct Value;
struct Domain;
struct Context;
struct Info;
struct ShapeContext;
struct SessionOptions;

constexpr uint32_t kVersion = 18;

enum Slot : int {
  kCreateStatus = 0,
  kGetErrorMessage = 2,
  kCreateCustomOpDomain = 26,
  kCustomOpDomainAdd = 27,
  kAddCustomOpDomain = 28,
  kGetTensorMutableData = 51,
  kCreateTensorTypeAndShapeInfo = 57,
  kSetTensorElementType = 58,
  kSetDimensions = 59,
  kGetTensorElementType = 60,
  kGetDimensionsCount = 61,
  kGetDimensions = 62,
  kGetSymbolicDimensions = 63,
  kGetTensorTypeAndShape = 65,
  kInfoFloat = 85,
  kInfoInt = 86,
  kInfoString = 87,
  kKernelContextGetInputCount = 88,
  kKernelContextGetInput = 90,
  kKernelContextGetOutput = 91,
  kReleaseStatus = 93,
  kReleaseTensorTypeAndShapeInfo = 99,
  kReleaseAllocator = 132,
  kInfoFloats = 162,
  kInfoInts = 163,
  kKernelContextGetStream = 193,
  kInfoConstantInput = 249,
  kShapeInputCount = 267,
  kShapeInput = 268,
  kShapeAttribute = 269,
  kShapeSetOutput = 270,
  kSetSymbolicDimensions = 271,
  kReadAttribute = 272,
  kKernelContextParallelFor = 274,
  kInfoAllocator = 278,
};

struct ApiBase {
  const void* const* (*get_api)(uint32_t version);
  const char* (*version)();
};

inline const void* const* g_api = nullptr;

template <class Signature>
Signature* call(Slot slot) {
  return reinterpret_cast<Signature*>(const_cast<void*>(g_api[slot]));
}

// OrtCustomOp: a version, then functions in this order.
struct CustomOp {
  uint32_t version = kVersion;
  void* (*create_kernel)(const CustomOp*, const void* const* api, const Info*) = nullptr;
  const char* (*name)(const CustomOp*) = nullptr;
  const char* (*provider)(const CustomOp*) = nullptr;
  int (*input_type)(const CustomOp*, size_t) = nullptr;
  size_t (*input_count)(const CustomOp*) = nullptr;
  int (*output_type)(const CustomOp*, size_t) = nullptr;
  size_t (*output_count)(const CustomOp*) = nullptr;
  void (*compute)(void* kernel, Context*) = nullptr;
  void (*destroy)(void* kernel) = nullptr;
  int (*input_characteristic)(const CustomOp*, size_t) = nullptr;
  int (*output_characteristic)(const CustomOp*, size_t) = nullptr;
  int (*input_memory)(const CustomOp*, size_t) = nullptr;
  int (*variadic_input_least)(const CustomOp*) = nullptr;
  int (*variadic_input_homogeneous)(const CustomOp*) = nullptr;
  int (*variadic_output_least)(const CustomOp*) = nullptr;
  int (*variadic_output_homogeneous)(const CustomOp*) = nullptr;
  Status* (*create_kernel_v2)(const CustomOp*, const void* const* api, const Info*, void** kernel) = nullptr;
  Status* (*compute_v2)(void* kernel, Context*) = nullptr;
  Status* (*infer_shapes)(const CustomOp*, ShapeContext*) = nullptr;
  int (*start_version)(const CustomOp*) = nullptr;
  int (*end_version)(const CustomOp*) = nullptr;
  size_t (*may_inplace)(int**, int**) = nullptr;
  void (*release_may_inplace)(int*, int*) = nullptr;
  size_t (*alias_map)(int**, int**) = nullptr;
  void (*release_alias_map)(int*, int*) = nullptr;
};

// OrtAllocator: a version, then functions in this order.
struct Allocator {
  uint32_t version;
  void* (*alloc)(Allocator*, size_t);
  void (*free)(Allocator*, void*);
};

inline Status* failure(const char* message) { return call<Status*(int, const char*)>(kCreateStatus)(1, message); }

inline void ignore(Status* status) {
  if (status) call<void(Status*)>(kReleaseStatus)(status);
}

inline Status* make_domain(const char* name, const CustomOp* const* operators, size_t count, Domain** domain) {
  if (auto s = call<Status*(const char*, Domain**)>(kCreateCustomOpDomain)(name, domain)) return s;
  for (size_t i = 0; i < count; ++i) {
    if (auto s = call<Status*(Domain*, const CustomOp*)>(kCustomOpDomainAdd)(*domain, operators[i])) return s;
  }
  return nullptr;
}

inline Status* add_domain(SessionOptions* options, Domain* domain) {
  return call<Status*(SessionOptions*, Domain*)>(kAddCustomOpDomain)(options, domain);
}

// A tensor of a call: its memory and sizes.
struct Tensor {
  static constexpr int kMostDims = 16;
  void* data = nullptr;
  int64_t dims[kMostDims] = {};
  size_t rank = 0;
};

inline Status* read(const Value* value, Tensor& tensor) {
  TypeShape* shape = nullptr;
  if (auto s = call<Status*(const Value*, TypeShape**)>(kGetTensorTypeAndShape)(value, &shape)) return s;
  ignore(call<Status*(const TypeShape*, size_t*)>(kGetDimensionsCount)(shape, &tensor.rank));
  Status* status = nullptr;
  if (tensor.rank > Tensor::kMostDims) {
    status = failure("a tensor has too many dimensions");
  } else {
    status = call<Status*(const TypeShape*, int64_t*, size_t)>(kGetDimensions)(shape, tensor.dims, tensor.rank);
  }
  call<void(TypeShape*)>(kReleaseTensorTypeAndShapeInfo)(shape);
  if (status) return status;
  return call<Status*(Value*, void**)>(kGetTensorMutableData)(const_cast<Value*>(value), &tensor.data);
}

// An absent optional input leaves the tensor unchanged.
inline Status* input(const Context* context, size_t index, Tensor& tensor, bool* absent = nullptr) {
  const Value* value = nullptr;
  if (auto s = call<Status*(const Context*, size_t, const Value**)>(kKernelContextGetInput)(context, index, &value)) return s;
  if (absent && (*absent = !value)) return nullptr;
  return read(value, tensor);
}

// Reads a constant input while a kernel is created.
inline Status* constant(const Info* info, size_t index, Tensor& tensor) {
  int is_constant = 0;
  const Value* value = nullptr;
  auto get = call<Status*(const Info*, size_t, int*, const Value**)>(kInfoConstantInput);
  if (auto s = get(info, index, &is_constant, &value)) return s;
  return is_constant && value ? read(value, tensor) : failure("weights of a native kernel are not constants of the model");
}

inline Status* output(Context* context, size_t index, const int64_t* dims, size_t rank, void** data) {
  Value* value = nullptr;
  auto get = call<Status*(Context*, size_t, const int64_t*, size_t, Value**)>(kKernelContextGetOutput);
  if (auto s = get(context, index, dims, rank, &value)) return s;
  return call<Status*(Value*, void**)>(kGetTensorMutableData)(value, data);
}

// Returns the allocator of a kernel's memory on its device, to be released.
inline Status* allocator(const Info* info, Allocator** found) {
  constexpr int kDefault = 0;
  return call<Status*(const Info*, int, Allocator**)>(kInfoAllocator)(info, kDefault, found);
}
inline void release(Allocator* allocator) { call<void(Allocator*)>(kReleaseAllocator)(allocator); }

// Returns the GPU stream of a call.
inline Status* stream(const Context* context, void** found) {
  return call<Status*(const Context*, void**)>(kKernelContextGetStream)(context, found);
}

// Calls `body(task)` for every task, on ONNX Runtime's threads.
template <class F>
Status* parallel(const Context* context, size_t tasks, const F& body) {
  if (tasks <= 1) {
    if (tasks) body(size_t{0});
    return nullptr;
  }
  auto run = [](void* given, size_t task) { (*static_cast<const F*>(given))(task); };
  auto each = call<Status*(const Context*, void (*)(void*, size_t), size_t, size_t, void*)>(kKernelContextParallelFor);
  return each(context, run, tasks, 0, const_cast<F*>(&body));
}

}  // namespace ort
