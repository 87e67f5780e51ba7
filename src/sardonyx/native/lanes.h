// Values of one or several lanes (SIMD), with the same interface for both.
//
// A loop is written once, for `w` lanes: several registers in its body, one register and then one lane in its tail.
// Several registers at a time hide each other's latency. Booleans are integers of 32 bits,
// all ones or zero. Half precision is stored narrow and computed in float.
#pragma once

#if defined(__AVX__)
#include <immintrin.h>
#endif

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#define LANES_INLINE inline __attribute__((always_inline))

namespace lanes {

#if defined(__AVX512F__)
constexpr int kNative = 16;
#elif defined(__AVX__)
constexpr int kNative = 8;
#else
constexpr int kNative = 4;
#endif

struct half { uint16_t bits; };
struct bfloat { uint16_t bits; };
struct boolean { uint8_t value; };

template <class T, int N>
struct VectorOf { typedef T type __attribute__((vector_size(sizeof(T) * N))); };

// W lanes, as an array of registers: compilers split longer vectors lane by lane.
template <class T, int W>
struct Pack {
  static constexpr int kLong = sizeof(T) == 8 ? kNative / 2 : kNative;
  static constexpr int kParts = W / kLong;
  using Part = typename VectorOf<T, kLong>::type;
  Part parts[kParts];
  T operator[](int i) const { return parts[i / kLong][i % kLong]; }
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

template <int Bytes> struct Integer;
template <> struct Integer<1> { using type = int8_t; };
template <> struct Integer<2> { using type = int16_t; };
template <> struct Integer<4> { using type = int32_t; };
template <> struct Integer<8> { using type = int64_t; };
template <class V>
using BitsOf = Of<typename Integer<sizeof(ScalarOf<V>)>::type, kWidth<V>>;
template <int W>
using Mask = Of<int32_t, W>;


// Applies `f` to each register of some packs.
template <size_t k, class F, class... Vs>
LANES_INLINE auto at_part(F f, const Vs&... vs) { return f(vs.parts[k]...); }
template <class R, class F, size_t... k, class... Vs>
LANES_INLINE R by_part_of(F f, std::index_sequence<k...>, const Vs&... vs) { return R{{at_part<k>(f, vs...)...}}; }
template <class R, class F, class... Vs>
LANES_INLINE R by_part(F f, const Vs&... vs) {
  return by_part_of<R>(f, std::make_index_sequence<R::kParts>{}, vs...);
}

template <class V>
LANES_INLINE V all(ScalarOf<V> x) {
  if constexpr (kWidth<V> == 1) return x;
  else return by_part<V>([x](auto zero) { return x - zero; }, V{});
}
template <int W, class T>
LANES_INLINE auto splat(T x) { return all<Of<T, W>>(x); }

template <class To, class V>
LANES_INLINE To bits(V v) {
  if constexpr (kWidth<V> == 1) { To to; std::memcpy(&to, &v, sizeof to); return to; }
  else return by_part<To>([](auto x) { return reinterpret_cast<typename To::Part>(x); }, v);
}

#define LANES_OPERATOR(op)                                                                          \
  template <class T, int W>                                                                         \
  LANES_INLINE Pack<T, W> operator op(Pack<T, W> a, Pack<T, W> b) {                                 \
    return by_part<Pack<T, W>>([](auto x, auto y) { return x op y; }, a, b);                        \
  }                                                                                                 \
  template <class T, int W, class S, class = std::enable_if_t<std::is_arithmetic_v<S>>>             \
  LANES_INLINE Pack<T, W> operator op(Pack<T, W> a, S b) { return a op all<Pack<T, W>>(b); }        \
  template <class T, int W, class S, class = std::enable_if_t<std::is_arithmetic_v<S>>>             \
  LANES_INLINE Pack<T, W> operator op(S a, Pack<T, W> b) { return all<Pack<T, W>>(a) op b; }
LANES_OPERATOR(+)
LANES_OPERATOR(-)
LANES_OPERATOR(*)
LANES_OPERATOR(/)
LANES_OPERATOR(&)
LANES_OPERATOR(|)
LANES_OPERATOR(^)
#undef LANES_OPERATOR
template <class T, int W>
LANES_INLINE Pack<T, W> operator-(Pack<T, W> a) { return by_part<Pack<T, W>>([](auto x) { return -x; }, a); }
template <class T, int W>
LANES_INLINE Pack<T, W> operator~(Pack<T, W> a) { return by_part<Pack<T, W>>([](auto x) { return ~x; }, a); }
template <class T, int W>
LANES_INLINE Pack<T, W> operator<<(Pack<T, W> a, int n) { return by_part<Pack<T, W>>([n](auto x) { return x << n; }, a); }
template <class T, int W>
LANES_INLINE Pack<T, W> operator>>(Pack<T, W> a, int n) { return by_part<Pack<T, W>>([n](auto x) { return x >> n; }, a); }

template <int from, class P, size_t... i>
LANES_INLINE auto some_of(P x, std::index_sequence<i...>) { return __builtin_shufflevector(x, x, (from + i)...); }
template <class P, size_t... i>
LANES_INLINE auto both(P x, P y, std::index_sequence<i...>) { return __builtin_shufflevector(x, y, i...); }

// Converts a register. Compilers vectorize size changes by a factor of two only.
template <class To, int N, class P>
LANES_INLINE auto converted(P x) {
  using From = std::decay_t<decltype(x[0])>;
  constexpr int before = sizeof(From), after = sizeof(To);
  using Wide = std::conditional_t<std::is_signed_v<From>, int16_t, uint16_t>;
  if constexpr (before == 1 && after >= 4) return converted<To, N>(converted<Wide, N>(x));
  else if constexpr (before == 2 && after == 8) return converted<To, N>(converted<int32_t, N>(x));
  else if constexpr (before == 8 && after <= 2) return converted<To, N>(converted<int32_t, N>(x));
  else if constexpr (before == 4 && after == 1 && std::is_floating_point_v<From>) {
    return converted<To, N>(converted<int32_t, N>(x));
  } else if constexpr (before == 4 && after == 1) return converted<To, N>(converted<int16_t, N>(x));
  else return __builtin_convertvector(x, typename VectorOf<To, N>::type);
}

template <class R, class V, size_t... k>
LANES_INLINE R widened(const V& v, std::index_sequence<k...>) {  // each part becomes two
  using Half = std::make_index_sequence<R::kLong>;
  return R{{converted<ScalarOf<R>, R::kLong>(some_of<k % 2 * R::kLong>(v.parts[k / 2], Half{}))...}};
}
template <class R, class V, size_t... k>
LANES_INLINE R narrowed(const V& v, std::index_sequence<k...>) {  // two parts become one
  using To = ScalarOf<R>;
  return R{{both(converted<To, V::kLong>(v.parts[2 * k]), converted<To, V::kLong>(v.parts[2 * k + 1]),
                 std::make_index_sequence<R::kLong>{})...}};
}
template <class R, class V>
LANES_INLINE R as_pack(const V& v) {
  constexpr auto parts = std::make_index_sequence<R::kParts>{};
  if constexpr (R::kLong == V::kLong) return by_part<R>([](auto x) { return converted<ScalarOf<R>, R::kLong>(x); }, v);
  else if constexpr (R::kLong < V::kLong) return widened<R>(v, parts);
  else return narrowed<R>(v, parts);
}
template <class To, class V>
LANES_INLINE auto convert(V v) {
  if constexpr (kWidth<V> == 1) return static_cast<To>(v);
  else return as_pack<Pack<To, kWidth<V>>>(v);
}

template <class V, class F>
LANES_INLINE V each(V v, F f) {
  if constexpr (kWidth<V> == 1) return f(v);
  else return by_part<V>([f](auto x) { for (int i = 0; i < V::kLong; ++i) x[i] = f(x[i]); return x; }, v);
}
template <class V, class F>
LANES_INLINE V each(V a, V b, F f) {
  if constexpr (kWidth<V> == 1) return f(a, b);
  else return by_part<V>([f](auto x, auto y) { for (int i = 0; i < V::kLong; ++i) x[i] = f(x[i], y[i]); return x; }, a, b);
}

// Booleans

template <class V, class F>
LANES_INLINE auto compare(V a, V b, F f) {
  if constexpr (kWidth<V> == 1) return static_cast<int32_t>(-static_cast<int32_t>(f(a, b)));
  else {
    using B = BitsOf<V>;
    const auto found = by_part<B>([f](auto x, auto y) { return reinterpret_cast<typename B::Part>(f(x, y)); }, a, b);
    return as_pack<Mask<kWidth<V>>>(found);
  }
}
template <class M, class V>
LANES_INLINE V select(M m, V a, V b) {
  if constexpr (kWidth<V> == 1) return m ? a : b;
  else return by_part<V>([](auto k, auto x, auto y) { return k ? x : y; }, as_pack<BitsOf<V>>(m), a, b);
}

// Memory

LANES_INLINE float widen(half h) { return narrow::float_of_half(h.bits); }
LANES_INLINE float widen(bfloat b) { return narrow::float_of_bfloat16(b.bits); }

template <class T> struct Computed { using type = T; };
template <> struct Computed<half> { using type = float; };
template <> struct Computed<bfloat> { using type = float; };
template <> struct Computed<boolean> { using type = int32_t; };

template <class T>
LANES_INLINE auto wide(T x) {
  if constexpr (std::is_same_v<T, half> || std::is_same_v<T, bfloat>) return widen(x);
  else if constexpr (std::is_same_v<T, boolean>) return static_cast<int32_t>(-static_cast<int32_t>(x.value != 0));
  else return x;
}

template <class V, size_t... k>
LANES_INLINE V loaded(const void* p, std::index_sequence<k...>) {
  using Part = typename V::Part;
  return V{{[p] { Part x; std::memcpy(&x, static_cast<const char*>(p) + k * sizeof x, sizeof x); return x; }()...}};
}
template <class V>
LANES_INLINE V loaded(const void* p) { return loaded<V>(p, std::make_index_sequence<V::kParts>{}); }
template <class V, size_t... k>
LANES_INLINE void copied(void* p, const V& v, std::index_sequence<k...>) {
  (std::memcpy(static_cast<char*>(p) + k * sizeof v.parts[k], &v.parts[k], sizeof v.parts[k]), ...);
}
template <class V>
LANES_INLINE void copied(void* p, const V& v) { copied(p, v, std::make_index_sequence<V::kParts>{}); }

template <int W, class T>
LANES_INLINE auto strided(const T* p, int64_t step) {
  if constexpr (W == 1) return wide(*p);
  else {
    typename Computed<T>::type values[W];
    for (int i = 0; i < W; ++i) values[i] = wide(p[i * step]);
    return loaded<Of<typename Computed<T>::type, W>>(values);
  }
}
// Converts halves in memory to a register of floats and back, with processor instructions.
#if defined(__AVX512F__)
constexpr bool kHalves = true;
LANES_INLINE auto of_halves(const half* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
LANES_INLINE void to_halves(half* p, __m512 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#elif defined(__AVX__) && defined(__F16C__)
constexpr bool kHalves = true;
LANES_INLINE auto of_halves(const half* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
LANES_INLINE void to_halves(half* p, __m256 x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#else
constexpr bool kHalves = false;
#endif
template <int W, size_t... k>
LANES_INLINE auto row_of_halves(const half* p, std::index_sequence<k...>) {
  using V = Of<float, W>;
  return V{{static_cast<typename V::Part>(of_halves(p + k * V::kLong))...}};
}
template <class V, size_t... k>
LANES_INLINE void put_halves(half* p, const V& v, std::index_sequence<k...>) { (to_halves(p + k * V::kLong, v.parts[k]), ...); }

template <int W, class T>
LANES_INLINE auto row(const T* p) {
  if constexpr (W == 1) return wide(*p);
  else if constexpr (std::is_same_v<T, half> && kHalves) return row_of_halves<W>(p, std::make_index_sequence<W / kNative>{});
  else if constexpr (std::is_same_v<T, half>) return strided<W>(p, 1);
  else if constexpr (std::is_same_v<T, bfloat>) {
    return bits<Of<float, W>>(convert<uint32_t>(loaded<Of<uint16_t, W>>(p)) << 16);
  } else if constexpr (std::is_same_v<T, boolean>) {
    return to_mask(convert<int32_t>(loaded<Of<uint8_t, W>>(p)));
  } else return loaded<Of<T, W>>(p);
}
template <int W, class T>
LANES_INLINE auto same(const T* p) { return splat<W>(wide(*p)); }

// Reads where `ok`, and lanes from `start` to before `end`; other lanes are `fill`.
template <int W, class T, class C>
LANES_INLINE auto guarded(const T* p, int64_t step, bool ok, int64_t i, int64_t start, int64_t end, C fill) {
  if (!ok || i + W <= start || i >= end) return splat<W>(fill);
  if (i >= start && i + W <= end) {
    if (step == 1) return row<W>(p);
    return strided<W>(p, step);
  }
  C values[W];
  for (int l = 0; l < W; ++l) values[l] = i + l >= start && i + l < end ? static_cast<C>(wide(p[l * step])) : fill;
  if constexpr (W == 1) return values[0];
  else return loaded<Of<C, W>>(values);
}
// first, first + step, first + 2·step, …
template <int W>
LANES_INLINE auto ramp(int64_t first, int64_t step) {
  if constexpr (W == 1) return first;
  else {
    int64_t values[W];
    for (int l = 0; l < W; ++l) values[l] = first + l * step;
    return loaded<Of<int64_t, W>>(values);
  }
}

template <class T, class V>
LANES_INLINE T stored(V x) {
  if constexpr (std::is_same_v<T, half>) return half{narrow::half_of_float(x)};
  else if constexpr (std::is_same_v<T, bfloat>) return bfloat{narrow::bfloat16_of_float(x)};
  else if constexpr (std::is_same_v<T, boolean>) return boolean{static_cast<uint8_t>(x != 0)};
  else return x;
}
template <class T, class V>
LANES_INLINE void put_strided(T* p, int64_t step, V v) {
  if constexpr (kWidth<V> == 1) *p = stored<T>(v);
  else for (int i = 0; i < kWidth<V>; ++i) p[i * step] = stored<T>(v[i]);
}
// The upper bits of floats, rounded to even; NaN stays NaN.
template <class V>
LANES_INLINE auto upper_bits(V v) {
  const auto u = bits<Of<uint32_t, kWidth<V>>>(v);
  return select(is_nan(v), (u >> 16) | 0x40u, (u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
template <class T, class V>
LANES_INLINE void put(T* p, V v) {
  if constexpr (kWidth<V> == 1) *p = stored<T>(v);
  else if constexpr (std::is_same_v<T, boolean>) {
    copied(p, convert<uint8_t>(v & 1));
  } else if constexpr (std::is_same_v<T, bfloat>) {
    copied(p, convert<uint16_t>(upper_bits(v)));
  } else if constexpr (std::is_same_v<T, half> && kHalves) put_halves(p, v, std::make_index_sequence<V::kParts>{});
  else if constexpr (std::is_same_v<T, half>) put_strided(p, 1, v);
  else copied(p, v);
}

// Gathers by each lane's index from `size` elements with stride `step`; a negative index counts from the end.
template <int W, class T, class I, class Flag>
LANES_INLINE auto gathered(const T* p, int64_t stride, I index, int64_t step, int64_t size, Flag& out_of_range) {
  auto read = [&](const T* from, int64_t i) {
    if (i < 0) i += size;
    const bool inside = i >= 0 && i < size;
    if (!inside) out_of_range = true;
    return inside ? wide(from[i * step]) : typename Computed<T>::type{};
  };
  if constexpr (W == 1) return read(p, index);
  else {
    typename Computed<T>::type values[W];
    for (int l = 0; l < W; ++l) values[l] = read(p + l * stride, index[l]);
    return loaded<Of<typename Computed<T>::type, W>>(values);
  }
}

// Rounds a float through a narrow type.
template <class T, class V>
LANES_INLINE V through(V v) {
  if constexpr (kWidth<V> > 1 && std::is_same_v<T, bfloat>) return bits<V>(upper_bits(v) << 16);
  else if constexpr (kWidth<V> > 1 && kHalves) {
    half narrow[kWidth<V>];
    put(narrow, v);
    return row<kWidth<V>>(narrow);
  } else return each(v, [](auto x) { return wide(stored<T>(x)); });
}

// Minimum and maximum; the second operand if one is NaN, as in the processor's instruction. Written as a comparison,
// compilers may generate several instructions.
template <class T, class P> LANES_INLINE P lesser_part(P x, P y) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<T, float>) return static_cast<P>(_mm512_min_ps(x, y));
#elif defined(__AVX__)
  if constexpr (std::is_same_v<T, float>) return static_cast<P>(_mm256_min_ps(x, y));
#endif
  return x < y ? x : y;
}
template <class T, class P> LANES_INLINE P greater_part(P x, P y) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<T, float>) return static_cast<P>(_mm512_max_ps(x, y));
#elif defined(__AVX__)
  if constexpr (std::is_same_v<T, float>) return static_cast<P>(_mm256_max_ps(x, y));
#endif
  return x > y ? x : y;
}
template <class V> LANES_INLINE V lesser(V a, V b) {
  if constexpr (kWidth<V> == 1) return a < b ? a : b;
  else return by_part<V>([](auto x, auto y) { return lesser_part<ScalarOf<V>>(x, y); }, a, b);
}
template <class V> LANES_INLINE V greater(V a, V b) {
  if constexpr (kWidth<V> == 1) return a > b ? a : b;
  else return by_part<V>([](auto x, auto y) { return greater_part<ScalarOf<V>>(x, y); }, a, b);
}

}  // namespace lanes
