// Instructions of a GPU that C++ has no words for.
#pragma once

namespace narrow {

__device__ __forceinline__ float float_of_half(uint16_t h) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
  return x;
}
__device__ __forceinline__ uint16_t half_of_float(float x) {
  uint16_t h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
  return h;
}
__device__ __forceinline__ float float_of_bfloat16(uint16_t b) { return __uint_as_float(static_cast<uint32_t>(b) << 16); }
__device__ __forceinline__ uint16_t bfloat16_of_float(float x) {
#if __CUDA_ARCH__ >= 800
  uint16_t b;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(b) : "f"(x));
  return b;
#else
  const uint32_t u = __float_as_uint(x);
  if (x != x) return static_cast<uint16_t>((u >> 16) | 0x40u);
  return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
#endif
}

}  // namespace narrow

namespace fast {

// Off by 2 + 1.2·|x| ulp at most.
__device__ __forceinline__ float exponential(float x) { return __expf(x); }
// Off by 2 ulp at most.
__device__ __forceinline__ float divided(float a, float b) {
  float q;
  asm("div.full.f32 %0, %1, %2;" : "=f"(q) : "f"(a), "f"(b));
  return q;
}

// Off by 2 ulp at most.
__device__ __forceinline__ float inverse_root(float x) { return rsqrtf(x); }

}  // namespace fast
