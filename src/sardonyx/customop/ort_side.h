// Registers the operators of this library in ONNX Runtime.
#pragma once

#include <cstdlib>

namespace sardonyx::ort_side {

using namespace detail;
using ort::call;
using ort::Status;

struct Op : ort::CustomOp {  // one for each choice of types
  const Operator* op;
  const Instance* instance;
};

inline const Op& self(const ort::CustomOp* custom) { return *static_cast<const Op*>(custom); }

// Attributes

struct Values {  // attribute values, and the storage of lists and strings
  std::vector<Attribute> attributes;
  std::deque<std::string> strings;
  std::deque<std::vector<int64_t>> ints;
  std::deque<std::vector<double>> floats;

  void keep(Attribute& a, std::string text) { a.s = strings.emplace_back(std::move(text)); }
  void keep(Attribute& a, std::vector<int64_t> list) {
    const auto& kept = ints.emplace_back(std::move(list));
    a.ints = {kept.data(), static_cast<int64_t>(kept.size())};
  }
  void keep(Attribute& a, const std::vector<float>& list) {
    const auto& kept = floats.emplace_back(list.begin(), list.end());
    a.floats = {kept.data(), static_cast<int64_t>(kept.size())};
  }
};

inline std::string message_of(Status* status) {
  const std::string message = call<const char*(const Status*)>(ort::kGetErrorMessage)(status);
  ort::ignore(status);
  return message;
}

// Readers of attributes: of a kernel's node, or of a node during shape inference.
struct FromKernel {
  const ort::Info* info;

  bool number(const char* name, int64_t& to) const {
    return done(call<Status*(const ort::Info*, const char*, int64_t*)>(ort::kInfoInt)(info, name, &to));
  }
  bool number(const char* name, float& to) const {
    return done(call<Status*(const ort::Info*, const char*, float*)>(ort::kInfoFloat)(info, name, &to));
  }
  template <class T, class R>
  bool several(ort::Slot slot, const char* name, R& to) const {
    size_t size = 0;
    auto read = call<Status*(const ort::Info*, const char*, T*, size_t*)>(slot);
    if (!done(read(info, name, nullptr, &size))) return false;
    to.resize(size);
    return size == 0 || done(read(info, name, to.data(), &size));
  }
  bool list(const char* name, std::vector<int64_t>& to) const {
    std::vector<float> other;
    return several<int64_t>(ort::kInfoInts, name, to) && (!to.empty() || is_empty(ort::kInfoFloats, name, other));
  }
  bool list(const char* name, std::vector<float>& to) const {
    std::vector<int64_t> other;
    return several<float>(ort::kInfoFloats, name, to) && (!to.empty() || is_empty(ort::kInfoInts, name, other));
  }
  bool text(const char* name, std::string& to) const {
    if (!several<char>(ort::kInfoString, name, to)) return false;
    if (!to.empty() && !to.back()) to.pop_back();
    return true;
  }
  // Whether the attribute exists, of any type: ONNX Runtime reads a list of another type as empty.
  bool has(const char* name) const {
    std::vector<int64_t> values;
    return several<int64_t>(ort::kInfoInts, name, values);
  }
  // Whether an empty list is really a list: not of the other type, and not a single value.
  template <class T>
  bool is_empty(ort::Slot other, const char* name, std::vector<T>& values) const {
    int64_t i = 0;
    float f = 0;
    std::string s;
    return several<T>(other, name, values) && values.empty() && !number(name, i) && !number(name, f) && !text(name, s);
  }
  static bool done(Status* status) {
    ort::ignore(status);
    return !status;
  }
};

struct FromNode {
  const ort::ShapeContext* context;
  static constexpr int kInt = 1, kInts = 2, kFloat = 3, kFloats = 4, kString = 5;

  bool has(const char* name) const { return find(name) != nullptr; }
  const void* find(const char* name) const {
    const void* found = nullptr;
    ort::ignore(call<Status*(const ort::ShapeContext*, const char*, const void**)>(ort::kShapeAttribute)(context, name, &found));
    return found;
  }
  bool read(const void* attribute, int type, void* to, size_t bytes, size_t* needed) const {
    return FromKernel::done(call<Status*(const void*, int, void*, size_t, size_t*)>(ort::kReadAttribute)(attribute, type, to, bytes, needed));
  }
  template <class T>
  bool one(const char* name, int type, T& to) const {
    const void* found = find(name);
    size_t bytes = sizeof to;
    return found && read(found, type, &to, sizeof to, &bytes);
  }
  bool number(const char* name, int64_t& to) const { return one(name, kInt, to); }
  bool number(const char* name, float& to) const { return one(name, kFloat, to); }
  template <class R>
  bool several(const char* name, int type, R& to) const {
    const void* found = find(name);
    if (!found) return false;
    size_t bytes = 0;
    read(found, type, nullptr, 0, &bytes);  // returns the size, and an error that is ignored
    to.resize(bytes / sizeof(to[0]));
    return bytes == 0 || read(found, type, to.data(), bytes, &bytes);
  }
  bool list(const char* name, std::vector<int64_t>& to) const { return several(name, kInts, to); }
  bool list(const char* name, std::vector<float>& to) const { return several(name, kFloats, to); }
  bool text(const char* name, std::string& to) const { return several(name, kString, to); }
};

template <class From>
bool read(const From& from, const Field& field, Values& values, Attribute& to) {
  float f;
  std::string text;
  std::vector<int64_t> ints;
  std::vector<float> floats;
  switch (field.type) {
    case Type::kInt:
    case Type::kBool:
      return from.number(field.name, to.i);
    case Type::kFloat:
      if (!from.number(field.name, f)) return false;
      to.f = f;
      return true;
    case Type::kString:
      if (!from.text(field.name, text)) return false;
      values.keep(to, std::move(text));
      return true;
    case Type::kInts:
      if (!from.list(field.name, ints)) return false;
      values.keep(to, std::move(ints));
      return true;
    case Type::kFloats:
      if (!from.list(field.name, floats)) return false;
      values.keep(to, floats);
      return true;
  }
  return false;
}

inline const char* type_name(Type type) {
  static const char* const names[] = {"int", "float", "int", "string", "list of ints", "list of floats"};
  return names[static_cast<int>(type)];
}

template <class From>
void read_all(const From& from, const Operator& op, Values& values) {
  values.attributes.resize(op.field_count);
  for (int i = 0; i < op.field_count; ++i) {
    const Field& field = op.fields[i];
    values.attributes[i] = field.default_value;
    if (read(from, field, values, values.attributes[i])) continue;
    if (from.has(field.name)) fail("the attribute " + std::string(field.name) + " is not of type " + type_name(field.type));
    if (field.required) fail("the attribute " + std::string(field.name) + " is missing");
  }
}

// Kernels

struct Kernel {
  const Op* op;
  Values values;
};

inline Status* create(const ort::CustomOp* custom, const void* const*, const ort::Info* info, void** kernel) {
  const Op& op = self(custom);
  try {
    auto created = std::make_unique<Kernel>();
    created->op = &op;
    read_all(FromKernel{info}, *op.op, created->values);
    *kernel = created.release();
    return nullptr;
  } catch (...) {
    return ort::failure(error_message(*op.op).c_str());
  }
}

inline void check_status(Status* status) {
  if (status) fail(message_of(status));
}

inline void parallel_for(void* context, int64_t count, int64_t grain, Parallel::Range range, void* body) {
  constexpr int64_t kMaxTasks = 64;
  const int64_t tasks = std::min(kMaxTasks, (count + grain - 1) / grain);
  auto task = [&](size_t t) { range(body, count * t / tasks, count * (t + 1) / tasks); };
  check_status(ort::parallel(static_cast<const ort::Context*>(context), tasks, task));
}

// Returns ONNX Runtime's context for threads, or the session's stream.
inline void* runs_on(const Operator& op, ort::Context* context) {
  if (!op.on_gpu) return context;
  void* stream = nullptr;
  check_status(call<Status*(const ort::Context*, void**)>(ort::kKernelContextGetStream)(context, &stream));
  return stream;
}

inline void allocate(void* context, int index, Array& result) {
  check_status(ort::output(static_cast<ort::Context*>(context), index, result.dims, result.rank, &result.data));
}

inline Status* compute(void* given, ort::Context* context) {
  const Kernel& kernel = *static_cast<Kernel*>(given);
  const Operator& op = *kernel.op->op;
  try {
    size_t count = 0;
    check_status(call<Status*(const ort::Context*, size_t*)>(ort::kKernelContextGetInputCount)(context, &count));
    if (count > kMaxTensors) fail("it has " + std::to_string(count) + " tensors, more than " + std::to_string(kMaxTensors));
    const bool variadic = op.input_count && op.inputs[op.input_count - 1].kind == Kind::kVariadic;
    std::vector<Array> inputs(std::max<size_t>(count, op.input_count)), outputs(op.output_count);
    for (size_t i = 0; i < count; ++i) {
      ort::Tensor tensor;
      bool absent = false;
      check_status(ort::input(context, i, tensor, &absent));
      if (absent) continue;
      inputs[i].data = tensor.data;
      inputs[i].set(tensor.dims, static_cast<int64_t>(tensor.rank));
    }
    const int64_t last = variadic ? static_cast<int64_t>(count) - (op.input_count - 1) : 0;
    run(op, *kernel.op->instance,
        Call{inputs.data(), last, outputs.data(), {allocate, context}, kernel.values.attributes.data(),
             runs_on(op, context), parallel_for});
    return nullptr;
  } catch (...) {
    return ort::failure(error_message(op).c_str());
  }
}

// Shape inference

struct TypeShapeOwner {  // owns type and shape info
  ort::TypeShape* info = nullptr;

  ~TypeShapeOwner() {
    if (info) call<void(ort::TypeShape*)>(ort::kReleaseTensorTypeAndShapeInfo)(info);
  }
};

inline Sizes sizes_of(const ort::TypeShape* info) {
  size_t rank = 0;
  check_status(call<Status*(const ort::TypeShape*, size_t*)>(ort::kGetDimensionsCount)(info, &rank));
  Sizes sizes;
  sizes.rank = kUnknownRank;
  if (!rank || rank > kMaxDims) return sizes;  // ONNX Runtime reports an unknown rank as 0
  int64_t dims[kMaxDims] = {};
  const char* names[kMaxDims] = {};
  check_status(call<Status*(const ort::TypeShape*, int64_t*, size_t)>(ort::kGetDimensions)(info, dims, rank));
  check_status(call<Status*(const ort::TypeShape*, const char**, size_t)>(ort::kGetSymbolicDimensions)(info, names, rank));
  sizes.rank = static_cast<int64_t>(rank);
  for (size_t i = 0; i < rank; ++i) {
    sizes.dims[i] = dims[i] >= 0 ? Number(dims[i]) : Number::unknown(names[i] && *names[i] ? names[i] : nullptr);
  }
  return sizes;
}

inline int type_of(const ort::TypeShape* info) {
  int type = 0;
  check_status(call<Status*(const ort::TypeShape*, int*)>(ort::kGetTensorElementType)(info, &type));
  return type;
}

inline void set_output_shape(ort::ShapeContext* context, const Op& op, int type, int index, const Sizes& sizes) {
  static std::atomic<int> unnamed{0};
  if (sizes.rank == kUnknownRank) return;
  TypeShapeOwner output;
  check_status(call<Status*(ort::TypeShape**)>(ort::kCreateTensorTypeAndShapeInfo)(&output.info));
  check_status(call<Status*(ort::TypeShape*, int)>(ort::kSetTensorElementType)(output.info, type));
  int64_t dims[kMaxDims] = {};
  const char* names[kMaxDims] = {};
  std::deque<std::string> generated;
  for (int64_t i = 0; i < sizes.rank; ++i) {
    dims[i] = sizes.dims[i].known ? sizes.dims[i].value : -1;
    if (sizes.dims[i].known && dims[i] < 0) return;
    names[i] = sizes.dims[i].name ? sizes.dims[i].name : "";
    if (dims[i] < 0 && !*names[i]) {
      names[i] = generated.emplace_back("_" + std::string(op.op->name) + "_" + std::to_string(unnamed++)).c_str();
    }
  }
  check_status(call<Status*(ort::TypeShape*, const int64_t*, size_t)>(ort::kSetDimensions)(output.info, dims, sizes.rank));
  check_status(call<Status*(ort::TypeShape*, const char**, size_t)>(ort::kSetSymbolicDimensions)(output.info, names, sizes.rank));
  check_status(call<Status*(const ort::ShapeContext*, size_t, const ort::TypeShape*)>(ort::kShapeSetOutput)(context, index, output.info));
}

// Errors are left to the kernel: ONNX Runtime ignores them here.
inline Status* infer(const ort::CustomOp* custom, ort::ShapeContext* context) {
  const Op& op = self(custom);
  try {
    size_t count = 0;
    check_status(call<Status*(const ort::ShapeContext*, size_t*)>(ort::kShapeInputCount)(context, &count));
    if (count > kMaxTensors) return nullptr;
    std::vector<Sizes> inputs(std::max<size_t>(count, op.op->input_count)), outputs(op.op->output_count);
    int types[kMaxTensors] = {};
    for (size_t i = 0; i < inputs.size(); ++i) {
      ort::TypeShape* info = nullptr;
      if (i < count) check_status(call<Status*(const ort::ShapeContext*, size_t, ort::TypeShape**)>(ort::kShapeInput)(context, i, &info));
      inputs[i].rank = kAbsent;
      if (!info) continue;
      inputs[i] = sizes_of(info);
      types[i] = type_of(info);
    }
    Values values;
    read_all(FromNode{context}, *op.op, values);
    const bool variadic = op.op->input_count && op.op->inputs[op.op->input_count - 1].kind == Kind::kVariadic;
    const int64_t last = variadic ? static_cast<int64_t>(count) - (op.op->input_count - 1) : 0;
    op.op->shapes(inputs.data(), last, values.attributes.data(), outputs.data());
    const Instance& instance = select(*op.op, types);  // ONNX Runtime always calls the first instance
    for (int i = 0; i < op.op->output_count; ++i) set_output_shape(context, op, instance.output_types[i], i, outputs[i]);
  } catch (...) {
  }
  return nullptr;
}

inline void fill(Op& custom_op, const Operator& op, const Instance& instance) {
  custom_op.op = &op;
  custom_op.instance = &instance;
  custom_op.name = [](const ort::CustomOp* c) { return self(c).op->name; };
  custom_op.provider = [](const ort::CustomOp* c) {
    return self(c).op->on_gpu ? "CUDAExecutionProvider" : "CPUExecutionProvider";
  };
  custom_op.input_count = [](const ort::CustomOp* c) { return static_cast<size_t>(self(c).op->input_count); };
  custom_op.output_count = [](const ort::CustomOp* c) { return static_cast<size_t>(self(c).op->output_count); };
  custom_op.input_type = [](const ort::CustomOp* c, size_t i) { return self(c).instance->input_types[i]; };
  custom_op.output_type = [](const ort::CustomOp* c, size_t i) { return self(c).instance->output_types[i]; };
  custom_op.input_characteristic = [](const ort::CustomOp* c, size_t i) {
    return static_cast<int>(self(c).op->inputs[i].kind);
  };
  custom_op.output_characteristic = [](const ort::CustomOp*, size_t) { return 0; };
  custom_op.input_memory = [](const ort::CustomOp*, size_t) { return 0; };
  custom_op.variadic_input_least = [](const ort::CustomOp*) { return 0; };
  custom_op.variadic_input_homogeneous = [](const ort::CustomOp*) { return 1; };
  custom_op.variadic_output_least = [](const ort::CustomOp*) { return 1; };
  custom_op.variadic_output_homogeneous = [](const ort::CustomOp*) { return 1; };
  custom_op.create_kernel_v2 = create;
  custom_op.compute_v2 = compute;
  custom_op.destroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  custom_op.infer_shapes = infer;
  custom_op.start_version = [](const ort::CustomOp* c) { return self(c).op->version; };
  custom_op.end_version = [](const ort::CustomOp*) { return 0x7fffffff; };
}

// Before 1.24, ONNX Runtime crashes in shape inference of a node without an optional tensor.
inline bool can_infer_shapes(const Operator& op, const char* version) {
  const auto optional = [](const Parameter& p) { return p.kind == Kind::kOptional; };
  const char* minor = std::strchr(version, '.');
  const bool old = std::atoi(version) == 1 && minor && std::atoi(minor + 1) < 24;
  return !old || std::none_of(op.inputs, op.inputs + op.input_count, optional);
}

// Domains and operators live as long as the process: sessions refer to them.
inline Status* add(ort::SessionOptions* options, const ort::ApiBase* base) {
  static std::mutex mutex;
  static std::deque<Op> ops;
  static std::deque<std::pair<std::string, ort::Domain*>> domains;
  std::lock_guard<std::mutex> lock(mutex);
  ort::g_api = base->get_api(ort::kVersion);
  if (ops.empty()) {
    for (const Entry* entry : registered_entries()) {
      const Operator& op = *entry->op;
      auto found = std::find_if(domains.begin(), domains.end(), [&](auto& d) { return d.first == op.domain; });
      if (found == domains.end()) {
        ort::Domain* domain = nullptr;
        if (auto s = call<Status*(const char*, ort::Domain**)>(ort::kCreateCustomOpDomain)(op.domain, &domain)) return s;
        found = domains.insert(domains.end(), {op.domain, domain});
      }
      for (int i = 0; i < op.instance_count; ++i) {
        fill(ops.emplace_back(), op, op.instances[i]);
        if (!can_infer_shapes(op, base->version())) ops.back().infer_shapes = nullptr;
        if (auto s = call<Status*(ort::Domain*, const ort::CustomOp*)>(ort::kCustomOpDomainAdd)(found->second, &ops.back())) return s;
      }
    }
  }
  for (auto& domain : domains) {
    if (auto s = ort::add_domain(options, domain.second)) return s;
  }
  return nullptr;
}

}  // namespace sardonyx::ort_side
