// The part of C++'s standard library that device code uses: NVRTC has none. Every standard header includes this one.
#pragma once

typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;

namespace std {

template <class T, class U> constexpr bool is_same_v = false;
template <class T> constexpr bool is_same_v<T, T> = true;
template <class T, class... Us> constexpr bool is_one_of_v = (is_same_v<T, Us> || ...);
template <class T> constexpr bool is_floating_point_v = is_one_of_v<T, float, double>;
template <class T>
constexpr bool is_integral_v = is_one_of_v<T, bool, char, signed char, unsigned char, short, unsigned short, int, unsigned,
                                           long, unsigned long, long long, unsigned long long>;
template <class T> constexpr bool is_arithmetic_v = is_integral_v<T> || is_floating_point_v<T>;
template <class T, bool = is_arithmetic_v<T>> constexpr bool is_signed_v = T(-1) < T(0);
template <class T> constexpr bool is_signed_v<T, false> = false;
template <class T> constexpr bool is_unsigned_v = is_arithmetic_v<T> && !is_signed_v<T>;

template <bool, class T, class> struct conditional { using type = T; };
template <class T, class U> struct conditional<false, T, U> { using type = U; };
template <bool condition, class T, class U> using conditional_t = typename conditional<condition, T, U>::type;
template <bool, class T> struct enable_if {};
template <class T> struct enable_if<true, T> { using type = T; };
template <bool condition, class T = void> using enable_if_t = typename enable_if<condition, T>::type;
template <class T> struct remove_const { using type = T; };
template <class T> struct remove_const<const T> { using type = T; };
template <class T> using remove_const_t = typename remove_const<T>::type;

template <class T>
struct numeric_limits {  // of integers
  static constexpr bool has_infinity = false;
  static constexpr T min() { return is_signed_v<T> ? T(T(1) << (8 * sizeof(T) - 1)) : T(0); }
  static constexpr T max() { return T(~min()); }
  static constexpr T lowest() { return min(); }
  static constexpr T infinity() { return T(0); }
  static constexpr T quiet_NaN() { return T(0); }
};
template <>
struct numeric_limits<float> {
  static constexpr bool has_infinity = true;
  static constexpr float max() { return 3.40282346638528859812e+38f; }
  static constexpr float lowest() { return -max(); }
  static float infinity() { return __int_as_float(0x7f800000); }
  static float quiet_NaN() { return __int_as_float(0x7fc00000); }
};
template <>
struct numeric_limits<double> {
  static constexpr bool has_infinity = true;
  static constexpr double max() { return 1.79769313486231570815e+308; }
  static constexpr double lowest() { return -max(); }
  static double infinity() { return __longlong_as_double(0x7ff0000000000000); }
  static double quiet_NaN() { return __longlong_as_double(0x7ff8000000000000); }
};

template <class T> constexpr T min(T a, T b) { return b < a ? b : a; }
template <class T> constexpr T max(T a, T b) { return a < b ? b : a; }

using ::acos;
using ::acosh;
using ::asin;
using ::asinh;
using ::atan;
using ::atanh;
using ::ceil;
using ::cos;
using ::cosh;
using ::erf;
using ::exp;
using ::fabs;
using ::floor;
using ::fmod;
using ::log;
using ::log1p;
using ::nearbyint;
using ::sin;
using ::sinh;
using ::sqrt;
using ::tan;
using ::tanh;
template <class T>
auto pow(T a, T b) {
  if constexpr (is_floating_point_v<T>) return ::pow(a, b);
  else return ::pow(static_cast<double>(a), static_cast<double>(b));
}

}  // namespace std
