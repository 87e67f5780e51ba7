// Values of one or several lanes, and arithmetic that reads the same for both.
//
// A loop is written once, for `w` lanes: several registers of them in its body, one register and then one lane in its tail.
// Several registers at a time hide each other's latency. Booleans are integers of 32 bits,
// all ones or zero. Half precision is stored narrow and computed in float.
#pragma once

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

// W lanes, in parts of a register each: compilers take vectors of more than a register apart, lane by lane.
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

template <class R, class V, size_t... k>
LANES_INLINE R widened(const V& v, std::index_sequence<k...>) {  // each part becomes two
  using Half = std::make_index_sequence<R::kLong>;
  return R{{__builtin_convertvector((some_of<k % 2 * R::kLong>(v.parts[k / 2], Half{})), typename R::Part)...}};
}
template <class R, class V, size_t... k>
LANES_INLINE R narrowed(const V& v, std::index_sequence<k...>) {  // two parts become one
  using Half = typename VectorOf<ScalarOf<R>, V::kLong>::type;
  return R{{both(__builtin_convertvector(v.parts[2 * k], Half), __builtin_convertvector(v.parts[2 * k + 1], Half),
                 std::make_index_sequence<R::kLong>{})...}};
}
template <class R, class V>
LANES_INLINE R as_pack(const V& v) {
  constexpr auto parts = std::make_index_sequence<R::kParts>{};
  if constexpr (R::kLong == V::kLong) return by_part<R>([](auto x) { return __builtin_convertvector(x, typename R::Part); }, v);
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
template <class V> LANES_INLINE auto less(V a, V b) { return compare(a, b, [](auto x, auto y) { return x < y; }); }
template <class V> LANES_INLINE auto less_equal(V a, V b) { return compare(a, b, [](auto x, auto y) { return x <= y; }); }
template <class V> LANES_INLINE auto equal(V a, V b) { return compare(a, b, [](auto x, auto y) { return x == y; }); }
template <class V> LANES_INLINE auto is_nan(V a) { return compare(a, a, [](auto x, auto y) { return x != y; }); }
template <class V> LANES_INLINE auto is_inf(V a) {
  constexpr auto top = std::numeric_limits<ScalarOf<V>>::infinity();
  return equal(a, all<V>(top)) | equal(a, all<V>(-top));
}
template <class M, class V>
LANES_INLINE V select(M m, V a, V b) {
  if constexpr (kWidth<V> == 1) return m ? a : b;
  else return by_part<V>([](auto k, auto x, auto y) { return k ? x : y; }, as_pack<BitsOf<V>>(m), a, b);
}
template <class To, class M>
LANES_INLINE auto from_mask(M m) { return convert<To>(m & 1); }
template <class V>
LANES_INLINE auto to_mask(V v) { return compare(v, V{}, [](auto x, auto y) { return x != y; }); }

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
LANES_INLINE auto apart(const T* p, int64_t step) {
  if constexpr (W == 1) return wide(*p);
  else {
    typename Computed<T>::type values[W];
    for (int i = 0; i < W; ++i) values[i] = wide(p[i * step]);
    return loaded<Of<typename Computed<T>::type, W>>(values);
  }
}
template <int W, class T>
LANES_INLINE auto row(const T* p) {
  if constexpr (W == 1) return wide(*p);
  else if constexpr (std::is_same_v<T, half>) return apart<W>(p, 1);
  else if constexpr (std::is_same_v<T, bfloat>) {
    return bits<Of<float, W>>(convert<uint32_t>(loaded<Of<uint16_t, W>>(p)) << 16);
  } else if constexpr (std::is_same_v<T, boolean>) {
    return to_mask(convert<int32_t>(loaded<Of<uint8_t, W>>(p)));
  } else return loaded<Of<T, W>>(p);
}
template <int W, class T>
LANES_INLINE auto same(const T* p) { return splat<W>(wide(*p)); }

// What is read where `ok`, and along the lanes from `start` to before `end`; elsewhere `fill`.
template <int W, class T, class C>
LANES_INLINE auto guarded(const T* p, int64_t step, bool ok, int64_t i, int64_t start, int64_t end, C fill) {
  if (!ok || i + W <= start || i >= end) return splat<W>(fill);
  if (i >= start && i + W <= end) {
    if (step == 1) return row<W>(p);
    return apart<W>(p, step);
  }
  C values[W];
  for (int l = 0; l < W; ++l) values[l] = i + l >= start && i + l < end ? static_cast<C>(wide(p[l * step])) : fill;
  if constexpr (W == 1) return values[0];
  else return loaded<Of<C, W>>(values);
}
// Integers from `first` on, so far apart.
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
LANES_INLINE void put_apart(T* p, int64_t step, V v) {
  if constexpr (kWidth<V> == 1) *p = stored<T>(v);
  else for (int i = 0; i < kWidth<V>; ++i) p[i * step] = stored<T>(v[i]);
}
template <class T, class V>
LANES_INLINE void put(T* p, V v) {
  if constexpr (kWidth<V> == 1) *p = stored<T>(v);
  else if constexpr (std::is_same_v<T, boolean>) {
    copied(p, convert<uint8_t>(v & 1));
  } else if constexpr (std::is_same_v<T, bfloat>) {
    const auto u = bits<Of<uint32_t, kWidth<V>>>(v);
    const auto round = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    copied(p, convert<uint16_t>(select(is_nan(v), (u >> 16) | 0x40u, round)));
  } else if constexpr (std::is_same_v<T, half>) put_apart(p, 1, v);
  else copied(p, v);
}

// What each lane's index names, of `size` elements `step` apart; an index below zero counts from the end.
template <int W, class T, class I, class Astray>
LANES_INLINE auto gathered(const T* p, int64_t stride, I index, int64_t step, int64_t size, Astray& astray) {
  auto read = [&](const T* from, int64_t i) {
    if (i < 0) i += size;
    const bool inside = i >= 0 && i < size;
    if (!inside) astray = true;
    return inside ? wide(from[i * step]) : typename Computed<T>::type{};
  };
  if constexpr (W == 1) return read(p, index);
  else {
    typename Computed<T>::type values[W];
    for (int l = 0; l < W; ++l) values[l] = read(p + l * stride, index[l]);
    return loaded<Of<typename Computed<T>::type, W>>(values);
  }
}

// What is left of a float that was stored narrow.
template <class T, class V>
LANES_INLINE V through(V v) { return each(v, [](auto x) { return wide(stored<T>(x)); }); }

// Arithmetic

// The low bits of what C++ computed as an int.
template <class T, class V> LANES_INLINE auto kept(V v) {
  if constexpr (kWidth<V> == 1) return static_cast<T>(v);
  else return v;
}
// Integers are divided towards zero; what cannot be divided is zero, and the least number by −1 itself.
template <class V> LANES_INLINE V divided(V a, V b) {
  if constexpr (std::is_floating_point_v<ScalarOf<V>>) return a / b;
  else return each(a, b, [](auto x, auto y) {
    using T = decltype(x);
    if (y == 0) return T{0};
    if (std::is_signed_v<T> && y == static_cast<T>(-1)) return static_cast<T>(-x);
    return static_cast<T>(x / y);
  });
}
template <class V> LANES_INLINE V minimum(V a, V b) { return select(less(a, b) | is_nan(a), a, b); }
template <class V> LANES_INLINE V maximum(V a, V b) { return select(less(b, a) | is_nan(a), a, b); }
template <class V> LANES_INLINE V relu(V a) { return select(less(a, V{}), V{}, a); }
template <class V> LANES_INLINE V absolute(V a) {
  if constexpr (std::is_unsigned_v<ScalarOf<V>>) return a;
  else if constexpr (std::is_floating_point_v<ScalarOf<V>>) {
    using B = BitsOf<V>;
    return bits<V>(bits<B>(a) & all<B>(std::numeric_limits<ScalarOf<B>>::max()));
  } else return select(less(a, V{}), V(-a), a);
}
template <class V> LANES_INLINE V sign(V a) {
  const V one = all<V>(1);
  const V negative = std::is_unsigned_v<ScalarOf<V>> ? V{} : V(-one);
  return select(less(V{}, a), one, select(less(a, V{}), negative, a));
}
template <class V> LANES_INLINE V square_root(V a) { return each(a, [](auto x) { return std::sqrt(x); }); }
template <class V> LANES_INLINE V floored(V a) { return each(a, [](auto x) { return std::floor(x); }); }
template <class V> LANES_INLINE V ceiled(V a) { return each(a, [](auto x) { return std::ceil(x); }); }
template <class V> LANES_INLINE V rounded(V a) { return each(a, [](auto x) { return std::nearbyint(x); }); }
// The rest of a division: with the sign of the divisor, or as C has it.
template <class V> LANES_INLINE V c_modulo(V a, V b) {
  return each(a, b, [](auto x, auto y) {
    using T = decltype(x);
    if constexpr (std::is_floating_point_v<T>) return std::fmod(x, y);
    else return y == 0 || (std::is_signed_v<T> && y == static_cast<T>(-1)) ? T{0} : static_cast<T>(x % y);
  });
}
template <class V> LANES_INLINE V modulo(V a, V b) {
  return each(c_modulo(a, b), b, [](auto r, auto y) {
    using T = decltype(r);
    return r != 0 && (r < 0) != (y < 0) ? static_cast<T>(r + y) : r;
  });
}
template <class V> LANES_INLINE V shifted_left(V a, V b) {
  return each(a, b, [](auto x, auto y) {
    using T = decltype(x);
    return static_cast<uint64_t>(y) < 8 * sizeof(T) ? static_cast<T>(x << y) : T{0};
  });
}
template <class V> LANES_INLINE V shifted_right(V a, V b) {
  return each(a, b, [](auto x, auto y) {
    using T = decltype(x);
    return static_cast<uint64_t>(y) < 8 * sizeof(T) ? static_cast<T>(x >> y) : static_cast<T>(x < 0 ? -1 : 0);
  });
}
template <class V> LANES_INLINE V power(V a, V b) { return each(a, b, [](auto x, auto y) { return static_cast<decltype(x)>(std::pow(x, y)); }); }

template <class V> constexpr bool kFloat = std::is_same_v<ScalarOf<V>, float>;

// 2ⁿ · (1 + r + …) with x = n·ln 2 + r. The factor is applied in two steps, so that infinity comes out right. What would be
// a denormal is zero: processors take a hundred times as long for those, and every masked score of an attention is one.
template <class V>
LANES_INLINE V exponential(V x) {
  if constexpr (!kFloat<V>) return each(x, [](auto v) { return std::exp(v); });
  else {
    using I = BitsOf<V>;
    const auto tiny = less(x, all<V>(-87.3365f));
    x = select(less(all<V>(89.0f), x), all<V>(89.0f), x);
    x = select(tiny, V{}, x);
    const V magic = all<V>(12582912.0f);
    const V t = x * 1.44269504f + magic;
    const V n = t - magic;
    const V r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    V p = all<V>(0.00139560621f);
    p = p * r + 0.00837513496f;
    p = p * r + 0.0416660835f;
    p = p * r + 0.166664154f;
    p = p * r + 0.500000017f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const I k = bits<I>(t) - 0x4b400000, low = k >> 1, high = k - low;
    return select(tiny, V{}, p * bits<V>((low + 127) << 23) * bits<V>((high + 127) << 23));
  }
}

template <class V>
LANES_INLINE V logarithm(V x) {
  if constexpr (!kFloat<V>) return each(x, [](auto v) { return std::log(v); });
  else {
    using I = BitsOf<V>;
    constexpr float top = std::numeric_limits<float>::infinity();
    const auto small = less(x, all<V>(1.17549435e-38f));
    const V y = select(small, V(x * 8388608.0f), x);
    I e = ((bits<I>(y) - 0x3f3504f3) >> 23);
    const V f = bits<V>(bits<I>(y) - (e << 23)) - 1.0f;
    V n = convert<float>(e) - select(small, all<V>(23.0f), V{});
    V p = all<V>(-0.0783071631f);
    p = p * f + 0.130190996f;
    p = p * f - 0.132122788f;
    p = p * f + 0.14160731f;
    p = p * f - 0.166103413f;
    p = p * f + 0.200032061f;
    p = p * f - 0.25001571f;
    p = p * f + 0.333333024f;
    p = p * f - 0.499999883f;
    V r = (f * f * p + n * -2.12194440e-4f) + f + n * 0.693359375f;
    r = select(equal(x, V{}), all<V>(-top), r);
    r = select(equal(x, all<V>(top)), x, r);
    return select(less_equal(V{}, x), r, all<V>(std::numeric_limits<float>::quiet_NaN()));
  }
}

// log(1 + x), for x so small as well that the sum would lose it.
template <class V>
LANES_INLINE V log_one_plus(V x) {
  if constexpr (!kFloat<V>) return each(x, [](auto v) { return std::log1p(v); });
  else {
    const V sum = x + 1.0f, rest = sum - 1.0f;
    const auto lost = equal(rest, V{});
    return select(lost, x, V(logarithm(sum) * (x / select(lost, all<V>(1.0f), rest))));
  }
}

template <class V>
LANES_INLINE V sigmoid(V x) {
  const V e = exponential(V(-absolute(x)));
  const V one = all<V>(1);
  return select(less(x, V{}), V(e / (one + e)), V(one / (one + e)));
}

template <class V>
LANES_INLINE V hyperbolic_tangent(V x) {
  if constexpr (!kFloat<V>) return each(x, [](auto v) { return std::tanh(v); });
  else {
    const V a = absolute(x), s = x * x;
    V p = all<V>(-0.00567242166f);
    p = p * s + 0.0206031471f;
    p = p * s - 0.0537252316f;
    p = p * s + 0.133311858f;
    p = p * s - 0.333332634f;
    p = p * s + 0.999999996f;
    const V far = 1.0f - 2.0f / (exponential(V(a + a)) + 1.0f);
    return select(less(a, all<V>(0.625f)), V(x * p), select(less(x, V{}), V(-far), far));
  }
}

template <class V>
LANES_INLINE V error_function(V x) {
  if constexpr (!kFloat<V>) return each(x, [](auto v) { return std::erf(v); });
  else {
    const V a = absolute(x), s = x * x;
    V near = all<V>(-9.68013956e-06f);
    near = near * s + 0.000112705455f;
    near = near * s - 0.000848471159f;
    near = near * s + 0.00522107489f;
    near = near * s - 0.0268654458f;
    near = near * s + 0.112837827f;
    near = near * s - 0.376126385f;
    near = near * s + 1.12837917f;
    const V b = select(less(all<V>(4.0f), a), all<V>(4.0f), a);
    V far = all<V>(2.51326748e-07f);
    far = far * b - 2.53148102e-05f;
    far = far * b + 0.000463788029f;
    far = far * b - 0.00428238265f;
    far = far * b + 0.0253735558f;
    far = far * b - 0.108638998f;
    far = far * b - 0.633039613f;
    far = far * b - 1.12966116f;
    far = 1.0f - exponential(V(far * b + 0.000204359885f));
    far = select(less(x, V{}), V(-far), far);
    return select(less(a, all<V>(1.0f)), V(near * x), select(is_nan(x), x, far));
  }
}

// Reductions: one value a lane, joined at the end.

struct Sum {
  template <class V> static V start() { return V{}; }
  template <class V> static V join(V a, V b) { return a + b; }
};
struct Product {
  template <class V> static V start() { return all<V>(1); }
  template <class V> static V join(V a, V b) { return a * b; }
};
struct Largest {
  template <class V> static V start() {
    using L = std::numeric_limits<ScalarOf<V>>;
    return all<V>(L::has_infinity ? -L::infinity() : L::lowest());
  }
  template <class V> static V join(V a, V b) { return maximum(b, a); }
};
struct Smallest {
  template <class V> static V start() {
    using L = std::numeric_limits<ScalarOf<V>>;
    return all<V>(L::has_infinity ? L::infinity() : L::max());
  }
  template <class V> static V join(V a, V b) { return minimum(b, a); }
};

template <size_t at, class T, int W, size_t... k>
LANES_INLINE auto piece(const Pack<T, W>& v, std::index_sequence<k...>) {  // a register's worth of lanes
  return Pack<T, kNative>{{v.parts[at * sizeof...(k) + k]...}};
}

template <class How, class T, int W>
struct Along {  // over the lanes of a row
  Of<T, W> many = How::template start<Of<T, W>>();
  Of<T, kNative> some = How::template start<Of<T, kNative>>();
  // Short rows go to a single sum, one by one: in double precision, so that it does not matter how many they are.
  using Single = std::conditional_t<std::is_same_v<How, Sum> && std::is_same_v<T, float>, double, T>;
  Single one = How::template start<Single>();
  template <class V> LANES_INLINE void operator()(V v) {
    if constexpr (kWidth<V> == 1) one = How::template join<Single>(one, v);
    else if constexpr (kWidth<V> == W) many = How::join(many, v);
    else some = How::join(some, v);
  }
  template <size_t... k>
  LANES_INLINE auto joined(std::index_sequence<k...>) const {
    auto r = some;
    ((r = How::join(r, piece<k>(many, std::make_index_sequence<Of<T, kNative>::kParts>{}))), ...);
    return r;
  }
  LANES_INLINE T total() const {
    const auto lane = joined(std::make_index_sequence<W / kNative>{});
    Single r = one;
    for (int i = 0; i < kNative; ++i) r = How::template join<Single>(r, lane[i]);
    return static_cast<T>(r);
  }
};
template <class How, class V>
struct Across {  // each lane has a row of its own
  V many = How::template start<V>();
  LANES_INLINE void operator()(V v) { many = How::join(many, v); }
  LANES_INLINE V total() const { return many; }
};

// Calls `body(w, i)` for i in [begin, end): W lanes at a time, then one register, then one lane.
template <int W, class F>
LANES_INLINE void sweep(int64_t begin, int64_t end, const F& body) {
  int64_t i = begin;
  for (; i + W <= end; i += W) body(std::integral_constant<int, W>{}, i);
  if constexpr (W > kNative) {
    for (; i + kNative <= end; i += kNative) body(std::integral_constant<int, kNative>{}, i);
  }
  for (; i < end; ++i) body(std::integral_constant<int, 1>{}, i);
}

}  // namespace lanes
