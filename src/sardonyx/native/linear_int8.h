// Linear layers in int8: each row of x as uint8 with its own scale and zero point, each column of w as int8 with its own
// scale. Sums are exact int32 for a depth of up to 2¹⁶.
#pragma once

namespace linear {

struct Int8 {
  static constexpr int kGroup = 4;
  static constexpr bool kRoundsElements = false;  // rows have scales of their own
  using Sum = int32_t;
  struct Code {
    float scale;
    int32_t zero;
  };

  static int64_t steps(const Call& call) { return (call.depth + kGroup - 1) / kGroup; }
  static int64_t lines(const Call& call) { return parts(steps(call), kSteps); }
  static int64_t panel_bytes(const Call& call) { return steps(call) * kStepBytes; }

  // x ≈ scale · (code − zero), where codes reach from the least number of the row to its largest, zero among them.
  // A row with a number that is not finite gets the scale NaN.
  template <class In>
  static void encode(const In* from, const Call& call, char* to, int64_t stride, Code& code) {
    if (!call.channels) return encode_row(from, call.depth, to, stride, code);
    const auto scaled = memory<float>(call.depth);
    for (int64_t k = 0; k < call.depth; ++k) scaled[k] = wide(from[k]) * call.channels[k];
    encode_row(static_cast<const float*>(scaled.get()), call.depth, to, stride, code);
  }

  static auto everywhere(int32_t four) { return _mm512_set1_epi32(four); }
  template <class V>
  LANES_INLINE static V add(V sum, __m512i row, V weights) {
    const auto added = _mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum), row, reinterpret_cast<__m512i>(weights));
    return reinterpret_cast<V>(added);
  }

  template <int R, int P>
  static void multiply(const char* x, const Panels& panels, int64_t steps, int32_t* sums) {
    multiply_steps<Int8, R, P>(x, panels, steps, sums);
  }

  struct Weights {
    Weights(const Call& call, const Columns& columns)
        : scales(columns.read(call.scales)), sums(columns.read(call.sums)) {}
    Numbers numbers(const int32_t* products, const Code& code) const {
      const auto exact = row<kColumns>(products) - sums * code.zero;
      return convert<float>(exact) * (scales * code.scale);
    }
    Numbers scales;
    Pack<int32_t, kColumns> sums;
  };

 private:
  template <class In>
  static void encode_row(const In* from, int64_t depth, char* to, int64_t stride, Code& code) {
    float least = 0, largest = 0;
    const bool finite = limits(from, depth, least, largest);
    const double range = static_cast<double>(largest) - least;
    constexpr double kLeastRange = 1e-35;  // or its inverse would not be a float
    const double scale = range < kLeastRange ? 1 : range / 255;
    const float inverse = static_cast<float>(1 / scale);
    code.scale = finite ? static_cast<float>(scale) : std::numeric_limits<float>::quiet_NaN();
    code.zero = finite ? static_cast<int32_t>(std::nearbyint(-least * inverse)) : 0;
    const Quantizer quantize{finite ? inverse : 0.0f, code.zero};
    int64_t k = 0;
    for (; k + kLine <= depth; k += kLine, to += stride) {
      for (int i = 0; i < kLine; i += kNative) quantize(load(from + k + i), to + i);
    }
    if (k == depth) return;
    std::memset(to, 0, kLine);
    for (; k < depth; ++k, ++to) quantize(wide(from[k]), to);
  }

  template <class In>
  static __m512 load(const In* from) { return reinterpret_cast<__m512>(row<kNative>(from).parts[0]); }

  struct Quantizer {
    float inverse;
    int32_t zero;

    void operator()(__m512 x, char* to) const {
      const __m512i code = _mm512_add_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(x, _mm512_set1_ps(inverse))), _mm512_set1_epi32(zero));
      const __m128i bytes = _mm512_cvtusepi32_epi8(_mm512_max_epi32(code, _mm512_setzero_si512()));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
    }
    void operator()(float x, char* to) const {
      const int32_t code = _mm_cvtss_si32(_mm_set_ss(x * inverse)) + zero;
      *to = static_cast<char>(std::clamp(code, 0, 255));
    }
  };

  // Finds the extremes of a row, and whether all of it is finite.
  template <class In>
  static bool limits(const In* from, int64_t depth, float& least, float& largest) {
    __m512 low = _mm512_setzero_ps(), high = low, rest = low;
    int64_t k = 0;
    for (; k + kNative <= depth; k += kNative) {
      const __m512 x = load(from + k);
      low = _mm512_min_ps(low, x);
      high = _mm512_max_ps(high, x);
      rest = _mm512_add_ps(rest, _mm512_sub_ps(x, x));  // NaN, if x is not finite
    }
    bool finite = _mm512_cmp_ps_mask(rest, rest, _CMP_UNORD_Q) == 0;
    least = _mm512_reduce_min_ps(low);
    largest = _mm512_reduce_max_ps(high);
    for (; k < depth; ++k) {
      const float x = wide(from[k]);
      least = std::min(least, x);
      largest = std::max(largest, x);
      finite &= std::isfinite(x);
    }
    return finite;
  }
};

}  // namespace linear
