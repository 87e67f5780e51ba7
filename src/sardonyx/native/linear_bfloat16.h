// Linear layers in bfloat16 with sums in float32. Denormal operands count as zero, as the instruction takes them.
#pragma once

namespace linear {

struct Bfloat16 {
  static constexpr int kGroup = 2;
  using Sum = float;
  struct Code {};  // nothing belongs to an encoded row

  static void encode(const float* row, int64_t depth, char* to, int64_t stride, Code&) {
    for (int64_t k = 0; k < depth; k += 2 * kNative, to += stride) {
      const auto low = some(row + k, depth - k), high = some(row + k + kNative, depth - k - kNative);
      const __m512bh line = _mm512_cvtne2ps_pbh(high, low);
      std::memcpy(to, &line, sizeof line);
    }
  }
  static void encode(const bfloat* row, int64_t depth, char* to, int64_t stride, Code&) {
    for (int64_t k = 0; k < depth; k += 2 * kNative, to += stride) {
      const int64_t here = std::min<int64_t>(depth - k, 2 * kNative);
      std::memcpy(to, row + k, here * sizeof(bfloat));
      std::memset(to + here * sizeof(bfloat), 0, kLine - here * sizeof(bfloat));
    }
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

  struct Weights {
    Weights(const Call&, const Columns&) {}
    Numbers numbers(const float* sums, const Code&) const { return row<kColumns>(sums); }
  };
};

ort::Status* run(const ort::Context* context, const Call& call) { return run_as<Bfloat16>(context, call); }

}  // namespace linear
