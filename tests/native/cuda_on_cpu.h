// CUDA's language and driver as plain C++, as far as native kernels use them: tests run these on any machine.
//
// Blocks run one after the other, on as many threads of the machine as they have.
#pragma once

#include <dlfcn.h>

#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "narrow.h"

#define __device__
#define __forceinline__ inline
#define __shared__ static
#define EXPORTED extern "C" __attribute__((visibility("default")))
#define SARDONYX_ENTRY(name, Call) EXPORTED void name(const Call& call)

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

namespace fast {

inline float exponential(float x) { return std::exp(x); }
inline float divided(float a, float b) { return a / b; }
inline float inverse_root(float x) { return 1 / std::sqrt(x); }

}  // namespace fast

// The driver. A kernel's code is the address of its entry point, which takes what it is given by reference.

EXPORTED int cuGetErrorString(int, const char** text) {
  *text = "an error of the imitation";
  return 0;
}
EXPORTED int cuCtxGetCurrent(void** context) {
  *context = &imitated::block;
  return 0;
}
EXPORTED int cuCtxSetCurrent(void*) { return 0; }
EXPORTED int cuCtxGetDevice(int* device) { return *device = 0; }
EXPORTED int cuDeviceGetAttribute(int* value, int, int) {
  *value = 2;
  return 0;
}
EXPORTED int cuStreamGetCtx(void*, void** context) { return cuCtxGetCurrent(context); }

namespace imitated {

// The library that this is in, in the place of the driver's.
inline void* own_library(const char*, int) {
  Dl_info own = {};
  dladdr(reinterpret_cast<void*>(&cuCtxGetCurrent), &own);
  return dlopen(own.dli_fname, RTLD_NOW);
}

}  // namespace imitated

EXPORTED int cuModuleLoadData(void** code, const void*) {
  *code = imitated::own_library("", 0);
  return *code ? 0 : 1;
}
EXPORTED int cuModuleGetFunction(void** found, void* code, const char* name) {
  *found = dlsym(code, name);
  return *found ? 0 : 500;
}
EXPORTED int cuLaunchKernel(void* code, unsigned blocks, unsigned, unsigned, unsigned x, unsigned y, unsigned, unsigned,
                            void*, void** given, void**) {
  if (x * y == 0 || x * y > SARDONYX_MOST_THREADS || blocks == 0) return 9;
  imitated::Block shared;
  imitated::block = &shared;
  auto run = [&](unsigned thread_x, unsigned thread_y) {
    gridDim = dim3(blocks);
    blockDim = dim3(x, y);
    threadIdx = dim3(thread_x, thread_y, 0);
    for (unsigned b = 0; b < blocks; ++b) {
      blockIdx = dim3(b, 0, 0);
      reinterpret_cast<void (*)(const void*)>(code)(given[0]);
      if (x * y > 1) __syncthreads();
    }
  };
  std::vector<std::thread> threads;
  for (unsigned i = 1; i < x * y; ++i) threads.emplace_back(run, i % x, i / x);
  run(0, 0);
  for (auto& thread : threads) thread.join();
  return 0;
}

#define dlopen imitated::own_library
