// CUDA's language and runtime as plain C++, as far as native kernels use them: tests run these on any machine.
//
// Blocks run one after the other, on as many threads of the machine as they have.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "narrow.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
inline thread_local dim3 blockIdx(0, 0, 0), threadIdx(0, 0, 0), blockDim, gridDim;

namespace imitated {

// So many threads wait here for each other.
class Meeting {
 public:
  void wait(int count) {
    std::unique_lock<std::mutex> alone(mutex_);
    if (++here_ == count) {
      here_ = 0;
      ++turn_;
      all_.notify_all();
    } else {
      all_.wait(alone, [this, turn = turn_] { return turn != turn_; });
    }
  }

 private:
  std::mutex mutex_;
  std::condition_variable all_;
  int here_ = 0, turn_ = 0;
};

// Threads of a warp that exchange numbers.
struct Team {
  Meeting meeting;
  uint64_t numbers[32];
};

struct Block {
  Meeting all;
  std::mutex making;
  std::map<std::pair<unsigned, unsigned>, Team> teams;
  Team& team(unsigned warp, unsigned mask) {
    const std::lock_guard<std::mutex> alone(making);
    return teams[{warp, mask}];
  }
};
inline Block* block = nullptr;

}  // namespace imitated

inline void __syncthreads() { imitated::block->all.wait(blockDim.x * blockDim.y); }

template <class T>
T __shfl_xor_sync(unsigned mask, T v, int by, int) {
  const unsigned thread = threadIdx.y * blockDim.x + threadIdx.x, lane = thread % 32;
  imitated::Team& team = imitated::block->team(thread / 32, mask);
  const int count = __builtin_popcount(mask);
  if (!(mask >> lane & 1) || !(mask >> (lane ^ by) & 1)) std::abort();
  std::memcpy(&team.numbers[lane], &v, sizeof v);
  team.meeting.wait(count);
  std::memcpy(&v, &team.numbers[lane ^ by], sizeof v);
  team.meeting.wait(count);
  return v;
}

inline uint16_t __ushort_as_half(uint16_t x) { return x; }
inline uint16_t __half_as_ushort(uint16_t x) { return x; }
inline float __half2float(uint16_t x) { return narrow::float_of_half(x); }
inline uint16_t __float2half_rn(float x) { return narrow::half_of_float(x); }
inline uint16_t __ushort_as_bfloat16(uint16_t x) { return x; }
inline uint16_t __bfloat16_as_ushort(uint16_t x) { return x; }
inline float __bfloat162float(uint16_t x) { return narrow::float_of_bfloat16(x); }
inline uint16_t __float2bfloat16_rn(float x) { return narrow::bfloat16_of_float(x); }

typedef int cudaError_t;
typedef void* cudaStream_t;
typedef void* cudaMemPool_t;
constexpr int cudaSuccess = 0, cudaErrorInvalidDevice = 101, cudaErrorInvalidConfiguration = 9;
constexpr int cudaMemAllocationTypePinned = 1, cudaMemLocationTypeDevice = 1, cudaMemPoolAttrReleaseThreshold = 4;
struct cudaMemPoolProps {
  int allocType;
  struct {
    int type, id;
  } location;
};

inline const char* cudaGetErrorString(cudaError_t) { return "an error of the imitation"; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0; }
inline cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps*) {
  *pool = pool;
  return cudaSuccess;
}
inline cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, int, void*) { return cudaSuccess; }
inline cudaError_t cudaMallocFromPoolAsync(void** p, size_t bytes, cudaMemPool_t, cudaStream_t) {
  *p = std::aligned_alloc(256, bytes);
  return *p ? cudaSuccess : 2;
}
inline cudaError_t cudaFreeAsync(void* p, cudaStream_t) {
  std::free(p);
  return cudaSuccess;
}

template <class Call>
cudaError_t cudaLaunchKernel(void (*kernel)(Call), dim3 grid, dim3 block, void** given, size_t, cudaStream_t) {
  if (block.x * block.y == 0 || block.x * block.y > SARDONYX_MOST_THREADS || grid.x == 0) {
    return cudaErrorInvalidConfiguration;
  }
  imitated::Block shared;
  imitated::block = &shared;
  auto run = [&](unsigned x, unsigned y) {
    gridDim = grid;
    blockDim = block;
    threadIdx = dim3(x, y, 0);
    for (unsigned b = 0; b < grid.x; ++b) {
      blockIdx = dim3(b, 0, 0);
      kernel(*static_cast<Call*>(given[0]));
      if (block.x * block.y > 1) __syncthreads();
    }
  };
  std::vector<std::thread> threads;
  for (unsigned i = 1; i < block.x * block.y; ++i) threads.emplace_back(run, i % block.x, i / block.x);
  run(0, 0);
  for (auto& thread : threads) thread.join();
  return cudaSuccess;
}
