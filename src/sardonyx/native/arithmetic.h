// Arithmetic on one or several lanes, shared by all targets and built on their lane primitives.
//
// A target defines `LANES_INLINE`, `all`, `each`, `compare`, `select`, `convert`, `lesser` and `greater` before it.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace lanes {

// Booleans

template <class V> LANES_INLINE auto less(V a, V b) { return compare(a, b, [](auto x, auto y) { return x < y; }); }
template <class V> LANES_INLINE auto less_equal(V a, V b) { return compare(a, b, [](auto x, auto y) { return x <= y; }); }
template <class V> LANES_INLINE auto equal(V a, V b) { return compare(a, b, [](auto x, auto y) { return x == y; }); }
template <class V> LANES_INLINE auto is_nan(V a) { return compare(a, a, [](auto x, auto y) { return x != y; }); }
template <class V> LANES_INLINE auto is_inf(V a) {
  const auto top = std::numeric_limits<ScalarOf<V>>::infinity();  // no constant with NVRTC
  return equal(a, all<V>(top)) | equal(a, all<V>(-top));
}
// 0 for −0: gcc 12 makes trunc of a float that is cast to an integer and back, which keeps the sign of −0.5.
template <class V>
LANES_INLINE V positive_zero(V v) { return v + V{}; }
template <class To, class M>
LANES_INLINE auto from_mask(M m) { return convert<To>(m & 1); }
template <class V>
LANES_INLINE auto to_mask(V v) { return compare(v, V{}, [](auto x, auto y) { return x != y; }); }

// Arithmetic

// Truncates a result that C++ promoted to int.
template <class T, class V> LANES_INLINE auto truncated(V v) {
  if constexpr (kWidth<V> == 1) return static_cast<T>(v);
  else return v;
}
// Integer division truncates; x / 0 is 0, and the smallest number / −1 is itself.
template <class V> LANES_INLINE V divided(V a, V b) {
  if constexpr (std::is_floating_point_v<ScalarOf<V>>) return a / b;
  else return each(a, b, [](auto x, auto y) {
    using T = decltype(x);
    if (y == 0) return T{0};
    if (std::is_signed_v<T> && y == static_cast<T>(-1)) return static_cast<T>(-x);
    return static_cast<T>(x / y);
  });
}
template <class V> LANES_INLINE V minimum(V a, V b) { return select(is_nan(a), a, lesser(a, b)); }
template <class V> LANES_INLINE V maximum(V a, V b) { return select(is_nan(a), a, greater(a, b)); }
template <class V> LANES_INLINE V relu(V a) { return greater(V{}, a); }
template <class V> LANES_INLINE V sign(V a) {
  const V one = all<V>(1);
  const V negative = std::is_unsigned_v<ScalarOf<V>> ? V{} : V(-one);
  return select(less(V{}, a), one, select(less(a, V{}), negative, select(is_nan(a), a, V{})));  // sign(−0) is 0
}
template <class V> LANES_INLINE V square_root(V a) { return each(a, [](auto x) { return std::sqrt(x); }); }
template <class V> LANES_INLINE V floored(V a) { return each(a, [](auto x) { return std::floor(x); }); }
template <class V> LANES_INLINE V ceiled(V a) { return each(a, [](auto x) { return std::ceil(x); }); }
template <class V> LANES_INLINE V rounded(V a) { return each(a, [](auto x) { return std::nearbyint(x); }); }
// The remainder: with the sign of the divisor, or of the dividend as in C.
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
// gcc 12 vectorizes pow(x, 0.5) as sqrt(x), which differs for −0 and −∞.
template <class V> LANES_INLINE V power(V a, V b) {
  return each(a, b, [](auto x, auto y) {
    using T = decltype(x);
    const auto top = std::numeric_limits<T>::infinity();
    if (y == static_cast<T>(0.5)) return x == -top ? top : static_cast<T>(std::sqrt(x + T{0}));
    return static_cast<T>(std::pow(x, y));
  });
}

// Odd functions with limits ±1: x·p(x²)/q(x²), fitted to minimize the relative error until the nearest float is ±1. The
// target gives its division.
template <class V>
LANES_INLINE V within(V x, float most) { return greater(all<V>(-most), lesser(all<V>(most), x)); }

template <class V, class Divide>
LANES_INLINE V rational_tangent(V x, Divide divide) {
  x = within(x, 9.0f);
  const V s = x * x;
  V p = all<V>(1.33549083e-08f);
  p = p * s + 2.06093009e-05f;
  p = p * s + 0.00349560333f;
  p = p * s + 0.133810386f;
  p = p * s + 1.0f;
  V q = all<V>(7.77667083e-07f);
  q = q * s + 0.000328565831f;
  q = q * s + 0.0258770417f;
  q = q * s + 0.467143536f;
  q = q * s + 1.0f;
  return within(divide(V(x * p), q), 1.0f);
}

template <class V, class Divide>
LANES_INLINE V rational_error(V x, Divide divide) {
  x = within(x, 3.9192059f);
  const V s = x * x;
  V p = all<V>(0.000230354752f);
  p = p * s + 0.00357932388f;
  p = p * s + 0.0514928959f;
  p = p * s + 0.189673886f;
  p = p * s + 1.12837911f;
  V q = all<V>(-1.12254874e-07f);
  q = q * s + 2.3161736e-05f;
  q = q * s + 0.0010534121f;
  q = q * s + 0.0144229271f;
  q = q * s + 0.112781323f;
  q = q * s + 0.501426518f;
  q = q * s + 1.0f;
  return within(divide(V(x * p), q), 1.0f);
}

// Reductions: one value per lane, combined at the end.

struct Sum {
  template <class V> LANES_INLINE static V start() { return V{}; }
  template <class V> LANES_INLINE static V join(V a, V b) { return a + b; }
};
struct Product {
  template <class V> LANES_INLINE static V start() { return all<V>(1); }
  template <class V> LANES_INLINE static V join(V a, V b) { return a * b; }
};
struct Largest {
  template <class V> LANES_INLINE static V start() {
    using L = std::numeric_limits<ScalarOf<V>>;
    return all<V>(L::has_infinity ? -L::infinity() : L::lowest());
  }
  template <class V> LANES_INLINE static V join(V a, V b) { return maximum(b, a); }
};
struct Smallest {
  template <class V> LANES_INLINE static V start() {
    using L = std::numeric_limits<ScalarOf<V>>;
    return all<V>(L::has_infinity ? L::infinity() : L::max());
  }
  template <class V> LANES_INLINE static V join(V a, V b) { return minimum(b, a); }
};

}  // namespace lanes
