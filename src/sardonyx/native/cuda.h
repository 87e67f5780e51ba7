// Values of one or several lanes on a GPU: the adjacent elements that one thread computes.
//
// The counterpart of lanes.h. Lanes are what a thread loads or stores at once, 16 bytes if possible.
// Booleans are integers of 32 bits, all ones or zero. Half precision is stored narrow and computed in float.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#define LANES_INLINE __device__ __forceinline__

namespace lanes {

template <class T, int W>
struct Pack {
  T lanes[W];
  LANES_INLINE T operator[](int i) const { return lanes[i]; }
};

template <class T, int W>
using Of = std::conditional_t<W == 1, T, Pack<T, W>>;

template <class V>
struct Traits { using Scalar = V; static constexpr int width = 1; };
template <class T, int W>
struct Traits<Pack<T, W>> { using Scalar = T; static constexpr int width = W; };
template <class V>
using ScalarOf = typename Traits<V>::Scalar;
template <class V>
constexpr int kWidth = Traits<V>::width;

// W lanes, with `f(i)` for lane i.
template <class T, int W, class F>
LANES_INLINE Of<T, W> made(F f) {
  if constexpr (W == 1) return f(0);
  else {
    Pack<T, W> r;
#pragma unroll
    for (int l = 0; l < W; ++l) r.lanes[l] = f(l);
    return r;
  }
}
template <class V>
LANES_INLINE V all(ScalarOf<V> x) { return made<ScalarOf<V>, kWidth<V>>([x](int) { return x; }); }
template <int W, class T>
LANES_INLINE auto splat(T x) { return all<Of<T, W>>(x); }
template <class V>
LANES_INLINE auto lane(const V& v, int i) {
  if constexpr (kWidth<V> == 1) return v;
  else return v.lanes[i];
}

#define LANES_OPERATOR(op)                                                                             \
  template <class T, int W>                                                                            \
  LANES_INLINE Pack<T, W> operator op(const Pack<T, W>& a, const Pack<T, W>& b) {                      \
    return made<T, W>([&](int l) { return static_cast<T>(a.lanes[l] op b.lanes[l]); });                \
  }                                                                                                    \
  template <class T, int W, class S, class = std::enable_if_t<std::is_arithmetic_v<S>>>                \
  LANES_INLINE Pack<T, W> operator op(const Pack<T, W>& a, S b) { return a op all<Pack<T, W>>(b); }    \
  template <class T, int W, class S, class = std::enable_if_t<std::is_arithmetic_v<S>>>                \
  LANES_INLINE Pack<T, W> operator op(S a, const Pack<T, W>& b) { return all<Pack<T, W>>(a) op b; }
LANES_OPERATOR(+)
LANES_OPERATOR(-)
LANES_OPERATOR(*)
LANES_OPERATOR(/)
LANES_OPERATOR(&)
LANES_OPERATOR(|)
LANES_OPERATOR(^)
#undef LANES_OPERATOR

template <class V, class F>
LANES_INLINE V each(const V& v, F f) {
  return made<ScalarOf<V>, kWidth<V>>([&](int l) { return f(lane(v, l)); });
}
template <class V, class F>
LANES_INLINE V each(const V& a, const V& b, F f) {
  return made<ScalarOf<V>, kWidth<V>>([&](int l) { return f(lane(a, l), lane(b, l)); });
}
template <class T, int W>
LANES_INLINE Pack<T, W> operator-(const Pack<T, W>& a) { return each(a, [](auto x) { return static_cast<T>(-x); }); }
template <class T, int W>
LANES_INLINE Pack<T, W> operator~(const Pack<T, W>& a) { return each(a, [](auto x) { return static_cast<T>(~x); }); }

template <class To, class V>
LANES_INLINE auto convert(const V& v) {
  return made<To, kWidth<V>>([&](int l) { return static_cast<To>(lane(v, l)); });
}
template <class V, class F>
LANES_INLINE auto compare(const V& a, const V& b, F f) {
  return made<int32_t, kWidth<V>>([&](int l) { return -static_cast<int32_t>(f(lane(a, l), lane(b, l))); });
}
template <class M, class V>
LANES_INLINE V select(const M& m, const V& a, const V& b) {
  return made<ScalarOf<V>, kWidth<V>>([&](int l) { return lane(m, l) ? lane(a, l) : lane(b, l); });
}
// The second operand if one is NaN.
template <class V>
LANES_INLINE V lesser(const V& a, const V& b) { return each(a, b, [](auto x, auto y) { return x < y ? x : y; }); }
template <class V>
LANES_INLINE V greater(const V& a, const V& b) { return each(a, b, [](auto x, auto y) { return x > y ? x : y; }); }

// Memory

template <class T> struct Computed { using type = T; };
template <> struct Computed<half> { using type = float; };
template <> struct Computed<bfloat> { using type = float; };
template <> struct Computed<boolean> { using type = int32_t; };
template <class T>
using ComputedOf = typename Computed<std::remove_const_t<T>>::type;

template <class T>
LANES_INLINE auto wide(T x) {
  if constexpr (std::is_same_v<T, half>) return narrow::float_of_half(x.bits);
  else if constexpr (std::is_same_v<T, bfloat>) return narrow::float_of_bfloat16(x.bits);
  else if constexpr (std::is_same_v<T, boolean>) return static_cast<int32_t>(-static_cast<int32_t>(x.value != 0));
  else return x;
}
template <class T, class V>
LANES_INLINE T stored(V x) {
  if constexpr (std::is_same_v<T, half>) return half{narrow::half_of_float(x)};
  else if constexpr (std::is_same_v<T, bfloat>) return bfloat{narrow::bfloat16_of_float(x)};
  else if constexpr (std::is_same_v<T, boolean>) return boolean{static_cast<uint8_t>(x != 0)};
  else return x;
}

// The elements of one load or store: W lanes, at most 16 bytes.
template <class T, int W>
struct alignas(W * sizeof(T) < 16 ? W * sizeof(T) : 16) Chunk {
  static constexpr int kLong = W * sizeof(T) < 16 ? W : 16 / sizeof(T);
  T elements[kLong];
};

template <int W, class T>
LANES_INLINE auto strided(const T* p, int64_t step) {
  return made<ComputedOf<T>, W>([&](int l) { return wide(p[l * step]); });
}
// Contiguous lanes; several are aligned to a chunk.
template <int W, class T>
LANES_INLINE auto row(const T* p) {
  if constexpr (W == 1) return wide(*p);
  else {
    using C = Chunk<T, W>;
    Pack<ComputedOf<T>, W> r;
#pragma unroll
    for (int c = 0; c < W / C::kLong; ++c) {
      const C chunk = reinterpret_cast<const C*>(p)[c];
#pragma unroll
      for (int l = 0; l < C::kLong; ++l) r.lanes[c * C::kLong + l] = wide(chunk.elements[l]);
    }
    return r;
  }
}
template <int W, class T>
LANES_INLINE auto same(const T* p) { return splat<W>(wide(*p)); }

// Reads where `ok`, and lanes from `start` to before `end`; other lanes are `fill`.
template <int W, class T, class C>
LANES_INLINE auto guarded(const T* p, int64_t step, bool ok, int64_t i, int64_t start, int64_t end, C fill) {
  return made<C, W>([&](int l) {
    return ok && i + l >= start && i + l < end ? static_cast<C>(wide(p[l * step])) : fill;
  });
}
// first, first + step, first + 2·step, …
template <int W>
LANES_INLINE auto ramp(int64_t first, int64_t step) {
  return made<int64_t, W>([&](int l) { return first + l * step; });
}
// Gathers by each lane's index from `size` elements with stride `step`; a negative index counts from the end. An index out
// of range gives zero, as in ONNX Runtime on GPUs: kernels are asynchronous and cannot report errors.
template <int W, class T, class I>
LANES_INLINE auto gathered(const T* p, int64_t stride, const I& index, int64_t step, int64_t size) {
  return made<ComputedOf<T>, W>([&](int l) {
    int64_t i = lane(index, l);
    if (i < 0) i += size;
    return i >= 0 && i < size ? wide(p[l * stride + i * step]) : ComputedOf<T>{};
  });
}

template <class T, class V>
LANES_INLINE void put_strided(T* p, int64_t step, const V& v) {
#pragma unroll
  for (int l = 0; l < kWidth<V>; ++l) p[l * step] = stored<T>(lane(v, l));
}
template <class T, class V>
LANES_INLINE void put(T* p, const V& v) {
  if constexpr (kWidth<V> == 1) *p = stored<T>(v);
  else {
    using C = Chunk<T, kWidth<V>>;
#pragma unroll
    for (int c = 0; c < kWidth<V> / C::kLong; ++c) {
      C chunk;
#pragma unroll
      for (int l = 0; l < C::kLong; ++l) chunk.elements[l] = stored<T>(lane(v, c * C::kLong + l));
      reinterpret_cast<C*>(p)[c] = chunk;
    }
  }
}
// Rounds a float through a narrow type.
template <class T, class V>
LANES_INLINE V through(const V& v) { return each(v, [](auto x) { return wide(stored<T>(x)); }); }

}  // namespace lanes
