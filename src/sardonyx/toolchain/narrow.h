// Half precision and bfloat16 storage, computed in float.
#pragma once

#include <cstdint>
#include <cstring>

#define NARROW_INLINE inline __attribute__((always_inline))

namespace narrow {

template <class To, class From>
NARROW_INLINE To same_bits(From x) {
  static_assert(sizeof(To) == sizeof(From), "");
  To to;
  std::memcpy(&to, &x, sizeof to);
  return to;
}

NARROW_INLINE float float_of_half(uint16_t h) {
  const uint32_t sign = (h & 0x8000u) << 16, magnitude = h & 0x7fffu;
  if (magnitude >= 0x7c00u) return same_bits<float>(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  const float scaled = same_bits<float>(magnitude << 13) * same_bits<float>(0x77800000u);
  return same_bits<float>(sign | same_bits<uint32_t>(scaled));
}

NARROW_INLINE uint16_t half_of_float(float x) {
  const uint32_t u = same_bits<uint32_t>(x), sign = (u >> 16) & 0x8000u;
  uint32_t magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (magnitude < 0x38800000u) {  // a denormal: rounded by a float addition
    const float sum = same_bits<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (same_bits<uint32_t>(sum) - 0x3f000000u));
  }
  magnitude += 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u) >> 13));
}

NARROW_INLINE float float_of_bfloat16(uint16_t b) { return same_bits<float>(static_cast<uint32_t>(b) << 16); }

NARROW_INLINE uint16_t bfloat16_of_float(float x) {
  const uint32_t u = same_bits<uint32_t>(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((u >> 16) | 0x40u);
  return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

}  // namespace narrow
