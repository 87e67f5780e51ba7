// Host code of GPU kernels: loads their machine code by CUDA's driver, launches them, and takes temporary memory.
//
// Neither CUDA's headers nor its libraries are needed to build it: the driver is loaded when a kernel first runs.
#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <utility>
#include <vector>

// The results of NVRTC: machine code for one generation of GPUs, and the assembly for later ones.
asm(".pushsection .rodata\n"
    ".balign 64\n"
    "sardonyx_cubin: .incbin \"kernels.cubin\"\n"
    ".balign 64\n"
    "sardonyx_ptx: .incbin \"kernels.ptx\"\n"
    ".byte 0\n"
    ".popsection\n");
extern "C" __attribute__((visibility("hidden"))) const char sardonyx_cubin[], sardonyx_ptx[];

namespace gpu {

using Context = void*;
using Module = void*;
using Code = void*;
using Stream = void*;

// The functions of the driver that are used, by their names.
struct Driver {
  int (*cuGetErrorString)(int, const char**);
  int (*cuCtxGetCurrent)(Context*);
  int (*cuCtxSetCurrent)(Context);
  int (*cuCtxGetDevice)(int*);
  int (*cuDeviceGetAttribute)(int*, int, int);
  int (*cuStreamGetCtx)(Stream, Context*);
  int (*cuModuleLoadData)(Module*, const void*);
  int (*cuModuleGetFunction)(Code*, Module, const char*);
  int (*cuLaunchKernel)(Code, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Stream, void**, void**);
  bool found = false;

  Driver() {
    void* const library = dlopen("libcuda.so.1", RTLD_NOW);
    found = library && find(library, "cuGetErrorString", cuGetErrorString) &&
            find(library, "cuCtxGetCurrent", cuCtxGetCurrent) && find(library, "cuCtxSetCurrent", cuCtxSetCurrent) &&
            find(library, "cuCtxGetDevice", cuCtxGetDevice) &&
            find(library, "cuDeviceGetAttribute", cuDeviceGetAttribute) &&
            find(library, "cuStreamGetCtx", cuStreamGetCtx) && find(library, "cuModuleLoadData", cuModuleLoadData) &&
            find(library, "cuModuleGetFunction", cuModuleGetFunction) && find(library, "cuLaunchKernel", cuLaunchKernel);
  }

 private:
  template <class F>
  static bool find(void* library, const char* name, F& function) {
    function = reinterpret_cast<F>(dlsym(library, name));
    return function;
  }
};

inline const Driver& driver() {
  static const Driver found;
  return found;
}

inline ort::Status* checked(int error, const char* what) {
  if (!error) return nullptr;
  const char* text = nullptr;
  driver().cuGetErrorString(error, &text);
  return ort::failure((std::string(what) + ": " + (text ? text : "an unknown error of CUDA")).c_str());
}

// The machine code on one GPU.
struct Device {
  static constexpr int kMultiprocessors = 16, kNoBinary = 209;  // an attribute, and an error: code for other GPUs
  Context context = nullptr;
  Module code = nullptr;
  int multiprocessors = 1;

  ort::Status* open(Context current) {
    context = current;
    int device = 0;
    if (auto s = checked(driver().cuCtxGetDevice(&device), "no GPU")) return s;
    if (auto s = checked(driver().cuDeviceGetAttribute(&multiprocessors, kMultiprocessors, device), "no GPU")) return s;
    int error = driver().cuModuleLoadData(&code, sardonyx_cubin);
    if (error == kNoBinary) error = driver().cuModuleLoadData(&code, sardonyx_ptx);
    return checked(error, "kernels cannot be loaded on this GPU");
  }

  // The GPU of a call, whose code is loaded at the first one.
  static ort::Status* of(Stream stream, const Device*& found) {
    static std::mutex loading;
    static std::vector<std::unique_ptr<Device>> loaded;
    if (!driver().found) return ort::failure("CUDA's driver, libcuda.so.1, was not found or is too old");
    Context current = nullptr;
    if (auto s = checked(driver().cuCtxGetCurrent(&current), "no CUDA context")) return s;
    if (!current) {
      if (auto s = checked(driver().cuStreamGetCtx(stream, &current), "no CUDA context")) return s;
      if (auto s = checked(driver().cuCtxSetCurrent(current), "no CUDA context")) return s;
    }
    const std::lock_guard<std::mutex> alone(loading);
    for (const auto& device : loaded) {
      if (device->context == current) {
        found = device.get();
        return nullptr;
      }
    }
    auto device = std::make_unique<Device>();
    if (auto s = device->open(current)) return s;
    loaded.push_back(std::move(device));
    found = loaded.back().get();
    return nullptr;
  }
};

// An entry point of the device code.
class Function {
 public:
  explicit Function(const char* name) : name_(name) {}

  ort::Status* on(const Device& device, Code& found) {
    const std::lock_guard<std::mutex> alone(mutex_);
    for (const auto& [context, code] : found_) {
      if (context == device.context) {
        found = code;
        return nullptr;
      }
    }
    if (auto s = checked(driver().cuModuleGetFunction(&found, device.code, name_), name_)) return s;
    found_.emplace_back(device.context, found);
    return nullptr;
  }

 private:
  const char* const name_;
  std::mutex mutex_;
  std::vector<std::pair<Context, Code>> found_;
};

// Where a call's kernels run, and what they are given.
struct Launch {
  Stream stream;
  void* call;
  const Device* device = nullptr;

  template <class Call>
  Launch(Stream stream, Call* call) : stream(stream), call(call) {}
  ort::Status* prepare() { return Device::of(stream, device); }

  // Blocks of x × y threads; grid-stride loops cover what is beyond some waves of blocks.
  ort::Status* operator()(Function& function, int64_t blocks, int64_t x, int64_t y = 1) {
    constexpr int64_t kWaves = 32;
    const int64_t most = kWaves * device->multiprocessors * std::max<int64_t>(1, 2048 / (x * y));
    Code code = nullptr;
    if (auto s = function.on(*device, code)) return s;
    void* arguments[] = {call};
    const auto grid = static_cast<unsigned>(std::min(blocks, most));
    return checked(driver().cuLaunchKernel(code, grid, 1, 1, static_cast<unsigned>(x), static_cast<unsigned>(y), 1, 0,
                                           stream, arguments, nullptr),
                   "a kernel cannot be launched");
  }
};

inline int64_t parts(int64_t size, int64_t of) { return (size + of - 1) / of; }
inline int64_t power_of_two(int64_t least) {
  int64_t found = 1;
  while (found < least) found *= 2;
  return found;
}

template <class T>
bool is_aligned(const T* p, int lanes) {
  return reinterpret_cast<uintptr_t>(p) % std::min<size_t>(16, lanes * sizeof(T)) == 0;
}

// One thread per element, or per `lanes` elements.
inline ort::Status* over_places(Launch& launch, Function& function, int lanes, int64_t places) {
  const int64_t units = places / lanes;
  if (units == 0) return nullptr;
  const int64_t threads = std::min(kMostThreads, units < (1 << 17) ? 128 : 256);
  return launch(function, parts(units, threads), threads);
}

// Entry points for rows of which a thread holds one piece, several, or none.
struct RowFunctions {
  Function &one, &most, &none;
};

// One team per row: part of a warp or a warp, several to a block if there are rows for all multiprocessors; a block for
// longer rows.
inline ort::Status* over_rows(
    Launch& launch, const RowFunctions& functions, int lanes, int most, int64_t rows, int64_t size) {
  if (rows == 0) return nullptr;
  const int64_t chunks = chunks_of(size, lanes);
  const int pieces = pieces_of(chunks, most, rows);
  int64_t threads = std::min<int64_t>(power_of_two(chunks), kWarp), teams = 1;
  if (fits_warp(chunks, most, rows)) {
    const int64_t wanted = std::max<int64_t>(1, std::min(kMostThreads, 128) / threads);
    teams = threads < kWarp || rows >= wanted * launch.device->multiprocessors ? wanted : 1;
  } else {
    threads = std::min<int64_t>(parts(parts(chunks, std::max(pieces, 1)), kWarp) * kWarp, kMostThreads);
  }
  Function& function = pieces == 0 ? functions.none : pieces == 1 ? functions.one : functions.most;
  return launch(function, parts(rows, teams), threads, teams);
}

// Adjacent rows: one per thread of a warp, and the warps of a block divide the elements of each.
inline ort::Status* over_rows_beside(Launch& launch, Function& function, int64_t rows, int64_t size) {
  if (rows == 0) return nullptr;
  const int64_t sharing = std::min<int64_t>(kMostThreads / kWarp, power_of_two(parts(size, 4)));
  return launch(function, parts(rows, kWarp), kWarp, sharing);
}

// What a kernel keeps from its creation on.
struct Held {
  ort::Allocator* allocator = nullptr;

  Held() = default;
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  ~Held() {
    if (allocator) ort::release(allocator);
  }
};

// Temporary memory of a call, from the session's arena. It is free for the next kernel of the stream when the call
// returns, as that of ONNX Runtime's own kernels is, so that calls can be recorded as a CUDA graph.
class Memory {
 public:
  explicit Memory(const Held& held) : allocator_(held.allocator) {}
  ~Memory() {
    if (start_) allocator_->free(allocator_, start_);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  template <class T>
  void want(T** p, int64_t count) {
    wanted_.push_back({reinterpret_cast<char**>(p), bytes_});
    bytes_ += (count * sizeof(T) + 255) / 256 * 256;
  }
  ort::Status* take() {
    if (bytes_ == 0) return nullptr;
    try {  // an arena that cannot grow throws
      start_ = static_cast<char*>(allocator_->alloc(allocator_, bytes_));
    } catch (...) {
    }
    if (!start_) return ort::failure("out of memory on the GPU for what a kernel keeps between its steps");
    for (const auto& wanted : wanted_) *wanted.target = start_ + wanted.offset;
    return nullptr;
  }

 private:
  struct Wanted {
    char** target;
    size_t offset;
  };
  ort::Allocator* const allocator_;
  char* start_ = nullptr;
  std::vector<Wanted> wanted_;
  size_t bytes_ = 0;
};

}  // namespace gpu
