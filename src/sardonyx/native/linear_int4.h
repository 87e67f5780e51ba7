// Linear layers with weights of four bits, quantized in blocks along the depth, that are products in bfloat16.
//
// A panel is a row of blocks. Each has 32 scales, with zero points also 32 shifts, and then the weights: a cache line for
// two steps, of which each 16-bit lane has four weights, those of columns 0–15 and 16–31 in the one and the other step. A
// weight's code c stands for scale · (c − 8) + shift.
#pragma once

namespace linear {

struct Int4 : Bfloat16 {
  static constexpr int64_t kSumsOfLine = kLine / sizeof(float);

  static int64_t blocks(const Call& call) { return (call.depth + call.block - 1) / call.block; }
  static int64_t steps(const Call& call) { return blocks(call) * call.block / kGroup; }
  // After the row itself, the sums of its blocks.
  static int64_t lines(const Call& call) { return steps(call) / kSteps + parts(blocks(call), kSumsOfLine); }
  static int64_t panel_bytes(const Call& call) {
    return blocks(call) * (header_bytes(call.has_zero_points) + call.block / 2 * kColumns);
  }
  static int64_t header_bytes(bool has_zero_points) { return (has_zero_points ? 2 : 1) * kColumns * sizeof(float); }

  template <class In>
  static void encode(const In* row, const Call& call, char* to, int64_t stride, Code&) {
    char* sums = to + steps(call) / kSteps * stride;
    const int64_t many = blocks(call);
    int64_t left = call.depth;
    for (int64_t block = 0; block < many; ++block) {
      __m512 sum = _mm512_setzero_ps();
      for (int64_t k = 0; k < call.block; k += 2 * kNative, row += 2 * kNative, left -= 2 * kNative, to += stride) {
        const auto line = left > 0 ? reinterpret_cast<__m512i>(encoded(row, left)) : _mm512_setzero_si512();
        sum = add(sum, _mm512_set1_epi16(0x3f80), reinterpret_cast<__m512>(line));  // the line times 1
        std::memcpy(to, &line, sizeof line);
      }
      const float total = _mm512_reduce_add_ps(sum);
      std::memcpy(sums + block / kSumsOfLine * stride + block % kSumsOfLine * sizeof total, &total, sizeof total);
    }
  }

  template <int R, int P>
  static void multiply(const char* x, const Panels& panels, int64_t steps, float* sums) {
    std::memset(sums, 0, R * P * kColumns * sizeof(float));
    const int64_t header = header_bytes(panels.has_zero_points);
    const char *w = panels.data, *ahead = panels.ahead, *row_sums = x + steps / kSteps * R * kLine;
    for (int64_t block = 0; block * panels.block < steps; ++block) {
      __m512 sum[R][2 * P] = {};
      const char* const scales = w;
      w += header;
      for (int64_t step = 0; step < panels.block; step += kSteps, x += R * kLine) {
        for (int i = 0; i < panels.lines_ahead; ++i, ahead += kLine) __builtin_prefetch(ahead, 0, 2);
        for (int pair = 0; pair < kSteps / 2; ++pair, w += kLine) add_two_steps<R, P>(x + 8 * pair, w, panels.bytes, sum);
      }
      const char* const from = row_sums + block / kSumsOfLine * R * kLine + block % kSumsOfLine * sizeof(float);
      add_scaled<R, P>(sum, scales, panels, from, sums);
    }
  }

 private:
  template <int R, int P>
  LANES_INLINE static void add_two_steps(const char* x, const char* w, int64_t panel_bytes, __m512 (&sum)[R][2 * P]) {
    __m512i line[P];
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
      std::memcpy(&line[p], w + p * panel_bytes, sizeof line[p]);
      if constexpr (P > 1) __builtin_prefetch(w + p * panel_bytes + 4096);
    }
#pragma GCC unroll 2
    for (int step = 0; step < 2; ++step) {
      __m512 weights[2 * P];
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) {
        weights[2 * p] = decoded(_mm512_srli_epi16(line[p], 8 * step));
        weights[2 * p + 1] = decoded(_mm512_srli_epi16(line[p], 8 * step + 4));
      }
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        int32_t pair;
        std::memcpy(&pair, x + r * kLine + 4 * step, sizeof pair);
        const auto row = everywhere(pair);
#pragma GCC unroll 8
        for (int p = 0; p < 2 * P; ++p) sum[r][p] = add(sum[r][p], row, weights[p]);
      }
    }
  }

  // The weights of the lowest four bits of each lane; the fifth bit, which the table's index has too, does not matter.
  LANES_INLINE static __m512 decoded(__m512i codes) {
    alignas(64) static constexpr uint16_t kValues[32] = {
        0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000,
        0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040,
        0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};  // −8 … 7 in bfloat16, twice
    return reinterpret_cast<__m512>(_mm512_permutexvar_epi16(codes, _mm512_load_si512(kValues)));
  }

  template <int R, int P>
  LANES_INLINE static void add_scaled(const __m512 (&sum)[R][2 * P], const char* scales, const Panels& panels,
                                      const char* row_sums, float* sums) {
#pragma GCC unroll 8
    for (int p = 0; p < 2 * P; ++p) {
      const float* const scale = reinterpret_cast<const float*>(scales + p / 2 * panels.bytes) + p % 2 * kNative;
      const __m512 by = _mm512_loadu_ps(scale);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        float* const to = sums + (p / 2 * R + r) * kColumns + p % 2 * kNative;
        __m512 total = _mm512_fmadd_ps(sum[r][p], by, _mm512_loadu_ps(to));
        if (panels.has_zero_points) {
          float row_sum;
          std::memcpy(&row_sum, row_sums + r * kLine, sizeof row_sum);
          total = _mm512_fmadd_ps(_mm512_set1_ps(row_sum), _mm512_loadu_ps(scale + kColumns), total);
        }
        _mm512_storeu_ps(to, total);
      }
    }
  }
};

}  // namespace linear
