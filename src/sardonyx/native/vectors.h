// Vector-matrix products with constant weights, as in autoregressive decoding. Each weight is used once, so reading them
// takes the time: they are packed once, when the kernel is created, to be read sequentially and in few pages. Memory in
// huge pages is read up to twice as fast.
#pragma once

#include <sys/mman.h>

namespace {

// Memory shared by several weights, freed with the last of them.
class Pages {
 public:
  explicit Pages(size_t bytes) : size_((bytes + kLarge - 1) / kLarge * kLarge) {
    void* const p = mmap(nullptr, size_ + kLarge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    start_ = p;
    free_ = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(p) + kLarge - 1) / kLarge * kLarge);
    end_ = free_ + size_;
#if defined(MADV_HUGEPAGE)
    madvise(free_, size_, MADV_HUGEPAGE);  // optional: only affects speed
#endif
  }
  ~Pages() { munmap(start_, size_ + kLarge); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  // Allocates, in partly used pages if there is room.
  static std::shared_ptr<char> take(size_t bytes) {
    static std::mutex taking;
    static std::weak_ptr<Pages> last;
    bytes = (bytes + 63) / 64 * 64;
    const std::lock_guard<std::mutex> alone(taking);
    auto pages = last.lock();
    if (!pages || static_cast<size_t>(pages->end_ - pages->free_) < bytes) {
      last = pages = std::make_shared<Pages>(std::max(bytes, kChunk));
    }
    char* const taken = pages->free_;
    pages->free_ += bytes;
    return std::shared_ptr<char>(pages, taken);
  }

 private:
  static constexpr size_t kLarge = size_t{2} << 20, kChunk = 8 * kLarge;
  size_t size_;
  void* start_;
  char *free_, *end_;
};

// Weights in panels of W columns: for each k the W weights, padded with zeros.
template <class In>
struct Weights {
  static constexpr int W = 4 * kNative;
  std::shared_ptr<char> memory;
  int64_t depth = 0;

  const In* panel(int64_t i) const { return reinterpret_cast<const In*>(memory.get()) + i * W * depth; }

  void take(const In* from, const Axes& columns, const Axes& deep) {
    const int64_t many = columns.size();
    depth = deep.size();
    memory = Pages::take(parts(many, W) * W * std::max<int64_t>(depth, 1) * sizeof(In));
    std::vector<int64_t> column(many), k(depth);
    columns.offsets(0, many, &Axes::Axis::right, column.data());
    deep.offsets(0, depth, &Axes::Axis::right, k.data());
    In* to = reinterpret_cast<In*>(memory.get());
    for (int64_t first = 0; first < many; first += W, to += W * depth) {
      const int64_t here = std::min<int64_t>(W, many - first);
      for (int64_t j = 0; j < depth; ++j) {
        for (int64_t i = 0; i < here; ++i) to[j * W + i] = from[column[first + i] + k[j]];
        std::memset(static_cast<void*>(to + j * W + here), 0, (W - here) * sizeof(In));
      }
    }
  }
};

template <class In, class Out>
struct VectorProduct {
  using T = typename Computed<In>::type;
  static constexpr int W = Weights<In>::W;
  const Weights<In>& weights;
  const In* left;
  Out* out;
  Axes columns, depth;

  int64_t units() const { return columns.size() ? parts(columns.size(), W) : 0; }
  int64_t cost() const { return W * std::max<int64_t>(depth.size(), 1) / 4; }

  void run(int64_t begin, int64_t end) const {
    const int64_t deep = depth.size();
    std::unique_ptr<T[], Free> copy;
    const T* x = as_it_is();
    if (!x) {
      copy = memory<T>(deep);
      const auto k = memory<int64_t>(deep);
      depth.offsets(0, deep, &Axes::Axis::left, k.get());
      for (int64_t i = 0; i < deep; ++i) copy[i] = wide(left[k[i]]);
      x = copy.get();
    }
    int64_t to[W];
    for (int64_t unit = begin; unit < end; ++unit) {
      const auto sum = dot(weights.panel(unit), x, deep);
      const int64_t here = std::min<int64_t>(W, columns.size() - unit * W);
      columns.offsets(unit * W, here, &Axes::Axis::out, to);
      if (here == W && in_order(to, W)) put(out + to[0], sum);
      else for (int64_t i = 0; i < here; ++i) out[to[i]] = stored<Out>(sum[i]);
    }
  }

  // The row in place, if it is contiguous and of the type of the computation.
  const T* as_it_is() const {
    if constexpr (!std::is_same_v<In, T>) return nullptr;
    else return depth.count == 1 && depth.axis[0].left == 1 ? left : nullptr;
  }

  // Two independent sums, to hide latency.
  static Pack<T, W> dot(const In* __restrict weights, const T* __restrict x, int64_t deep) {
    Pack<T, W> even = all<Pack<T, W>>(T{}), odd = even;
    constexpr int kAhead = 8192 / sizeof(In);
    int64_t k = 0;
    for (; k + 1 < deep; k += 2, weights += 2 * W) {
      for (int i = 0; i < 2 * W; i += 64 / sizeof(In)) __builtin_prefetch(weights + kAhead + i);
      even = even + row<W>(weights) * x[k];
      odd = odd + row<W>(weights + W) * x[k + 1];
    }
    if (k < deep) even = even + row<W>(weights) * x[k];
    return even + odd;
  }
};

}  // namespace
