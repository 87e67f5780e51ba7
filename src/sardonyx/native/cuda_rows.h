// Shared code of GPU kernels: functions, reductions over the threads of a row, launches, and temporary memory.
#pragma once

#include <algorithm>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#ifndef SARDONYX_MOST_THREADS
#define SARDONYX_MOST_THREADS 512
#endif

namespace lanes {

template <class V> LANES_INLINE V absolute(const V& a) {
  if constexpr (std::is_unsigned_v<ScalarOf<V>>) return a;
  else if constexpr (std::is_floating_point_v<ScalarOf<V>>) return each(a, [](auto x) { return std::fabs(x); });
  else return select(less(a, V{}), V(-a), a);
}
template <class V> LANES_INLINE V exponential(const V& a) { return each(a, [](auto x) { return std::exp(x); }); }
template <class V> LANES_INLINE V logarithm(const V& a) { return each(a, [](auto x) { return std::log(x); }); }
template <class V> LANES_INLINE V log_one_plus(const V& a) { return each(a, [](auto x) { return std::log1p(x); }); }
template <class V> LANES_INLINE V hyperbolic_tangent(const V& a) { return each(a, [](auto x) { return std::tanh(x); }); }
template <class V> LANES_INLINE V error_function(const V& a) { return each(a, [](auto x) { return std::erf(x); }); }
template <class V> LANES_INLINE V sigmoid(const V& a) {
  return each(a, [](auto x) { return decltype(x){1} / (decltype(x){1} + std::exp(-x)); });
}

}  // namespace lanes

namespace {

using namespace lanes;

__host__ __device__ inline int64_t floor_divided(int64_t a, int64_t b) {
  return b ? a / b - (a % b != 0 && (a < 0) != (b < 0)) : 0;
}
__host__ __device__ inline int64_t floor_modulo(int64_t a, int64_t b) { return a - floor_divided(a, b) * b; }

// Reductions. A row belongs to a team: the threads of a block that have the same `threadIdx.y`. Teams of less than a
// warp are a power of two. Adjacent rows belong to threads with different `threadIdx.x`; those with the same one share a
// row.

constexpr int kMostThreads = SARDONYX_MOST_THREADS, kWarp = kMostThreads < 32 ? kMostThreads : 32;

template <class T>
__device__ T shuffled(T v, int by) {
  const unsigned width = blockDim.x < kWarp ? blockDim.x : kWarp;
  const unsigned thread = threadIdx.y * blockDim.x + threadIdx.x;
  const unsigned team = (width == 32 ? ~0u : (1u << width) - 1) << (thread % 32 / width * width);
  return static_cast<T>(__shfl_xor_sync(team, v, by, width));
}

// Reduces over all threads of a team; each of them gets the result.
template <class How, class T>
__device__ T together(T v) {
  for (int by = (blockDim.x < kWarp ? blockDim.x : kWarp) / 2; by > 0; by /= 2) v = How::join(v, shuffled(v, by));
  if (blockDim.x <= kWarp) return v;
  __shared__ T parts[kMostThreads / kWarp];
  __syncthreads();  // other threads may still read the previous values
  if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = v;
  __syncthreads();
  v = parts[0];
  for (unsigned part = 1; part < blockDim.x / kWarp; ++part) v = How::join(v, parts[part]);
  return v;
}
// The same for threads that share one of several adjacent rows.
template <class How, class T>
__device__ T across(T v) {
  if (blockDim.y == 1) return v;
  __shared__ T parts[kMostThreads];
  __syncthreads();
  parts[threadIdx.y * blockDim.x + threadIdx.x] = v;
  __syncthreads();
  v = parts[threadIdx.x];
  for (unsigned part = 1; part < blockDim.y; ++part) v = How::join(v, parts[part * blockDim.x + threadIdx.x]);
  return v;
}

// Reduction within a thread. Long float sums are accumulated in blocks, so that the error does not grow with their
// length.
template <class How, class T, int W, bool kLong>
struct Total {
  static constexpr bool kPutBy = kLong && std::is_same_v<How, Sum> && std::is_same_v<T, float>;
  Of<T, W> many = How::template start<Of<T, W>>();
  double before = 0;
  int added = 0;
  LANES_INLINE void operator()(const Of<T, W>& v) {
    many = How::join(many, v);
    if constexpr (kPutBy) {
      if (++added < 128) return;
      before += folded();
      many = How::template start<Of<T, W>>();
      added = 0;
    }
  }
  LANES_INLINE T folded() const {
    T r = lane(many, 0);
#pragma unroll
    for (int l = 1; l < W; ++l) r = How::join(r, static_cast<T>(lane(many, l)));
    return r;
  }
  LANES_INLINE T total() const {
    if constexpr (kPutBy) return static_cast<T>(before + folded());
    else return folded();
  }
};

// A row in registers, K pieces of W lanes per thread, kept from one sweep to the next. Rows that are too long are read
// from memory again.
template <class T, int W, int K>
struct Pieces { Of<T, W> pieces[K]; };
template <class T, int W>
struct Pieces<T, W, 0> {};

template <int K, class H, class V>
LANES_INLINE V keep(H& held, int piece, const V& v) {
  if constexpr (K > 0) held.pieces[piece] = v;
  return v;
}
template <int K, class H, class F>
LANES_INLINE auto again(const H& held, int piece, const F& read) {
  if constexpr (K > 0) return held.pieces[piece];
  else return read();
}

// Calls `body(piece, index)` for the elements of a row that belong to this thread.
template <int W, int K, class I, class F>
LANES_INLINE void swept(I size, const F& body) {
  const I first = static_cast<I>(threadIdx.x) * W, step = static_cast<I>(blockDim.x) * W;
  if constexpr (K == 0) {
    for (I place = first; place < size; place += step) body(0, place);
  } else {
#pragma unroll
    for (int piece = 0; piece < K; ++piece) {
      const I place = first + piece * step;
      if (place < size) body(piece, place);
    }
  }
}

// Launches

inline ort::Status* checked(cudaError_t error) {
  return error == cudaSuccess ? nullptr : ort::failure(cudaGetErrorString(error));
}

template <class Call>
ort::Status* launched(void (*kernel)(Call), dim3 grid, dim3 block, cudaStream_t stream, Call call) {
  void* arguments[] = {&call};
  return checked(cudaLaunchKernel(kernel, grid, block, arguments, 0, stream));
}

constexpr int64_t kMostBlocks = 0x7fffffff;  // grid-stride loops cover the rest

inline int64_t parts(int64_t size, int64_t of) { return (size + of - 1) / of; }
inline unsigned blocks(int64_t wanted) { return static_cast<unsigned>(std::min(wanted, kMostBlocks)); }
inline int64_t power_of_two(int64_t least) {
  int64_t found = 1;
  while (found < least) found *= 2;
  return found;
}

template <class T>
bool is_aligned(const T* p, int lanes) {
  return reinterpret_cast<uintptr_t>(p) % std::min<size_t>(16, lanes * sizeof(T)) == 0;
}

// One thread per W elements.
template <int W, class F, class Call>
ort::Status* over_places(bool aligned, int64_t places, const F& kernel, cudaStream_t stream, const Call& call) {
  if (places == 0) return nullptr;
  const int64_t units = aligned ? places / W : places;
  const int64_t threads = std::min(kMostThreads, units < (1 << 17) ? 128 : 256);
  const dim3 grid(blocks(parts(units, threads))), block(static_cast<unsigned>(threads));
  if constexpr (W > 1) {
    if (aligned) return launched(kernel(std::integral_constant<int, W>{}), grid, block, stream, call);
  }
  return launched(kernel(std::integral_constant<int, 1>{}), grid, block, stream, call);
}

// How many pieces of a row each thread holds: one, `most`, or none for a long row.
constexpr int pieces_of(int64_t chunks, int most) {
  return chunks <= kMostThreads ? 1 : chunks <= static_cast<int64_t>(kMostThreads) * most ? most : 0;
}
constexpr int64_t chunks_of(int64_t size, int lanes) { return size < lanes ? 1 : (size + lanes - 1) / lanes; }
constexpr int kPiecesOfOne = 8;  // pieces of single lanes, if lanes are not aligned

// Whether rows are too long for registers.
template <int W, int K>
bool is_long(bool aligned, int64_t size) {
  return pieces_of(chunks_of(size, aligned ? W : 1), aligned && W > 1 ? K : kPiecesOfOne) == 0;
}

template <int W, int K, int64_t kSize, class F, class Call>
ort::Status* over_held_rows(int64_t rows, int64_t size, const F& kernel, cudaStream_t stream, const Call& call) {
  const int64_t chunks = chunks_of(size, W);
  const int pieces = pieces_of(chunks, K);
  int64_t threads = power_of_two(chunks), teams = 1;
  if (threads < kWarp) {
    teams = std::max<int64_t>(1, std::min(kMostThreads, 128) / threads);
  } else {
    threads = std::min<int64_t>(parts(parts(chunks, std::max(pieces, 1)), kWarp) * kWarp, kMostThreads);
  }
  const dim3 block(static_cast<unsigned>(threads), static_cast<unsigned>(teams)), grid(blocks(parts(rows, teams)));
  auto go = [&](auto k) { return launched(kernel(std::integral_constant<int, W>{}, k), grid, block, stream, call); };
  if constexpr (kSize >= 0) return go(std::integral_constant<int, pieces_of(chunks_of(kSize, W), K)>{});
  else if (pieces == 1) return go(std::integral_constant<int, 1>{});
  else if (pieces == K) return go(std::integral_constant<int, K>{});
  else return go(std::integral_constant<int, 0>{});
}

// One team per row of `kSize` elements, or of a size known at the call if negative: part of a warp for short rows, a block
// for long ones.
template <int W, int K, int64_t kSize, class F, class Call>
ort::Status* over_rows(bool aligned, int64_t rows, int64_t size, const F& kernel, cudaStream_t stream, const Call& call) {
  if (rows == 0) return nullptr;
  if constexpr (W > 1) {
    if (aligned) return over_held_rows<W, K, kSize>(rows, size, kernel, stream, call);
  }
  return over_held_rows<1, kPiecesOfOne, kSize>(rows, size, kernel, stream, call);
}

// Adjacent rows: one per thread of a warp, and the warps of a block divide the elements of each.
template <class Call>
ort::Status* over_rows_beside(int64_t rows, int64_t size, void (*kernel)(Call), cudaStream_t stream, const Call& call) {
  if (rows == 0) return nullptr;
  const int64_t sharing = std::min<int64_t>(kMostThreads / kWarp, power_of_two(parts(size, 4)));
  const dim3 block(kWarp, static_cast<unsigned>(sharing));
  return launched(kernel, dim3(blocks(parts(rows, kWarp))), block, stream, call);
}

// Temporary memory of a call, in stream order. It comes from a pool of this library, which keeps memory between calls: the
// device's default pool releases it at every synchronization.
class Memory {
 public:
  explicit Memory(cudaStream_t stream) : stream_(stream) {}
  ~Memory() {
    if (start_) cudaFreeAsync(start_, stream_);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  template <class T>
  void want(T** p, int64_t count) {
    wanted_.push_back({reinterpret_cast<char**>(p), bytes_});
    bytes_ += (count * sizeof(T) + 255) / 256 * 256;
  }
  ort::Status* take() {
    if (bytes_ == 0) return nullptr;
    cudaMemPool_t pool = nullptr;
    if (auto s = checked(pool_of(pool))) return s;
    if (auto s = checked(cudaMallocFromPoolAsync(reinterpret_cast<void**>(&start_), bytes_, pool, stream_))) return s;
    for (const auto& wanted : wanted_) *wanted.target = start_ + wanted.offset;
    return nullptr;
  }

 private:
  static cudaError_t pool_of(cudaMemPool_t& pool) {
    static std::mutex making;
    static cudaMemPool_t pools[64] = {};
    int device = 0;
    if (auto error = cudaGetDevice(&device)) return error;
    if (device >= 64) return cudaErrorInvalidDevice;
    const std::lock_guard<std::mutex> alone(making);
    if (!pools[device]) {
      cudaMemPoolProps how = {};
      how.allocType = cudaMemAllocationTypePinned;
      how.location.type = cudaMemLocationTypeDevice;
      how.location.id = device;
      if (auto error = cudaMemPoolCreate(&pools[device], &how)) return error;
      uint64_t everything = ~uint64_t{0};
      cudaMemPoolSetAttribute(pools[device], cudaMemPoolAttrReleaseThreshold, &everything);
    }
    pool = pools[device];
    return cudaSuccess;
  }

  struct Wanted {
    char** target;
    size_t offset;
  };
  cudaStream_t stream_;
  char* start_ = nullptr;
  std::vector<Wanted> wanted_;
  size_t bytes_ = 0;
};

}  // namespace
