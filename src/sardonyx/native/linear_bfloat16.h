// Linear layers in bfloat16 with sums in float32. Denormal operands count as zero, as the instruction takes them.
#pragma once

namespace linear {

struct Bfloat16 {
  static constexpr int kGroup = 2;
  static constexpr bool kRoundsElements = true;  // of x each by itself, to bfloat16
  using Sum = float;
  struct Code {};  // nothing belongs to an encoded row

  static int64_t steps(const Call& call) { return (call.depth + kGroup - 1) / kGroup; }
  static int64_t lines(const Call& call) { return parts(steps(call), kSteps); }
  static int64_t panel_bytes(const Call& call) { return steps(call) * kStepBytes; }

  template <class In>
  static void encode(const In* row, const Call& call, char* to, int64_t stride, Code&) {
    for (int64_t k = 0; k < call.depth; k += 2 * kNative, to += stride) {
      const auto line = encoded(row + k, call.depth - k);
      std::memcpy(to, &line, sizeof line);
    }
  }
  // A cache line of a row, with zeros after its end.
  static __m512bh encoded(const float* from, int64_t count) {
    return _mm512_cvtne2ps_pbh(some(from + kNative, count - kNative), some(from, count));
  }
  static __m512i encoded(const bfloat* from, int64_t count) {
    if (count >= 2 * kNative) return _mm512_loadu_si512(from);
    return _mm512_maskz_loadu_epi16((1u << count) - 1, from);
  }
  static __m512 some(const float* from, int64_t count) {
    if (count >= kNative) return _mm512_loadu_ps(from);
    const int lanes = static_cast<int>(std::max<int64_t>(count, 0));
    return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << lanes) - 1), from);
  }

  static auto everywhere(int32_t pair) { return _mm512_set1_epi32(pair); }
  LANES_INLINE static __m512 add(__m512 sum, __m512i row, __m512 weights) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(row), reinterpret_cast<__m512bh>(weights));
  }

  template <int R, int P>
  static void multiply(const char* x, const Panels& panels, int64_t steps, float* sums) {
    multiply_steps<Bfloat16, R, P>(x, panels, steps, sums);
  }

  struct Weights {
    Weights(const Projection&, const Columns&) {}
    Numbers numbers(const float* sums, const Code&) const { return row<kColumns>(sums); }
  };
};

}  // namespace linear
