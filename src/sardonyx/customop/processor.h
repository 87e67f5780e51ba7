// Instruction sets that kernels are compiled for, checked before a kernel runs.
#pragma once

namespace sardonyx::processor {

enum Ability : uint32_t {
  kAvx = 1, kAvx2 = 2, kFma = 4, kBmi = 8, kBmi2 = 16, kFma4 = 32, kXop = 64,
  kAvx512f = 128, kAvx512bw = 256, kAvx512dq = 512, kAvx512vl = 1024,
};

constexpr uint32_t kCompiledTo = 0
#ifdef __AVX__
    | kAvx
#endif
#ifdef __AVX2__
    | kAvx2
#endif
#ifdef __FMA__
    | kFma
#endif
#ifdef __BMI__
    | kBmi
#endif
#ifdef __BMI2__
    | kBmi2
#endif
#ifdef __FMA4__
    | kFma4
#endif
#ifdef __XOP__
    | kXop
#endif
#ifdef __AVX512F__
    | kAvx512f
#endif
#ifdef __AVX512BW__
    | kAvx512bw
#endif
#ifdef __AVX512DQ__
    | kAvx512dq
#endif
#ifdef __AVX512VL__
    | kAvx512vl
#endif
    ;

extern const uint32_t kNeeded;  // by the kernels; the check itself is compiled for any processor

// Returns the first of these that this processor lacks, or null.
inline const char* missing([[maybe_unused]] uint32_t needed) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_cpu_init();
  if ((needed & kAvx) && !__builtin_cpu_supports("avx")) return "AVX";
  if ((needed & kAvx2) && !__builtin_cpu_supports("avx2")) return "AVX2";
  if ((needed & kFma) && !__builtin_cpu_supports("fma")) return "FMA";
  if ((needed & kBmi) && !__builtin_cpu_supports("bmi")) return "BMI";
  if ((needed & kBmi2) && !__builtin_cpu_supports("bmi2")) return "BMI2";
  if ((needed & kFma4) && !__builtin_cpu_supports("fma4")) return "FMA4";
  if ((needed & kXop) && !__builtin_cpu_supports("xop")) return "XOP";
  if ((needed & kAvx512f) && !__builtin_cpu_supports("avx512f")) return "AVX512F";
  if ((needed & kAvx512bw) && !__builtin_cpu_supports("avx512bw")) return "AVX512BW";
  if ((needed & kAvx512dq) && !__builtin_cpu_supports("avx512dq")) return "AVX512DQ";
  if ((needed & kAvx512vl) && !__builtin_cpu_supports("avx512vl")) return "AVX512VL";
#endif
  return nullptr;
}

}  // namespace sardonyx::processor
