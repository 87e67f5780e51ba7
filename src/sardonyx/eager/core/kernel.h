// Operators as torch's dispatcher calls them: a call that looks like one before runs the session that was kept for it,
// any other goes to Python, which may leave a session behind.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

namespace eager {

constexpr auto kInPython = c10::DispatchKey::PrivateUse2;  // where Python's kernels are registered

// A tensor over what ONNX Runtime allocated.
inline at::Tensor taken(ort::Value* value, at::ScalarType type, c10::Device device) {
  c10::DataPtr owner(nullptr, value, [](void* held) { release(static_cast<ort::Value*>(held)); }, device);
  ort::Tensor found;
  check(ort::read(value, found));
  size_t bytes = at::elementSize(type);
  for (size_t i = 0; i < found.rank; ++i) bytes *= found.dims[i];
  auto* deleter = owner.get_deleter();
  c10::DataPtr memory(found.data, owner.release_context(), deleter, device);
  return over(std::move(memory), bytes, device, type, {found.dims, found.rank});
}

// A session by itself, over the CPU's tensors.
inline std::vector<at::Tensor> run_session(const Session& session, const std::vector<at::Tensor>& tensors) {
  TORCH_CHECK(tensors.size() == session.inputs, "a session takes ", session.inputs, " tensors, and got ", tensors.size());
  Values values(session.inputs + session.types.size());
  std::vector<at::Tensor> ordered, made;
  for (size_t i = 0; i < session.inputs; ++i) {
    const auto& tensor = ordered.emplace_back(tensors[i].contiguous());
    void* data = const_cast<void*>(tensor.const_data_ptr());
    values.put(i, {data, tensor.sizes().data(), size_t(tensor.dim()), tensor.scalar_type()});
  }
  session.run(values);
  for (size_t i = 0; i < session.types.size(); ++i) {
    made.push_back(taken(values.take(session.inputs + i), session.types[i], c10::kCPU));
  }
  return made;
}

// Whose memory a result is in: ONNX Runtime's, or torch's; the former may be seen with other sizes.
enum class How : int { kAsGiven, kSized, kReshaped };

struct Result {
  int output = -1;  // of the session; less than none for a result that was not asked for
  How how = How::kAsGiven;
  c10::SmallVector<int64_t, 6> sizes;
};

// How calls of one look run.
struct Plan {
  c10::SmallVector<uint64_t, 16> words;  // what they look like
  std::shared_ptr<const Session> session;
  std::vector<int> inputs;  // which leaf each is; counted down from -1, which number
  std::vector<Result> results;
  std::unique_ptr<const Spare> spare;
  bool elementwise = false;  // an element is read before it is written, so operands may lie where results go
};

// A call that has been handed to Python, which may say how the next like it is to run.
struct Asked {
  const c10::OperatorHandle& op;
  const Look& look;
  std::optional<Plan> plan;
  bool for_any_number = false;
  Asked* before;

  static inline thread_local Asked* t_last = nullptr;

  Asked(const c10::OperatorHandle& called, const Look& of) : op(called), look(of), before(t_last) { t_last = this; }
  Asked(const Asked&) = delete;
  ~Asked() { t_last = before; }
};

enum class Kind : int { kFunctional, kInPlace, kOut };

class Kernel final : public c10::OperatorKernel {
 public:
  std::atomic<uint64_t> calls{0};

  Kernel(const c10::FunctionSchema& schema, Kind kind, bool listed)
      : kind_(kind), listed_(listed), count_(schema.arguments().size()), returns_(schema.returns().size()) {
    for (size_t i = 0; i < count_; ++i) {
      const auto* alias = schema.arguments()[i].alias_info();
      if (alias && alias->isWrite()) written_.push_back(i);
    }
  }

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    calls.fetch_add(1, std::memory_order_relaxed);
    thread_local Look look;
    const c10::IValue* arguments = stack->data() + stack->size() - count_;
    const bool known = look.of(arguments, count_);
    if (known) {
      const uint64_t hash = look.hash(), valid = Recent::g_valid;
      Recent& recent = Recent::of(hash);
      auto plan = recent.is_of(this, valid) && is_for(*recent.plan, look) ? std::move(recent.plan) : nullptr;
      if (!plan) plan = find(look, hash);
      if (plan && fits(*plan, *stack)) {
        run(*plan, look, op, stack);
        recent = {this, std::move(plan), valid};
        return;
      }
    }
    auto asked_look = std::make_unique<Look>(known ? look : Look());  // the next call on this thread has another
    Asked asked(op, *asked_look);
    op.redispatchBoxed(c10::DispatchKeySet(kInPython), stack);
    if (known && asked.plan) keep(std::move(*asked.plan), asked.for_any_number, *asked_look, *stack);
  }

  void clear() {
    std::unique_lock lock(mutex_);
    kept_.clear();
    Recent::g_valid.fetch_add(1);
  }

  // In a child process: forget what is kept without freeing it, for sessions wait for their threads.
  void forked() {
    new (&mutex_) std::shared_mutex;
    (new std::unordered_map<uint64_t, Shared>)->swap(kept_);
    Recent::g_valid.fetch_add(1);
  }

 private:
  using Shared = std::shared_ptr<const Plan>;

  // What a thread called last: looking there takes no lock. Taken out while it runs, so that no other call has it.
  struct Recent {
    const Kernel* kernel = nullptr;
    Shared plan;
    uint64_t valid = 0;

    static inline std::atomic<uint64_t> g_valid{0};  // counts how often plans were forgotten

    bool is_of(const Kernel* other, uint64_t now) const { return kernel == other && plan && valid == now; }

    static Recent& of(uint64_t hash) {
      thread_local Recent all[64];
      return all[hash % std::size(all)];
    }
  };
  static constexpr size_t kMost = 4096;

  const Kind kind_;
  const bool listed_;  // results are one list
  const size_t count_, returns_;
  c10::SmallVector<size_t, 2> written_;
  std::shared_mutex mutex_;
  // Never freed: torch's dispatcher is, at the end of the process, when ONNX Runtime may be gone.
  std::unordered_map<uint64_t, Shared>& kept_ = *new std::unordered_map<uint64_t, Shared>;
  std::atomic<bool> any_number_{false};

  static bool is_for(const Plan& plan, const Look& look) {
    return plan.words.size() == look.words.size() && std::equal(plan.words.begin(), plan.words.end(), look.words.begin());
  }

  Shared find(const Look& look, uint64_t hash) {
    if (auto plan = exactly(look, hash)) return plan;
    if (!any_number_.load(std::memory_order_relaxed) || look.numbers.empty()) return nullptr;
    Look loose = look;
    loose.without_numbers();
    return exactly(loose, loose.hash());
  }

  Shared exactly(const Look& look, uint64_t hash) {
    std::shared_lock lock(mutex_);
    auto found = kept_.find(hash);
    return found != kept_.end() && is_for(*found->second, look) ? found->second : nullptr;
  }

  void keep(Plan plan, bool for_any_number, Look& look, const torch::jit::Stack& stack) {
    if (kind_ != Kind::kFunctional && (plan.results.size() != written_.size() || returns_ != written_.size())) return;
    if (!learn_sizes(plan, stack)) return;
    if (for_any_number) {
      look.without_numbers();
      any_number_ = true;
    }
    plan.words.assign(look.words.begin(), look.words.end());
    auto kept = std::make_shared<const Plan>(std::move(plan));
    std::unique_lock lock(mutex_);
    if (kept_.size() >= kMost) kept_.clear();
    kept_[look.hash()] = std::move(kept);
  }

  // What Python returned tells the sizes that the next results have.
  bool learn_sizes(Plan& plan, const torch::jit::Stack& stack) {
    std::vector<at::Tensor> found;
    if (listed_) {
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
      if (!is_ours(found[i]) || !same) return false;
      result.sizes.assign(found[i].sizes().begin(), found[i].sizes().end());
    }
    return true;
  }

  // Whether the tensors to be written have the sizes of the results: they may be empty, and are resized by Python then.
  bool fits(const Plan& plan, const torch::jit::Stack& stack) const {
    for (size_t i = 0; i < written_.size(); ++i) {
      if (plan.results[i].how == How::kAsGiven) return false;
      if (!is_ours(target_of(i, stack))) return false;  // which Python refuses
      if (target_of(i, stack).sizes() != at::IntArrayRef(plan.results[i].sizes)) return false;
    }
    return true;
  }

  void run(const Plan& plan, const Look& look, const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    const Session& session = *plan.session;
    Spare::Lent lent(*plan.spare);
    Values& values = *lent;
    c10::SmallVector<at::Tensor, 2> kept;  // copies that live as long as the call
    feed(plan, look, values, kept);
    c10::SmallVector<at::Tensor, 2> made(plan.results.size());
    c10::SmallVector<bool, 2> straight(plan.results.size());
    for (size_t i = 0; i < made.size(); ++i) {
      const auto& result = plan.results[i];
      if (result.output < 0) continue;
      const auto type = session.types[result.output];
      if (kind_ == Kind::kFunctional) {
        if (result.how == How::kSized) made[i] = empty(result.sizes, type);
      } else {
        const auto& target = target_of(i, *stack);
        straight[i] = result.how == How::kSized && target.is_contiguous() && target.scalar_type() == type &&
                      is_free(plan, look, target);
        if (straight[i]) made[i] = target;
      }
      const size_t place = session.inputs + result.output;
      if (made[i].defined()) {
        values.put(place, {made[i].mutable_data_ptr(), made[i].sizes().data(), size_t(made[i].dim()), type});
      } else {
        values.drop(place);  // what the last call wrote to is not to be written to again
      }
    }
    try {
      session.run(values);
    } catch (const c10::Error& error) {
      TORCH_CHECK(false, toString(op.operator_name()), ": ", error.what_without_backtrace());
    }
    for (size_t i = 0; i < made.size(); ++i) {
      const int output = plan.results[i].output;
      if (output < 0 || made[i].defined()) continue;
      made[i] = taken(values.take(session.inputs + output), session.types[output], ours());
      if (plan.results[i].how == How::kReshaped) made[i].unsafeGetTensorImpl()->set_sizes_contiguous(plan.results[i].sizes);
    }
    give_back(made, straight, stack);
  }

  void feed(const Plan& plan, const Look& look, Values& values, c10::SmallVector<at::Tensor, 2>& kept) {
    for (size_t i = 0; i < plan.inputs.size(); ++i) {
      if (plan.inputs[i] < 0) {
        auto* number = const_cast<double*>(&look.numbers[-1 - plan.inputs[i]]);
        values.put(i, {number, nullptr, 0, at::kDouble});
        continue;
      }
      const Leaf& leaf = look.leaves[plan.inputs[i]];
      const at::Tensor* tensor = leaf.tensor;
      if (leaf.layout.copied) {
        Alone alone;
        kept.push_back(on_host(*tensor).contiguous());
        tensor = &kept.back();
      }
      const auto& sizes = leaf.layout.sizes;
      void* data = const_cast<void*>(tensor->const_data_ptr());
      values.put(i, {data, sizes.data(), sizes.size(), tensor->scalar_type()});
    }
  }

  const at::Tensor& target_of(size_t i, const torch::jit::Stack& stack) const {
    return stack[stack.size() - count_ + written_[i]].toTensor();
  }

  // Whether results may be written to a tensor while operands are read. Both lie in order.
  bool is_free(const Plan& plan, const Look& look, const at::Tensor& target) const {
    const char* begin = static_cast<const char*>(target.const_data_ptr());
    const char* end = begin + target.nbytes();
    for (int input : plan.inputs) {
      if (input < 0) continue;
      const Leaf& leaf = look.leaves[input];
      if (leaf.layout.copied) continue;
      const char* data = static_cast<const char*>(leaf.tensor->const_data_ptr());
      if (data >= end || data + leaf.bytes() <= begin) continue;
      const bool same = data == begin && data + leaf.bytes() == end && leaf.tensor->is_contiguous() &&
                        leaf.tensor->sizes() == target.sizes();
      if (!plan.elementwise || !same) return false;
    }
    return true;
  }

  void give_back(c10::SmallVector<at::Tensor, 2>& made, const c10::SmallVector<bool, 2>& straight, torch::jit::Stack* stack) {
    if (kind_ == Kind::kFunctional) {
      torch::jit::drop(*stack, count_);
      if (listed_) {
        stack->emplace_back(c10::List<at::Tensor>(at::ArrayRef<at::Tensor>(made)));
      } else {
        for (auto& tensor : made) stack->emplace_back(std::move(tensor));
      }
      return;
    }
    c10::SmallVector<at::Tensor, 2> targets;
    for (size_t i = 0; i < made.size(); ++i) {
      targets.push_back(target_of(i, *stack));
      if (!straight[i] && made[i].defined()) targets[i].copy_(made[i]);
    }
    torch::jit::drop(*stack, count_);
    for (size_t i = 0; i < returns_; ++i) stack->emplace_back(std::move(targets[i]));
  }
};

}  // namespace eager
