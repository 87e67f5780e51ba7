// Registers the operators of this library in torch, through C functions looked up in the loaded libtorch.
#pragma once

namespace sardonyx::torch_side {

using namespace detail;
using Handle = void*;   // of a tensor, a list, a string or a library
using Word = uint64_t;  // an argument or a result on torch's stack

// The torch version of the stack layout used here; later ones keep it.
constexpr uint64_t kAbi = uint64_t{2} << 56 | uint64_t{11} << 48;

// The functions, named without their prefix `aoti_torch_` or `torch_`.
struct Api {
  int32_t (*get_dim)(Handle, int64_t*);
  int32_t (*get_sizes)(Handle, int64_t**);
  int32_t (*get_dtype)(Handle, int32_t*);
  int32_t (*get_device_type)(Handle, int32_t*);
  int32_t (*get_device_index)(Handle, int32_t*);
  int32_t (*is_contiguous)(Handle, bool*);
  int32_t (*get_data_ptr)(Handle, void**);
  int32_t (*empty_strided)(int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, Handle*);
  int32_t (*copy_)(Handle, Handle, int32_t);
  int32_t (*delete_tensor_object)(Handle);
  int32_t (*library_init_impl)(const char*, const char*, const char*, uint32_t, Handle*);
  int32_t (*delete_library_object)(Handle);
  int32_t (*library_impl)(Handle, const char*, void (*)(Word*, uint64_t, uint64_t), uint64_t);
  int32_t (*list_size)(Handle, size_t*);
  int32_t (*list_get_item)(Handle, size_t, Word*);
  int32_t (*delete_list)(Handle);
  int32_t (*string_length)(Handle, size_t*);
  int32_t (*string_c_str)(Handle, const char**);
  int32_t (*delete_string)(Handle);
  int32_t (*parallel_for)(int64_t, int64_t, int64_t, void (*)(int64_t, int64_t, void*), void*);
  int32_t (*delete_stable_ivalue)(Word*);  // from 2.13 on
  const char* (*exception_get_what_without_backtrace)();
  int32_t (*get_current_cuda_stream)(int32_t, void**);  // if there is a GPU
  int32_t devices[2];  // the CPU, and the GPU
  int32_t dtypes[17];  // by ONNX type number; -1 if torch has none
};
inline Api g_torch;

template <class F>
bool find_function(void* library, const char* prefix, const char* name, F& function) {
  function = reinterpret_cast<F>(dlsym(library, (std::string(prefix) + name).c_str()));
  return function != nullptr;
}

// Finds the functions in a loaded library; returns the first missing name, or null.
inline const char* load(const char* path) {
  void* library = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
  if (!library) return path;
#define AOTI(name) \
  if (!find_function(library, "aoti_torch_", #name, g_torch.name)) return "aoti_torch_" #name;
#define STABLE(name) \
  if (!find_function(library, "torch_", #name, g_torch.name)) return "torch_" #name;
  AOTI(get_dim) AOTI(get_sizes) AOTI(get_dtype) AOTI(get_device_index) AOTI(is_contiguous) AOTI(get_data_ptr)
  AOTI(empty_strided) AOTI(copy_) AOTI(delete_tensor_object) AOTI(library_init_impl) AOTI(delete_library_object)
  AOTI(get_device_type)
  STABLE(library_impl) STABLE(list_size) STABLE(list_get_item) STABLE(delete_list) STABLE(string_length)
  STABLE(string_c_str) STABLE(delete_string) STABLE(parallel_for)
#undef AOTI
#undef STABLE
  find_function(library, "torch_", "delete_stable_ivalue", g_torch.delete_stable_ivalue);
  find_function(library, "torch_", "exception_get_what_without_backtrace", g_torch.exception_get_what_without_backtrace);
  static const std::pair<int, const char*> types[] = {
      {1, "float32"}, {2, "uint8"}, {3, "int8"},     {4, "uint16"},   {5, "int16"},   {6, "int32"},    {7, "int64"},
      {9, "bool"},    {10, "float16"}, {11, "float64"}, {12, "uint32"}, {13, "uint64"}, {16, "bfloat16"}};
  std::fill(std::begin(g_torch.dtypes), std::end(g_torch.dtypes), -1);
  for (auto& [type, name] : types) {
    int32_t (*number)();
    if (find_function(library, "aoti_torch_dtype_", name, number)) g_torch.dtypes[type] = number();
  }
  static const char* const devices[] = {"cpu", "cuda"};
  for (int i = 0; i < 2; ++i) {
    int32_t (*device)();
    if (!find_function(library, "aoti_torch_device_type_", devices[i], device)) return devices[i];
    g_torch.devices[i] = device();
  }
  return nullptr;
}

inline void check_status(int32_t error) {
  if (!error) return;
  auto what = g_torch.exception_get_what_without_backtrace;
  fail(what && what() && *what() ? what() : "torch failed without a message");
}

inline int type_of(Handle tensor) {
  int32_t dtype = 0;
  check_status(g_torch.get_dtype(tensor, &dtype));
  for (int type = 1; type < 17; ++type) {
    if (g_torch.dtypes[type] == dtype) return type;
  }
  return 17;
}

inline Handle empty(const int64_t* dims, int64_t rank, int32_t dtype, bool on_gpu, int32_t device_index) {
  int64_t strides[kMaxDims], step = 1;
  for (int64_t i = rank - 1; i >= 0; --i) {
    strides[i] = step;
    step *= std::max<int64_t>(dims[i], 1);
  }
  Handle made = nullptr;
  check_status(g_torch.empty_strided(rank, dims, strides, dtype, g_torch.devices[on_gpu], device_index, &made));
  return made;
}

// The arguments of a call. The kernel owns what torch puts on the stack, also after an error.
class Arguments {
 public:
  Arguments(const Operator& op, const Word* stack) : op_(op), count_(op.input_count), attributes_(op.field_count) {
    for (int k = 0; k < op.input_count + op.field_count; ++k) {
      const int place = op.order[k];
      if (place >= 0) take_tensor(op.inputs[place].kind, place, stack[k]);
      else take_attribute(op.fields[-1 - place], stack[k], attributes_[-1 - place]);
    }
  }
  ~Arguments() {
    for (int i = 0; i < std::min(count_, kMaxTensors); ++i) {
      if (tensors_[i]) g_torch.delete_tensor_object(tensors_[i]);
    }
    for (Handle text : texts_) g_torch.delete_string(text);
  }
  Arguments(const Arguments&) = delete;
  Arguments& operator=(const Arguments&) = delete;

  // Reads memory, types and sizes of the tensors; copies those that are not contiguous.
  const Instance& read() {
    if (count_ > kMaxTensors) fail("it has more than " + std::to_string(kMaxTensors) + " tensors");
    int types[kMaxTensors] = {};
    for (int i = 0; i < count_; ++i) {
      const int type = tensors_[i] ? type_of(tensors_[i]) : 0;
      if (i < op_.input_count) types[i] = type;
      else if (type != types[op_.input_count - 1]) {
        fail(std::string(op_.inputs[op_.input_count - 1].name) + " has tensors of different types");
      }
    }
    const Instance& instance = select(op_, types);
    for (int i = 0; i < count_; ++i) {
      if (tensors_[i]) check_device(i);
      if (tensors_[i]) view(tensors_[i], types[std::min(i, op_.input_count - 1)], inputs_[i]);
    }
    return instance;
  }
  const Array* inputs() const { return inputs_; }
  const Attribute* attributes() const { return attributes_.data(); }
  int64_t variadic() const {
    const bool last = op_.input_count && op_.inputs[op_.input_count - 1].kind == Kind::kVariadic;
    return last ? count_ - op_.input_count + 1 : 0;
  }
  int32_t device_index() const {
    int32_t index = -1;
    const auto* first = std::find_if(tensors_, tensors_ + count_, [](Handle tensor) { return tensor != nullptr; });
    if (first != tensors_ + count_) check_status(g_torch.get_device_index(*first, &index));
    return index;
  }

 private:
  void take_tensor(Kind kind, int place, Word word) {
    if (kind == Kind::kRequired) {
      tensors_[place] = reinterpret_cast<Handle>(word);
    } else if (kind == Kind::kOptional) {
      auto* held = reinterpret_cast<Word*>(word);
      if (!held) return;
      tensors_[place] = reinterpret_cast<Handle>(*held);
      if (g_torch.delete_stable_ivalue) g_torch.delete_stable_ivalue(held);
      else delete held;
    } else {
      auto list = reinterpret_cast<Handle>(word);
      const int64_t size = each(list, [&](int64_t i, Word item) {
        if (place + i < kMaxTensors) tensors_[place + i] = reinterpret_cast<Handle>(item);
        else g_torch.delete_tensor_object(reinterpret_cast<Handle>(item));
      });
      count_ = static_cast<int>(std::min<int64_t>(op_.input_count - 1 + size, kMaxTensors + 1));
    }
  }
  void take_attribute(const Field& field, Word word, Attribute& to) {
    switch (field.type) {
      case Type::kInt: to.i = static_cast<int64_t>(word); return;
      case Type::kBool: to.i = (word & 0xff) != 0; return;
      case Type::kFloat: to.f = narrow::same_bits<double>(word); return;
      case Type::kString: return take_text(reinterpret_cast<Handle>(word), to);
      case Type::kInts: to.ints = read_list<int64_t>(reinterpret_cast<Handle>(word), ints_); return;
      case Type::kFloats: to.floats = read_list<double>(reinterpret_cast<Handle>(word), floats_); return;
    }
  }
  void take_text(Handle text, Attribute& to) {
    size_t length = 0;
    const char* characters = "";
    g_torch.string_length(text, &length);
    g_torch.string_c_str(text, &characters);
    to.s = {characters, length};
    texts_.push_back(text);
  }
  template <class T>
  static List<T> read_list(Handle list, std::deque<std::vector<T>>& kept) {
    std::vector<T>& values = kept.emplace_back();
    each(list, [&](int64_t, Word item) { values.push_back(narrow::same_bits<T>(item)); });
    return {values.data(), static_cast<int64_t>(values.size())};
  }
  template <class F>
  static int64_t each(Handle list, const F& body) {
    size_t size = 0;
    g_torch.list_size(list, &size);
    for (size_t i = 0; i < size; ++i) {
      Word item = 0;
      g_torch.list_get_item(list, i, &item);
      body(static_cast<int64_t>(i), item);
    }
    g_torch.delete_list(list);
    return static_cast<int64_t>(size);
  }
  // torch selects the GPU's kernel if any tensor is on a GPU.
  void check_device(int i) const {
    if (!op_.on_gpu) return;
    int32_t type = 0, index = 0;
    check_status(g_torch.get_device_type(tensors_[i], &type));
    check_status(g_torch.get_device_index(tensors_[i], &index));
    if (type != g_torch.devices[1] || index != device_index()) {
      fail(std::string(op_.inputs[std::min(i, op_.input_count - 1)].name) + " is not on the same GPU as the others");
    }
  }
  void view(Handle& tensor, int type, Array& to) const {
    int64_t rank = 0, *sizes = nullptr;
    check_status(g_torch.get_dim(tensor, &rank));
    check_status(g_torch.get_sizes(tensor, &sizes));
    to.set(sizes, rank);
    bool contiguous = false;
    check_status(g_torch.is_contiguous(tensor, &contiguous));
    if (!contiguous) {
      Handle copy = empty(to.dims, rank, g_torch.dtypes[type], op_.on_gpu, device_index());
      const int32_t error = g_torch.copy_(copy, tensor, 0);
      std::swap(tensor, copy);
      g_torch.delete_tensor_object(copy);
      check_status(error);
    }
    check_status(g_torch.get_data_ptr(tensor, &to.data));
  }

  const Operator& op_;
  int count_;
  Handle tensors_[kMaxTensors] = {};
  Array inputs_[kMaxTensors];
  std::vector<Attribute> attributes_;
  std::vector<Handle> texts_;
  std::deque<std::vector<int64_t>> ints_;
  std::deque<std::vector<double>> floats_;
};

// The results of a call, owned until it succeeds.
struct Results {
  const Instance* instance;
  bool on_gpu;
  int32_t device_index;
  int count;
  Handle tensors[kMaxTensors] = {};
  Array arrays[kMaxTensors];

  ~Results() {
    for (int i = 0; i < count; ++i) {
      if (tensors[i]) g_torch.delete_tensor_object(tensors[i]);
    }
  }
  static void allocate(void* results, int index, Array& result) {
    auto* self = static_cast<Results*>(results);
    const int32_t dtype = g_torch.dtypes[self->instance->output_types[index]];
    self->tensors[index] = empty(result.dims, result.rank, dtype, self->on_gpu, self->device_index);
    check_status(g_torch.get_data_ptr(self->tensors[index], &result.data));
  }
  void release_to(Word* stack) {
    for (int i = 0; i < count; ++i) {
      stack[i] = reinterpret_cast<Word>(tensors[i]);
      tensors[i] = nullptr;
    }
  }
};

inline void parallel_for(void*, int64_t count, int64_t grain, Parallel::Range range, void* body) {
  struct Both { Parallel::Range range; void* body; } both{range, body};
  auto part = [](int64_t begin, int64_t end, void* given) {
    auto* both = static_cast<Both*>(given);
    both->range(both->body, begin, end);
  };
  check_status(g_torch.parallel_for(0, count, grain, part, &both));
}

// Returns torch's current stream, for a GPU kernel.
inline void* stream(const Operator& op, int32_t device_index) {
  void* found = nullptr;
  if (op.on_gpu) check_status(g_torch.get_current_cuda_stream(device_index, &found));
  return found;
}

inline void call_kernel(const Operator& op, Word* stack) {
  try {
    Arguments arguments(op, stack);
    const Instance& instance = arguments.read();
    Results results{&instance, op.on_gpu, arguments.device_index(), op.output_count};
    const Allocator allocator{Results::allocate, &results};
    run(op, instance,
        Call{arguments.inputs(), arguments.variadic(), results.arrays, allocator, arguments.attributes(),
             stream(op, results.device_index), parallel_for});
    results.release_to(stack);
  } catch (...) {
    throw std::runtime_error(error_message(op));
  }
}

// Registration

inline std::vector<Handle> g_libraries;

inline void unregister_kernels() {
  for (Handle library : g_libraries) g_torch.delete_library_object(library);
  g_libraries.clear();
}

// Registers the kernels for schemas that torch knows; returns what failed, or null.
inline const char* register_kernels(const char* path, const char* path_of_cuda) {
  static const char* const missing = load(path);  // once: other threads may be using the functions
  if (missing) return missing;
  void* cuda = path_of_cuda ? dlopen(path_of_cuda, RTLD_LAZY | RTLD_NOLOAD) : nullptr;
  if (cuda) find_function(cuda, "aoti_torch_", "get_current_cuda_stream", g_torch.get_current_cuda_stream);
  for (const Entry* entry : registered_entries()) {
    const Operator& op = *entry->op;
    if (op.on_gpu && !g_torch.get_current_cuda_stream) continue;
    Handle library = nullptr;
    if (g_torch.library_init_impl(entry->space, op.on_gpu ? "CUDA" : "CPU", op.qualified, 0, &library)) return op.qualified;
    g_libraries.push_back(library);
    if (g_torch.library_impl(library, op.torch_name, entry->boxed, kAbi)) return op.qualified;
  }
  return nullptr;
}

}  // namespace sardonyx::torch_side
