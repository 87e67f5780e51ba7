// Kernels that torch's dispatcher calls: a call whose key is cached runs its session directly; any other goes to Python,
// which may offer a session for later calls.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

namespace eager {

constexpr auto kPythonKey = c10::DispatchKey::PrivateUse2;  // where the Python kernels are registered

// Returns a tensor that owns a value allocated by ONNX Runtime.
inline at::Tensor from_ort(ort::Value* value, at::ScalarType type, c10::Device device) {
  c10::DataPtr owner(nullptr, value, [](void* held) { release(static_cast<ort::Value*>(held)); }, device);
  ort::Tensor found;
  check(ort::read(value, found));
  size_t bytes = at::elementSize(type);
  for (size_t i = 0; i < found.rank; ++i) bytes *= found.dims[i];
  auto* deleter = owner.get_deleter();
  c10::DataPtr memory(found.data, owner.release_context(), deleter, device);
  return tensor_over(std::move(memory), bytes, device, type, {found.dims, found.rank});
}

// Runs a session with CPU tensors.
inline std::vector<at::Tensor> run_session(const Session& session, const std::vector<at::Tensor>& tensors) {
  TORCH_CHECK(tensors.size() == session.inputs, "the session takes ", session.inputs, " tensors, got ", tensors.size());
  Values values(session.inputs + session.types.size());
  std::vector<at::Tensor> contiguous, results;
  for (size_t i = 0; i < session.inputs; ++i) {
    const auto& tensor = contiguous.emplace_back(tensors[i].contiguous());
    void* data = const_cast<void*>(tensor.const_data_ptr());
    values.put(i, {data, tensor.sizes().data(), size_t(tensor.dim()), tensor.scalar_type()});
  }
  session.run(values);
  for (size_t i = 0; i < session.types.size(); ++i) {
    results.push_back(from_ort(values.take(session.inputs + i), session.types[i], c10::kCPU));
}
  return results;
}

// Who allocates a result: ONNX Runtime, torch because the shape is static, or ONNX Runtime with a reshape after.
enum class ResultMode : int { kAsReturned, kStaticShape, kReshaped };

struct Result {
  int output = -1;  // output index of the session; negative for a result that is not requested
  ResultMode mode = ResultMode::kAsReturned;
  c10::SmallVector<int64_t, 6> sizes;
};

// How calls with one key run.
struct Plan {
  c10::SmallVector<uint64_t, 16> words;  // the key
  std::shared_ptr<const Session> session;
  std::vector<int> inputs;  // index of a tensor, or -1 - index of a scalar
  std::vector<Result> results;
  std::unique_ptr<const ValuesCache> values;
  bool elementwise = false;  // results may overwrite operands: each element is read before it is written
};

// A call running in Python, which may offer a plan for later calls with its key.
struct PendingCall {
  const c10::OperatorHandle& op;
  const CallKey& key;
  std::optional<Plan> plan;
  bool any_scalars = false;
  PendingCall* before;

  static inline thread_local PendingCall* t_last = nullptr;

  PendingCall(const c10::OperatorHandle& called, const CallKey& call_key) : op(called), key(call_key), before(t_last) {
    t_last = this;
  }
  PendingCall(const PendingCall&) = delete;
  ~PendingCall() { t_last = before; }
};

enum class Kind : int { kFunctional, kInPlace, kOut };

class Kernel final : public c10::OperatorKernel {
 public:
  std::atomic<uint64_t> calls{0};

  Kernel(const c10::FunctionSchema& schema, Kind kind, bool returns_list)
      : kind_(kind), returns_list_(returns_list), count_(schema.arguments().size()), returns_(schema.returns().size()) {
    for (size_t i = 0; i < count_; ++i) {
      const auto* alias = schema.arguments()[i].alias_info();
      if (alias && alias->isWrite()) written_.push_back(i);
    }
  }

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    calls.fetch_add(1, std::memory_order_relaxed);
    thread_local CallKey key;
    const c10::IValue* arguments = stack->data() + stack->size() - count_;
    const bool known = key.set(arguments, count_);
    if (known) {
      const uint64_t hash = key.hash(), generation = Recent::g_generation;
      Recent& recent = Recent::slot(hash);
      auto plan = recent.matches(this, generation) && has_key(*recent.plan, key) ? std::move(recent.plan) : nullptr;
      if (!plan) plan = find(key, hash);
      if (plan && fits(*plan, *stack)) {
        run(*plan, key, op, stack);
        recent = {this, std::move(plan), generation};
        return;
      }
    }
    auto pending_key = std::make_unique<CallKey>(known ? key : CallKey());  // nested calls overwrite `key`
    PendingCall pending(op, *pending_key);
    op.redispatchBoxed(c10::DispatchKeySet(kPythonKey), stack);
    if (known && pending.plan) keep(std::move(*pending.plan), pending.any_scalars, *pending_key, *stack);
  }

  void clear() {
    std::unique_lock lock(mutex_);
    plans_.clear();
    Recent::g_generation.fetch_add(1);
  }

  // In a forked child: drop the plans without freeing them, since sessions would wait for their threads.
  void forked() {
    new (&mutex_) std::shared_mutex;
    (new std::unordered_map<uint64_t, Shared>)->swap(plans_);
    Recent::g_generation.fetch_add(1);
  }

 private:
  using Shared = std::shared_ptr<const Plan>;

  // Plans that this thread used last, looked up without a lock. Moved out while running, so that no nested call uses it.
  struct Recent {
    const Kernel* kernel = nullptr;
    Shared plan;
    uint64_t generation = 0;

    static inline std::atomic<uint64_t> g_generation{0};  // incremented when plans are cleared

    bool matches(const Kernel* other, uint64_t now) const { return kernel == other && plan && generation == now; }

    static Recent& slot(uint64_t hash) {
      thread_local Recent all[64];
      return all[hash % std::size(all)];
    }
  };
  static constexpr size_t kMaxPlans = 4096;

  const Kind kind_;
  const bool returns_list_;  // the result is one list of tensors
  const size_t count_, returns_;
  c10::SmallVector<size_t, 2> written_;
  std::shared_mutex mutex_;
  // Never freed: torch destroys the dispatcher at exit, when ONNX Runtime may be unloaded already.
  std::unordered_map<uint64_t, Shared>& plans_ = *new std::unordered_map<uint64_t, Shared>;
  std::atomic<bool> any_scalars_{false};

  static bool has_key(const Plan& plan, const CallKey& key) {
    return plan.words.size() == key.words.size() && std::equal(plan.words.begin(), plan.words.end(), key.words.begin());
  }

  Shared find(const CallKey& key, uint64_t hash) {
    if (auto plan = find_exact(key, hash)) return plan;
    if (!any_scalars_.load(std::memory_order_relaxed) || key.scalars.empty()) return nullptr;
    CallKey any_key = key;
    any_key.clear_scalars();
    return find_exact(any_key, any_key.hash());
  }

  Shared find_exact(const CallKey& key, uint64_t hash) {
    std::shared_lock lock(mutex_);
    auto found = plans_.find(hash);
    return found != plans_.end() && has_key(*found->second, key) ? found->second : nullptr;
  }

  void keep(Plan plan, bool any_scalars, CallKey& key, const torch::jit::Stack& stack) {
    if (kind_ != Kind::kFunctional && (plan.results.size() != written_.size() || returns_ != written_.size())) return;
    if (!record_sizes(plan, stack)) return;
    if (any_scalars) {
      key.clear_scalars();
      any_scalars_ = true;
    }
    plan.words.assign(key.words.begin(), key.words.end());
    auto shared = std::make_shared<const Plan>(std::move(plan));
    std::unique_lock lock(mutex_);
    if (plans_.size() >= kMaxPlans) plans_.clear();
    plans_[key.hash()] = std::move(shared);
  }

  // Takes the static result sizes from what Python returned.
  bool record_sizes(Plan& plan, const torch::jit::Stack& stack) {
    std::vector<at::Tensor> found;
    if (returns_list_) {
      found = stack.back().toTensorVector();
    } else {
      for (size_t i = stack.size() - returns_; i < stack.size(); ++i) {
        if (!stack[i].isTensor()) return false;
        found.push_back(stack[i].toTensor());
      }
    }
    if (found.size() != plan.results.size()) return false;
    for (size_t i = 0; i < found.size(); ++i) {
      auto& result = plan.results[i];
      if (found[i].defined() != (result.output >= 0)) return false;
      if (result.output < 0) continue;
      const bool same = kind_ != Kind::kFunctional || found[i].scalar_type() == plan.session->types[result.output];
      if (!is_on_device(found[i]) || !same) return false;
      result.sizes.assign(found[i].sizes().begin(), found[i].sizes().end());
    }
    return true;
  }

  // Whether the written tensors have the sizes of the results; Python resizes empty ones.
  bool fits(const Plan& plan, const torch::jit::Stack& stack) const {
    for (size_t i = 0; i < written_.size(); ++i) {
      if (plan.results[i].mode == ResultMode::kAsReturned) return false;
      if (!is_on_device(target_of(i, stack))) return false;  // Python raises the error
      if (target_of(i, stack).sizes() != at::IntArrayRef(plan.results[i].sizes)) return false;
    }
    return true;
  }

  void run(const Plan& plan, const CallKey& key, const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    const Session& session = *plan.session;
    ValuesCache::Lease lease(*plan.values);
    Values& values = *lease;
    c10::SmallVector<at::Tensor, 2> copies;  // alive until the session has run
    feed(plan, key, values, copies);
    c10::SmallVector<at::Tensor, 2> results(plan.results.size());
    c10::SmallVector<bool, 2> in_place(plan.results.size());
    for (size_t i = 0; i < results.size(); ++i) {
      const auto& result = plan.results[i];
      if (result.output < 0) continue;
      const auto type = session.types[result.output];
      if (kind_ == Kind::kFunctional) {
        if (result.mode == ResultMode::kStaticShape) results[i] = empty(result.sizes, type);
      } else {
        const auto& target = target_of(i, *stack);
        in_place[i] = result.mode == ResultMode::kStaticShape && target.is_contiguous() &&
                      target.scalar_type() == type && can_write_to(plan, key, target);
        if (in_place[i]) results[i] = target;
      }
      const size_t slot = session.inputs + result.output;
      if (results[i].defined()) {
        values.put(slot, {results[i].mutable_data_ptr(), results[i].sizes().data(), size_t(results[i].dim()), type});
      } else {
        values.drop(slot);  // must not write to the last call's output again
      }
    }
    try {
      session.run(values);
    } catch (const c10::Error& error) {
      TORCH_CHECK(false, toString(op.operator_name()), ": ", error.what_without_backtrace());
    }
    for (size_t i = 0; i < results.size(); ++i) {
      const int output = plan.results[i].output;
      if (output < 0 || results[i].defined()) continue;
      results[i] = from_ort(values.take(session.inputs + output), session.types[output], first_device());
      if (plan.results[i].mode != ResultMode::kReshaped) continue;
      results[i].unsafeGetTensorImpl()->set_sizes_contiguous(plan.results[i].sizes);
    }
    return_results(results, in_place, stack);
  }

  void feed(const Plan& plan, const CallKey& key, Values& values, c10::SmallVector<at::Tensor, 2>& copies) {
    for (size_t i = 0; i < plan.inputs.size(); ++i) {
      if (plan.inputs[i] < 0) {
        auto* number = const_cast<double*>(&key.scalars[-1 - plan.inputs[i]]);
        values.put(i, {number, nullptr, 0, at::kDouble});
        continue;
      }
      const TensorArgument& argument = key.tensors[plan.inputs[i]];
      const at::Tensor* tensor = argument.tensor;
      if (argument.layout.needs_copy) {
        SingleThreaded single_threaded;
        copies.push_back(on_host(*tensor).contiguous());
        tensor = &copies.back();
      }
      const auto& sizes = argument.layout.sizes;
      void* data = const_cast<void*>(tensor->const_data_ptr());
      values.put(i, {data, sizes.data(), sizes.size(), tensor->scalar_type()});
    }
  }

  const at::Tensor& target_of(size_t i, const torch::jit::Stack& stack) const {
    return stack[stack.size() - count_ + written_[i]].toTensor();
  }

  // Whether results may be written to a tensor while operands are read. Both are contiguous.
  bool can_write_to(const Plan& plan, const CallKey& key, const at::Tensor& target) const {
    const char* begin = static_cast<const char*>(target.const_data_ptr());
    const char* end = begin + target.nbytes();
    for (int input : plan.inputs) {
      if (input < 0) continue;
      const TensorArgument& argument = key.tensors[input];
      if (argument.layout.needs_copy) continue;
      const char* data = static_cast<const char*>(argument.tensor->const_data_ptr());
      if (data >= end || data + argument.bytes() <= begin) continue;
      const bool same = data == begin && data + argument.bytes() == end && argument.tensor->is_contiguous() &&
                        argument.tensor->sizes() == target.sizes();
      if (!plan.elementwise || !same) return false;
    }
    return true;
  }

  void return_results(c10::SmallVector<at::Tensor, 2>& results, const c10::SmallVector<bool, 2>& in_place,
                      torch::jit::Stack* stack) {
    if (kind_ == Kind::kFunctional) {
      torch::jit::drop(*stack, count_);
      if (returns_list_) {
        stack->emplace_back(c10::List<at::Tensor>(at::ArrayRef<at::Tensor>(results)));
      } else {
        for (auto& tensor : results) stack->emplace_back(std::move(tensor));
      }
      return;
    }
    c10::SmallVector<at::Tensor, 2> targets;
    for (size_t i = 0; i < results.size(); ++i) {
      targets.push_back(target_of(i, *stack));
      if (!in_place[i] && results[i].defined()) targets[i].copy_(results[i]);
    }
    torch::jit::drop(*stack, count_);
    for (size_t i = 0; i < returns_; ++i) stack->emplace_back(std::move(targets[i]));
  }
};

}  // namespace eager
