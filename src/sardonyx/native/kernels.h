// Shared code of generated kernels: temporary memory, and parallel work on ONNX Runtime's threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

namespace {

using namespace lanes;

struct Free {
  void operator()(void* p) const { std::free(p); }
};

template <class T>
std::unique_ptr<T[], Free> memory(int64_t count) {
  const size_t bytes = (std::max<int64_t>(count, 1) * sizeof(T) + 63) / 64 * 64;
  void* const p = std::aligned_alloc(64, bytes);
  if (!p) throw std::bad_alloc();
  return std::unique_ptr<T[], Free>(static_cast<T*>(p));
}

inline int64_t floor_divided(int64_t a, int64_t b) { return b ? a / b - (a % b != 0 && (a < 0) != (b < 0)) : 0; }
inline int64_t floor_modulo(int64_t a, int64_t b) { return a - floor_divided(a, b) * b; }
inline int64_t parts(int64_t size, int64_t chunk) { return std::max<int64_t>(1, (size + chunk - 1) / chunk); }

// Calls `body(begin, end)` over all units, with a number of tasks that fits the amount of work.
template <class F>
ort::Status* spread(const ort::Context* context, int64_t units, int64_t cost, const F& body) {
  constexpr int64_t kWorth = 1 << 14, kMost = 64;
  const int64_t tasks = std::clamp<int64_t>(units * cost / kWorth, 1, std::min(kMost, std::max<int64_t>(units, 1)));
  std::atomic<bool> lacking{false};
  auto* status = ort::parallel(context, tasks, [&](size_t task) {
    const int64_t begin = units * static_cast<int64_t>(task) / tasks;
    const int64_t end = units * (static_cast<int64_t>(task) + 1) / tasks;
    try {
      body(begin, end);
    } catch (const std::bad_alloc&) {
      lacking = true;
    }
  });
  if (!status && lacking) throw std::bad_alloc();
  return status;
}

}  // namespace
