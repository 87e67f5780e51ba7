// Linear layers in int8: each row of x as uint8 with its own scale and zero point, each column of w as int8 with its own
// scale. Sums are exact int32 for a depth of up to 2¹⁶. Images whose windows overlap have one scale for all windows.
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

  struct Limits {
    float least = 0, largest = 0;
    bool finite = true;

    void add(const Limits& other) {
      least = std::min(least, other.least);
      largest = std::max(largest, other.largest);
      finite &= other.finite;
    }
  };

  // x ≈ scale · (code − zero), where codes reach from the least number to the largest, zero among them. The scale is NaN
  // if a number is not finite.
  struct Quantizer {
    Code code;
    float inverse;

    explicit Quantizer(const Limits& limits) {
      const double range = static_cast<double>(limits.largest) - limits.least;
      constexpr double kLeastRange = 1e-35;  // or its inverse would not be a float
      const double scale = range < kLeastRange ? 1 : range / 255;
      inverse = limits.finite ? static_cast<float>(1 / scale) : 0;
      code.scale = limits.finite ? static_cast<float>(scale) : std::numeric_limits<float>::quiet_NaN();
      code.zero = limits.finite ? static_cast<int32_t>(std::nearbyint(-limits.least * inverse)) : 0;
    }
    template <class In>
    void operator()(const In* from, int64_t count, uint8_t* to) const {
      int64_t k = 0;
      for (; k + kNative <= count; k += kNative) quantize(load(from + k), to + k);
      for (; k < count; ++k) quantize(wide(from[k]), to + k);
    }

   private:
    void quantize(__m512 x, uint8_t* to) const {
      const __m512 scaled = _mm512_mul_ps(x, _mm512_set1_ps(inverse));
      const __m512i found = _mm512_add_epi32(_mm512_cvtps_epi32(scaled), _mm512_set1_epi32(code.zero));
      const __m128i bytes = _mm512_cvtusepi32_epi8(_mm512_max_epi32(found, _mm512_setzero_si512()));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
    }
    void quantize(float x, uint8_t* to) const {
      const int32_t found = _mm_cvtss_si32(_mm_set_ss(x * inverse)) + code.zero;
      *to = static_cast<uint8_t>(std::clamp(found, 0, 255));
    }
  };

  // Quantizes a row by its own limits, after its channels are scaled.
  template <class In>
  static void encode(const In* from, const Call& call, char* to, int64_t stride, Code& code) {
    if (!call.channels) return encode_row(from, call.depth, to, stride, code);
    const auto scaled = memory<float>(call.depth);
    for (int64_t k = 0; k < call.depth; ++k) scaled[k] = wide(from[k]) * call.channels[k];
    encode_row(static_cast<const float*>(scaled.get()), call.depth, to, stride, code);
  }
  // Copies a row that is quantized already.
  static void encode(const uint8_t* from, const Call& call, char* to, int64_t stride, Code&) {
    for (int64_t k = 0; k < call.depth; k += kLine, to += stride) {
      const int64_t count = std::min(kLine, call.depth - k);
      const __mmask64 some = count == kLine ? ~0ull : (1ull << count) - 1;
      _mm512_storeu_si512(to, _mm512_maskz_loadu_epi8(some, from + k));
    }
  }

  // Finds the extremes of some numbers, and whether all are finite.
  template <class In>
  static Limits limits(const In* from, int64_t count) {
    __m512 low = _mm512_setzero_ps(), high = low, rest = low;
    int64_t k = 0;
    for (; k + kNative <= count; k += kNative) {
      const __m512 x = load(from + k);
      low = _mm512_min_ps(low, x);
      high = _mm512_max_ps(high, x);
      rest = _mm512_add_ps(rest, _mm512_sub_ps(x, x));  // NaN, if x is not finite
    }
    Limits found{_mm512_reduce_min_ps(low), _mm512_reduce_max_ps(high), !_mm512_cmp_ps_mask(rest, rest, _CMP_UNORD_Q)};
    for (; k < count; ++k) {
      const float x = wide(from[k]);
      found.add({x, x, std::isfinite(x)});
    }
    return found;
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
    Weights(const Projection& projection, const Columns& columns)
        : scales(columns.read(projection.scales)), sums(columns.read(projection.sums)) {}
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
    const Quantizer quantize(limits(from, depth));
    code = quantize.code;
    for (int64_t k = 0; k < depth; k += kLine, to += stride) {
      const int64_t count = std::min(kLine, depth - k);
      if (count < kLine) std::memset(to, 0, kLine);
      quantize(from + k, count, reinterpret_cast<uint8_t*>(to));
    }
  }

  template <class In>
  static __m512 load(const In* from) { return reinterpret_cast<__m512>(row<kNative>(from).parts[0]); }
};

}  // namespace linear
