// The core of the device: kernels registered with torch, and the C interface for Python.

#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_ops.h>
#include <ATen/ops/as_strided_ops.h>
#include <ATen/ops/resize_ops.h>
#include <ATen/ops/view_ops.h>
#include <pthread.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/library.h>

namespace eager {
namespace {

struct Registered {
  Kernel* kernel;
  c10::RegistrationHandleRAII handle;
};

// Never freed: the device stays registered until the process exits.
auto& g_registered = *new std::vector<Registered>;
auto& g_sessions = *new std::unordered_map<int64_t, std::shared_ptr<const Session>>;
auto& g_mutex = *new std::mutex;
int64_t g_next = 1;

// In a forked child: locks may be held by threads that do not exist here, and cached plans use such threads.
void forked() {
  g_forked = true;
  new (&g_mutex) std::mutex;
  for (auto& registered : g_registered) {
    if (registered.kernel) registered.kernel->forked();
  }
}

std::shared_ptr<const Session> session_of(int64_t handle) {
  std::lock_guard lock(g_mutex);
  auto found = g_sessions.find(handle);
  TORCH_CHECK(found != g_sessions.end(), "there is no session ", handle);
  return found->second;
}

// Views read no memory, so the CPU's kernels work for them.
void redispatch_to_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}

c10::Device device_or_current(std::optional<at::Device> device) {
  const auto wanted = device && device->has_index() ? device->index() : t_current;
  TORCH_CHECK(wanted < g_devices, "there is no device ort:", int(wanted), "; add it with sardonyx.eager.set_device");
  return {kType, wanted};
}

at::Tensor new_empty(at::IntArrayRef sizes, std::optional<at::ScalarType> type, std::optional<at::Layout>,
                     std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device_or_current(device));
  auto key = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  auto wanted = type.value_or(c10::get_default_dtype_as_scalartype());
  return at::Tensor(at::detail::empty_generic(sizes, Allocator::the(), key, wanted, format));
}

at::Tensor new_empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> type,
                             std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device_or_current(device));
  auto key = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  auto wanted = type.value_or(c10::get_default_dtype_as_scalartype());
  return at::Tensor(at::detail::empty_strided_generic(sizes, strides, Allocator::the(), key, wanted));
}

at::Tensor cast(const at::Tensor& tensor, at::ScalarType type) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("sardonyx_eager::cast", "")
                             .typed<at::Tensor(const at::Tensor&, at::ScalarType)>();
  return op.call(tensor, type);
}

at::Tensor& copy(at::Tensor& to, const at::Tensor& from, bool) {
  SingleThreaded single_threaded;
  const bool same_kind = from.is_complex() == to.is_complex();
  const bool casts = from.scalar_type() != to.scalar_type() && is_on_device(from) && same_kind;
  const auto target = on_host(to), source = on_host(casts ? cast(from, to.scalar_type()) : from);
  if (!casts && is_on_device(to) && is_on_device(from) && from.storage().is_alias_of(to.storage())) {
    source.unsafeGetTensorImpl()->set_storage_keep_dtype(target.storage());  // so that torch detects the overlap
  }
  target.copy_(source);
  return to;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  at::Tensor target = to;
  copy(target, from, false);
  return to;
}

at::Scalar local_scalar(const at::Tensor& tensor) { return at::_local_scalar_dense(on_host(tensor)); }

at::Tensor& set_empty(at::Tensor& tensor) {
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, Allocator::the(), /*resizable=*/true);
  return tensor.set_(none, 0, {0}, {});
}

// Views that are called too often for boxing.
constexpr c10::DispatchKeySet kCpu(c10::DispatchKey::CPU);

at::Tensor view(const at::Tensor& tensor, c10::SymIntArrayRef sizes) {
  return at::_ops::view::redispatch(kCpu, tensor, sizes);
}

at::Tensor as_strided(const at::Tensor& tensor, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides,
                      std::optional<c10::SymInt> offset) {
  return at::_ops::as_strided::redispatch(kCpu, tensor, sizes, strides, std::move(offset));
}

at::Tensor reshape_alias(const at::Tensor& tensor, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  return at::_ops::_reshape_alias::redispatch(kCpu, tensor, sizes, strides);
}

const at::Tensor& resize(const at::Tensor& tensor, c10::SymIntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(tensor.device());  // for the allocator
  return at::_ops::resize_::redispatch(kCpu, tensor, sizes, format);
}

at::Tensor host(const at::Tensor& tensor) { return on_other_device(tensor, c10::kCPU); }

at::Tensor device(const at::Tensor& tensor, int64_t index) {
  return on_other_device(tensor, c10::Device(kType, c10::DeviceIndex(index)));
}

std::vector<at::Tensor> run(int64_t handle, const std::vector<at::Tensor>& tensors) {
  return run_session(*session_of(handle), tensors);
}

TORCH_LIBRARY(sardonyx_eager, m) {
  m.def("host(Tensor self) -> Tensor", host);
  m.def("device(Tensor self, int index) -> Tensor", device);
  m.def("run(int session, Tensor[] inputs) -> Tensor[]", run);
  m.def("cast(Tensor self, ScalarType dtype) -> Tensor");
}

// The device changes but not the memory, so conjugate and negative bits stay.
void fall_through(torch::Library& m) {
  m.impl("host", torch::CppFunction::makeFallthrough());
  m.impl("device", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(sardonyx_eager, Conjugate, m) { fall_through(m); }
TORCH_LIBRARY_IMPL(sardonyx_eager, Negative, m) { fall_through(m); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", new_empty);
  m.impl("empty_strided", new_empty_strided);
  m.impl("copy_", copy);
  m.impl("_copy_from", copy_from);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("set_", set_empty);
  m.impl("view", view);
  m.impl("as_strided", as_strided);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize);
}

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// Autograd starts a thread per device at the first backward of a process. If that ran before this device was registered,
// and there was no other device, its threads are started now: without them a backward on the device fails.
struct Autograd : torch::autograd::Engine {
  static void start_device_threads_if_needed() {
    auto& engine = get_default_engine();
    const bool started = (engine.*(&Autograd::thread_pool_shared_)) != nullptr;
    if (started && (engine.*(&Autograd::device_ready_queues_)).empty()) (engine.*(&Autograd::start_device_threads))();
  }
};

// The last error of this thread, which Python reads after a failed call.
std::string& failure() {
  static thread_local std::string message;
  return message;
}

template <class F>
int64_t guarded(F f) {
  try {
    return f();
  } catch (const c10::Error& error) {
    failure() = error.what_without_backtrace();
  } catch (const std::exception& error) {
    failure() = error.what();
  }
  return -1;
}

}  // namespace
}  // namespace eager

using namespace eager;

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED const char* sx_error() { return failure().c_str(); }

EXPORTED int64_t sx_start(const char* library, int threads) {
  return guarded([&] {
    Runtime::the().start(library, threads);
    c10::SetAllocator(kType, Allocator::the());
    if (!at::isPrivateUse1HooksRegistered()) at::RegisterPrivateUse1HooksInterface(new Hooks);
    pthread_atfork(nullptr, nullptr, forked);
    Autograd::start_device_threads_if_needed();
    return 0;
  });
}

EXPORTED void sx_set_device_count(int count) { g_devices = count; }

EXPORTED int64_t sx_current() { return t_current; }

EXPORTED void sx_set_current(int index) { t_current = c10::DeviceIndex(index); }

// kind: a Kind, or 3 for a view.
EXPORTED int64_t sx_register(const char* name, const char* overload, int kind) {
  return guarded([&]() -> int64_t {
    auto& dispatcher = c10::Dispatcher::singleton();
    auto op = dispatcher.findSchemaOrThrow(name, overload);
    c10::KernelFunction function;
    Kernel* kernel = nullptr;
    if (kind == 3) {
      function = c10::KernelFunction::makeFromBoxedFunction<&redispatch_to_cpu>();
    } else {
      const auto& returns = op.schema().returns();
      const bool returns_list = returns.size() == 1 && returns[0].type()->kind() == c10::TypeKind::ListType;
      auto functor = std::make_unique<Kernel>(op.schema(), Kind(kind), returns_list);
      kernel = functor.get();
      function = c10::KernelFunction::makeFromBoxedFunctor(std::move(functor));
    }
    auto handle = dispatcher.registerImpl(op.operator_name(), c10::DispatchKey::PrivateUse1, std::move(function),
                                          std::nullopt, nullptr, "sardonyx");
    std::lock_guard lock(g_mutex);
    g_registered.push_back({kernel, std::move(handle)});
    return g_registered.size() - 1;
  });
}

EXPORTED int64_t sx_calls(int64_t id) { return g_registered[id].kernel ? int64_t(g_registered[id].kernel->calls) : 0; }

// Clears the plans, when an operator or a device changed.
EXPORTED void sx_clear() {
  std::lock_guard lock(g_mutex);
  for (auto& registered : g_registered) {
    if (registered.kernel) registered.kernel->clear();
  }
}

EXPORTED int64_t sx_session(const void* model, int64_t bytes, const char* const* names, int inputs, int outputs,
                            const int* types, const char* const* libraries, int library_count) {
  return guarded([&] {
    std::vector<at::ScalarType> output_types;
    for (int i = 0; i < outputs; ++i) output_types.push_back(scalar_type(types[i]));
    auto session = std::make_shared<const Session>(
        model, bytes, std::vector<std::string>(names, names + inputs + outputs), std::move(output_types),
        std::vector<std::string>(libraries, libraries + library_count));
    std::lock_guard lock(g_mutex);
    g_sessions[g_next] = std::move(session);
    return g_next++;
  });
}

EXPORTED void sx_release(int64_t session) {
  std::shared_ptr<const Session> last;
  std::lock_guard lock(g_mutex);
  auto found = g_sessions.find(session);
  if (found == g_sessions.end()) return;
  last = std::move(found->second);
  g_sessions.erase(found);
}

// Offers a plan for the call that Python is running. Both sides must agree on the operator and the layouts.
EXPORTED int64_t sx_offer(const char* name, const char* overload, int64_t session, const int* inputs, int input_count,
                          const int* results, const int* mode, int result_count, const uint32_t* permutations,
                          const uint32_t* expanded, int tensor_count, int scalar_count, int elementwise) {
  return guarded([&]() -> int64_t {
    PendingCall* pending = PendingCall::t_last;
    if (!pending || pending->op.operator_name() != c10::OperatorName(name, overload)) return 0;
    if (int(pending->key.tensors.size()) != tensor_count) return 0;
    for (int i = 0; i < tensor_count; ++i) {
      const auto& layout = pending->key.tensors[i].layout;
      if (layout.permutation != permutations[i] || layout.expanded != expanded[i]) return 0;
    }
    if (scalar_count && int(pending->key.scalars.size()) != scalar_count) return 0;
    Plan plan;
    plan.session = session_of(session);
    plan.inputs.assign(inputs, inputs + input_count);
    plan.results.resize(result_count);
    for (int i = 0; i < result_count; ++i) {
      plan.results[i].output = results[i];
      plan.results[i].mode = ResultMode(mode[i]);
    }
    plan.values = std::make_unique<const ValuesCache>(plan.session->inputs + plan.session->types.size());
    plan.elementwise = elementwise;
    pending->plan = std::move(plan);
    pending->any_scalars = scalar_count > 0;
    return 1;
  });
}
