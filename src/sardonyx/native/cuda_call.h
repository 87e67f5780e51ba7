// What host and device code of GPU kernels share: types in memory, and how rows are distributed over threads.
#pragma once

#include <cstdint>

#ifndef SARDONYX_MOST_THREADS
#define SARDONYX_MOST_THREADS 512
#endif

namespace lanes {

struct half { uint16_t bits; };
struct bfloat { uint16_t bits; };
struct boolean { uint8_t value; };

}  // namespace lanes

namespace {

using namespace lanes;

constexpr int kMostThreads = SARDONYX_MOST_THREADS, kWarp = kMostThreads < 32 ? kMostThreads : 32;
constexpr int kPiecesOfOne = 8;  // pieces of single lanes, if lanes are not aligned

inline int64_t floor_divided(int64_t a, int64_t b) { return b ? a / b - (a % b != 0 && (a < 0) != (b < 0)) : 0; }
inline int64_t floor_modulo(int64_t a, int64_t b) { return a - floor_divided(a, b) * b; }

constexpr int64_t chunks_of(int64_t size, int lanes) { return size < lanes ? 1 : (size + lanes - 1) / lanes; }

// From so many rows on, a warp for each keeps a GPU busy; fewer longer rows get a block each.
constexpr int64_t kManyRows = 2048;

// Whether a row of so many chunks belongs to a part of a warp or a warp, rather than to a block.
constexpr bool fits_warp(int64_t chunks, int most, int64_t rows) {
  return chunks <= kWarp || (rows >= kManyRows && chunks <= static_cast<int64_t>(kWarp) * most);
}

// How many pieces of a row each thread holds: one, `most`, or none for a long row.
constexpr int pieces_of(int64_t chunks, int most, int64_t rows) {
  if (fits_warp(chunks, most, rows)) return chunks <= kWarp ? 1 : most;
  return chunks <= kMostThreads ? 1 : chunks <= static_cast<int64_t>(kMostThreads) * most ? most : 0;
}

}  // namespace
