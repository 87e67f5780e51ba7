// cuBLASLt and CUDA's driver on the CPU, as far as cuda_products.h uses them: tests run products on any machine.
//
// Matrices are column-major. Sums are accumulated in double and rounded once, and memory that is not aligned is an error.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <cstdlib>
#include <map>
#include <string>

#include "narrow.h"

namespace imitated {

struct Layout {
  int type;
  uint64_t rows, columns;
  int64_t stride;
};
struct Product {
  int transposed = 0, epilogue = 1;
  const void* bias = nullptr;
};

constexpr int kBfloat = 14, kTransA = 3, kEpilogue = 7, kBiasPointer = 8, kEpilogueBias = 4, kProposals = 2;

inline double read(const void* data, int type, size_t index) {
  const uint16_t bits = static_cast<const uint16_t*>(data)[index];
  return type == kBfloat ? narrow::float_of_bfloat16(bits) : narrow::float_of_half(bits);
}

inline int set(Product* product, int attribute, const void* value, size_t) {
  if (attribute == kTransA) product->transposed = *static_cast<const int*>(value);
  if (attribute == kEpilogue) product->epilogue = *static_cast<const int*>(value);
  if (attribute == kBiasPointer) product->bias = *static_cast<const void* const*>(value);
  return 0;
}

inline int multiply(void*, Product* product, const float* alpha, const void* a, Layout* a_layout, const void* b,
                    Layout* b_layout, const float* beta, const void* c, Layout* c_layout, void* d, Layout* d_layout,
                    const void*, void*, size_t, void*) {
  const void* bias = product->epilogue == kEpilogueBias ? product->bias : nullptr;
  for (const void* data : {a, b, c, static_cast<const void*>(d), bias}) {
    if (reinterpret_cast<uintptr_t>(data) % 16) return 7;
  }
  const int type = d_layout->type;
  for (uint64_t column = 0; column < d_layout->columns; ++column) {
    for (uint64_t row = 0; row < d_layout->rows; ++row) {
      double sum = 0;
      for (uint64_t k = 0; k < b_layout->rows; ++k) {
        const size_t at = product->transposed ? k + row * a_layout->stride : row + k * a_layout->stride;
        sum += read(a, type, at) * read(b, type, k + column * b_layout->stride);
      }
      sum *= *alpha;
      if (*beta != 0) sum += *beta * read(c, type, row + column * c_layout->stride);
      if (bias) sum += read(bias, type, row);
      const float rounded = static_cast<float>(sum);
      static_cast<uint16_t*>(d)[row + column * d_layout->stride] =
          type == kBfloat ? narrow::bfloat16_of_float(rounded) : narrow::half_of_float(rounded);
    }
  }
  return 0;
}

inline int allocate(unsigned long long* data, size_t bytes) {
  *data = reinterpret_cast<unsigned long long>(aligned_alloc(64, (bytes + 63) / 64 * 64));
  return 0;
}

inline void* symbol(const char* name) {
  static auto nothing = +[] { return 0; };
  static const std::map<std::string, void*> symbols = {
      {"cuStreamIsCapturing", (void*)+[](void*, int* capturing) { return *capturing = 0; }},
      {"cuEventElapsedTime", (void*)+[](float* time, void*, void*) { return *time = 1, 0; }},
      {"cuMemAlloc_v2", (void*)allocate},
      {"cuMemAllocAsync", (void*)+[](unsigned long long* data, size_t bytes, void*) { return allocate(data, bytes); }},
      {"cuMemFreeAsync", (void*)+[](unsigned long long data, void*) { return free((void*)data), 0; }},
      {"cuMemcpyDtoDAsync_v2", (void*)+[](unsigned long long to, unsigned long long from, size_t bytes, void*) {
         return memcpy((void*)to, (void*)from, bytes), 0;
       }},
      {"cublasLtMatmulDescCreate", (void*)+[](Product** made, int, int) { return *made = new Product, 0; }},
      {"cublasLtMatmulDescSetAttribute", (void*)set},
      {"cublasLtMatmulDescDestroy", (void*)+[](Product* made) { return delete made, 0; }},
      {"cublasLtMatrixLayoutCreate",
       (void*)+[](Layout** made, int type, uint64_t rows, uint64_t columns, int64_t stride) {
         return *made = new Layout{type, rows, columns, stride}, 0;
       }},
      {"cublasLtMatrixLayoutDestroy", (void*)+[](Layout* made) { return delete made, 0; }},
      {"cublasLtMatmulAlgoGetHeuristic",
       (void*)+[](void*, void*, void*, void*, void*, void*, void*, int, void*, int* found) {
         return *found = kProposals, 0;
       }},
      {"cublasLtMatmul", (void*)multiply},
  };
  const auto found = symbols.find(name);
  return found == symbols.end() ? (void*)nothing : found->second;
}

}  // namespace imitated

#define dlopen(name, mode) reinterpret_cast<void*>(1)
#define dlsym(library, name) imitated::symbol(name)
