// Vectorized functions without processor instructions; reductions over lanes; and sweeps along rows.
#pragma once

namespace lanes {

template <class V> LANES_INLINE V absolute(V a) {
  if constexpr (std::is_unsigned_v<ScalarOf<V>>) return a;
  else if constexpr (std::is_floating_point_v<ScalarOf<V>>) {
    using B = BitsOf<V>;
    return bits<V>(bits<B>(a) & all<B>(std::numeric_limits<ScalarOf<B>>::max()));
  } else return select(less(a, V{}), V(-a), a);
}

template <class V> constexpr bool kFloat = std::is_same_v<ScalarOf<V>, float>;

constexpr float kLeastExponent = -87.3365f;

// p · 2ⁿ, and zero where the result would be a denormal.
template <class V>
LANES_INLINE V times_two_to(V p, V n, V x) {
#if defined(__AVX512F__)
  if constexpr (kWidth<V> > 1) {
    return by_part<V>([](auto power, auto by, auto given) {
      const auto large = _mm512_cmp_ps_mask(given, _mm512_set1_ps(kLeastExponent), _CMP_NLT_UQ);
      return static_cast<typename V::Part>(_mm512_maskz_scalef_ps(large, power, by));
    }, p, n, x);
  }
#endif
  using I = BitsOf<V>;  // in two steps, for a correct infinity
  const I k = bits<I>(V(n + 12582912.0f)) - 0x4b400000, low = k >> 1, high = k - low;
  return select(less(x, all<V>(kLeastExponent)), V{}, V(p * bits<V>((low + 127) << 23) * bits<V>((high + 127) << 23)));
}

// 2ⁿ · (1 + r + …) with x = n·ln 2 + r. Denormal results are zero: they take processors a hundred times as long, and every
// masked attention score would be one.
template <class V>
LANES_INLINE V exponential(V x) {
  if constexpr (!kFloat<V>) return each(x, [](auto v) { return std::exp(v); });
  else {
    x = lesser(all<V>(89.0f), x);
    const V magic = all<V>(12582912.0f);
    const V n = (x * 1.44269504f + magic) - magic;
    const V r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    V p = all<V>(0.00139560621f);
    p = p * r + 0.00837513496f;
    p = p * r + 0.0416660835f;
    p = p * r + 0.166664154f;
    p = p * r + 0.500000017f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return times_two_to(p, n, x);
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

// log(1 + x), accurate for small x.
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
  const V one = all<V>(1);
  if constexpr (kFloat<V>) return one / (one + exponential(V(-x)));
  else {
    const V e = exponential(V(-absolute(x)));
    return select(less(x, V{}), e, one) / (one + e);
  }
}

template <class V>
LANES_INLINE V hyperbolic_tangent(V x) {
  if constexpr (!kFloat<V>) return each(x, [](auto v) { return std::tanh(v); });
  else return rational_tangent(x, [](V p, V q) { return p / q; });
}

template <class V>
LANES_INLINE V error_function(V x) {
  if constexpr (!kFloat<V>) return each(x, [](auto v) { return std::erf(v); });
  else return rational_error(x, [](V p, V q) { return p / q; });
}

template <int by, class P, size_t... i>
LANES_INLINE P turned(P x, std::index_sequence<i...>) { return __builtin_shufflevector(x, x, (i + by) % sizeof...(i)...); }

// Reduces the lanes of one register by halves; the first lane has the result.
template <class How, int by, class T>
LANES_INLINE T folded(Pack<T, kNative> v) {
  using V = Pack<T, kNative>;
  if constexpr (by > 0) {
    constexpr auto lanes = std::make_index_sequence<V::kLong>{};
    return folded<How, by / 2, T>(How::join(v, by_part<V>([](auto x) { return turned<by>(x, decltype(lanes){}); }, v)));
  } else {
    T r = v[0];
    for (int part = 1; part < V::kParts; ++part) r = How::template join<T>(r, v[part * V::kLong]);
    return r;
  }
}

template <size_t at, class T, int W, size_t... k>
LANES_INLINE auto piece(const Pack<T, W>& v, std::index_sequence<k...>) {  // the lanes of one register
  return Pack<T, kNative>{{v.parts[at * sizeof...(k) + k]...}};
}

// Float sums are accumulated in blocks of this many numbers per lane, so that the error does not grow with their length.
constexpr int64_t kMostAdded = 128;
template <class How, class T>
constexpr bool kPutBy = std::is_same_v<How, Sum> && std::is_same_v<T, float>;

template <class How, class T, int W>
struct Along {  // lanes along a row
  Of<T, W> many = How::template start<Of<T, W>>();
  Of<T, kNative> some = How::template start<Of<T, kNative>>();
  using Single = std::conditional_t<kPutBy<How, T>, double, T>;
  Single one = How::template start<Single>();
  int64_t added = 0;
  template <class V> LANES_INLINE void operator()(V v) {
    if constexpr (kWidth<V> == 1) one = How::template join<Single>(one, v);
    else if constexpr (kWidth<V> == W) many = How::join(many, v);
    else some = How::join(some, v);
  }
  LANES_INLINE void pause(int64_t count) {  // after `count` numbers
    if ((added += count / W + 2) < kMostAdded) return;
    one = How::template join<Single>(one, lanes());
    *this = Along{How::template start<Of<T, W>>(), How::template start<Of<T, kNative>>(), one};
  }
  template <size_t... k>
  LANES_INLINE auto joined(std::index_sequence<k...>) const {
    auto r = some;
    ((r = How::join(r, piece<k>(many, std::make_index_sequence<Of<T, kNative>::kParts>{}))), ...);
    return r;
  }
  LANES_INLINE T lanes() const {
    return folded<How, Of<T, kNative>::kLong / 2, T>(joined(std::make_index_sequence<W / kNative>{}));
  }
  LANES_INLINE T total() const { return static_cast<T>(How::template join<Single>(one, lanes())); }
};
template <class How, class V>
struct Across {  // one row per lane
  using T = ScalarOf<V>;
  using Long = std::conditional_t<kPutBy<How, T>, double, T>;
  V many = How::template start<V>();
  Of<Long, kWidth<V>> before = How::template start<Of<Long, kWidth<V>>>();
  int64_t added = 0;
  LANES_INLINE void operator()(V v) { many = How::join(many, v); }
  LANES_INLINE void pause() {
    if (++added < kMostAdded) return;
    before = How::join(before, convert<Long>(many));
    many = How::template start<V>();
    added = 0;
  }
  LANES_INLINE V total() const { return convert<T>(How::join(before, convert<Long>(many))); }
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
