// Device code of GPU kernels: entry points, functions, and reductions over the threads of a row.
#pragma once

#ifndef SARDONYX_ENTRY
#define SARDONYX_ENTRY(name, Call) \
  extern "C" __global__ void __launch_bounds__(kMostThreads) name(const __grid_constant__ Call call)
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

// Faster versions, for results that are stored in half precision or bfloat16: their error is a hundredth of what rounding
// to those adds.
template <class V> LANES_INLINE V fast_divided(const V& a, const V& b) {
  if constexpr (!std::is_same_v<ScalarOf<V>, float>) return divided(a, b);
  else return each(a, b, [](float x, float y) { return fast::divided(x, y); });
}
template <class V> LANES_INLINE V fast_inverse_root(const V& a) {
  if constexpr (!std::is_same_v<ScalarOf<V>, float>) return divided(all<V>(1), square_root(a));
  else return each(a, [](float x) { return fast::inverse_root(x); });
}
template <class V> LANES_INLINE V fast_exponential(const V& a) {
  if constexpr (!std::is_same_v<ScalarOf<V>, float>) return exponential(a);
  else return each(a, [](float x) { return fast::exponential(x); });
}
template <class V> LANES_INLINE V fast_sigmoid(const V& a) {
  if constexpr (!std::is_same_v<ScalarOf<V>, float>) return sigmoid(a);
  else return each(a, [](float x) { return fast::divided(1.0f, 1.0f + fast::exponential(-x)); });
}
template <class V> LANES_INLINE V fast_hyperbolic_tangent(const V& a) {
  if constexpr (!std::is_same_v<ScalarOf<V>, float>) return hyperbolic_tangent(a);
  else return rational_tangent(a, [](const V& p, const V& q) { return fast_divided(p, q); });
}
template <class V> LANES_INLINE V fast_error_function(const V& a) {
  if constexpr (!std::is_same_v<ScalarOf<V>, float>) return error_function(a);
  else return rational_error(a, [](const V& p, const V& q) { return fast_divided(p, q); });
}

}  // namespace lanes

namespace {

// Reductions. A row belongs to a team: the threads of a block that have the same `threadIdx.y`. Teams of less than a
// warp are a power of two. Adjacent rows belong to threads with different `threadIdx.x`; those with the same one share a
// row.

// Within a team of less than a warp.
template <class T>
__device__ T shuffled(T v, int by) {
  const unsigned width = blockDim.x;
  const unsigned thread = threadIdx.y * blockDim.x + threadIdx.x;
  const unsigned team = ((1u << width) - 1) << (thread % 32 / width * width);
  return static_cast<T>(__shfl_xor_sync(team, v, by, width));
}

// Reduces over all threads of a team; each of them gets the result. `turn` alternates from one reduction to the next: the
// warps of a block write their parts where none of them can still be reading those of the previous one.
template <class How, class T>
__device__ T together(T v, bool& turn) {
  if (blockDim.x < kWarp) {
    for (int by = blockDim.x / 2; by > 0; by /= 2) v = How::join(v, shuffled(v, by));
    return v;
  }
#pragma unroll
  for (int by = kWarp / 2; by > 0; by /= 2) v = How::join(v, static_cast<T>(__shfl_xor_sync(~0u, v, by, kWarp)));
  if (blockDim.x == kWarp) return v;
  __shared__ T parts[2][kMostThreads / kWarp];
  turn = !turn;
  if (threadIdx.x % kWarp == 0) parts[turn][threadIdx.x / kWarp] = v;
  __syncthreads();
  v = parts[turn][0];
  for (unsigned part = 1; part < blockDim.x / kWarp; ++part) v = How::join(v, parts[turn][part]);
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

}  // namespace
