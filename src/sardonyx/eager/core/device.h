// The device interface of torch: allocator, hooks and guard; streams and events do nothing.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/alignment.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>

namespace eager {

constexpr auto kType = c10::DeviceType::PrivateUse1;

// torch's autograd starts a thread per device once; devices cannot be added later.
constexpr int kMaxDevices = 8;

inline std::atomic<int> g_devices{1};
inline thread_local c10::DeviceIndex t_current = 0;

// Blocks that a thread freed last, reused for allocations of the same size.
class FreeList {
 public:
  static FreeList& mine() {
    thread_local FreeList freed;
    return freed;
  }

  void* take(size_t bytes) {
    for (auto& block : blocks_) {
      if (block.data && block.bytes == bytes) return std::exchange(block.data, nullptr);
    }
    return nullptr;
  }

  void put(void* data, size_t bytes) {
    Block& block = blocks_[next_++ % kBlocks];
    if (block.data) c10::free_cpu(block.data);
    block = {data, bytes};
  }

  ~FreeList() {
    closed_ = true;
    for (auto& block : blocks_) {
      if (block.data) c10::free_cpu(std::exchange(block.data, nullptr));
    }
  }

  bool takes(size_t bytes) const { return kEnabled && bytes <= kMaxBytes && !closed_; }

 private:
  struct Block {
    void* data = nullptr;
    size_t bytes = 0;
  };
  static constexpr size_t kBlocks = 8, kMaxBytes = size_t(1) << 18;
#ifdef __SANITIZE_ADDRESS__
  static constexpr bool kEnabled = false;  // AddressSanitizer would miss uses after free
#else
  static constexpr bool kEnabled = true;
#endif

  Block blocks_[kBlocks];
  size_t next_ = 0;
  bool closed_ = false;
};

// Host memory with the device's type. A header before each block stores its size.
struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(kType, t_current);
    if (!bytes) return {nullptr, nullptr, &ignore, device};
    void* block = FreeList::mine().take(bytes);
    if (!block) {
      TORCH_CHECK(bytes <= SIZE_MAX - kHead, "the device ort cannot allocate ", bytes, " bytes");
      block = c10::alloc_cpu(bytes + kHead);
      std::memcpy(block, &bytes, sizeof bytes);
    }
    return {static_cast<char*>(block) + kHead, block, &free, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }  // data starts after the block's header
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

  static Allocator* the() {
    static Allocator allocator;
    return &allocator;
  }

 private:
  static constexpr size_t kHead = c10::gAlignment;

  static void ignore(void*) {}
  static void free(void* block) {
    size_t bytes;
    std::memcpy(&bytes, block, sizeof bytes);
    auto& freed = FreeList::mine();
    freed.takes(bytes) ? freed.put(block, bytes) : c10::free_cpu(block);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return g_devices; }
  c10::DeviceIndex getCurrentDevice() const override { return t_current; }
  void setCurrentDevice(c10::DeviceIndex index) const override { t_current = index; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override { return std::exchange(t_current, index); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? t_current : exchangeDevice(index);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  at::Device getDeviceFromPtr(void*) const override { return {kType, t_current}; }
  // The device uses host memory, so pinning is a plain host allocation.
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  bool isPinnedPtr(const void*) const override { return false; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::DeviceGuard guard(storage.device());
    auto memory = Allocator::the()->allocate(bytes);
    if (const auto used = std::min(bytes, storage.nbytes())) std::memcpy(memory.get(), storage.data(), used);
    storage.set_data_ptr_noswap(std::move(memory));
    storage.set_nbytes(bytes);
  }
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr auto static_type = kType;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}

  c10::DeviceType type() const override { return kType; }
  c10::Device getDevice() const override { return {kType, t_current}; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {kType, std::exchange(t_current, device.index())};
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < g_devices, "there is no device ort:", int(device.index()));
    t_current = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { t_current = device.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return kMaxDevices; }

  // Calls are synchronous, so there is one stream and all its events are complete.
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getStream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(c10::DeviceIndex) const override {}
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
};

// While it lives, torch's operators run single-threaded. OpenMP threads spin for milliseconds after their work and
// compete with ONNX Runtime's: BERT-base took 210 ms instead of 152 on two cores.
class SingleThreaded {
 public:
  SingleThreaded() : before_(get() ? get()() : 0) {
    if (set() && before_ > 1) set()(1);
  }
  SingleThreaded(const SingleThreaded&) = delete;
  ~SingleThreaded() {
    if (set() && before_ > 1) set()(before_);
  }

 private:
  const int before_;

  static auto get() -> int (*)() {
    static const auto found = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "omp_get_max_threads"));
    return found;
  }
  static auto set() -> void (*)(int) {
    static const auto found = reinterpret_cast<void (*)(int)>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"));
    return found;
  }
};

inline at::Tensor empty(at::IntArrayRef sizes, at::ScalarType type) {
  return at::Tensor(at::detail::empty_generic(sizes, Allocator::the(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                              type, std::nullopt));
}

inline bool is_on_device(const at::Tensor& tensor) { return tensor.device().type() == kType; }

inline c10::Device first_device() { return {kType, 0}; }

inline at::Tensor tensor_over(c10::DataPtr memory, size_t bytes, c10::Device device, at::ScalarType type, at::IntArrayRef sizes) {
  const bool is_here = device.type() == kType;
  auto* allocator = is_here ? static_cast<c10::Allocator*>(Allocator::the()) : c10::GetCPUAllocator();
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes, std::move(memory),
                                                       allocator, /*resizable=*/true);
  auto key = is_here ? c10::DispatchKey::PrivateUse1 : c10::DispatchKey::CPU;
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(std::move(storage)), c10::DispatchKeySet(key),
                                                       c10::scalarTypeToTypeMeta(type));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

// Returns a view of the same memory on another device; either keeps the storage alive.
inline at::Tensor on_other_device(const at::Tensor& tensor, c10::Device device) {
  auto* held = new c10::Storage(tensor.storage());
  c10::DataPtr memory(held->mutable_data(), held, [](void* owner) { delete static_cast<c10::Storage*>(owner); }, device);
  auto view = tensor_over(std::move(memory), held->nbytes(), device, tensor.scalar_type(), {0});
  auto* impl = view.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) impl->_set_conj(true);
  if (tensor.is_neg()) impl->_set_neg(true);
  return view;
}

inline at::Tensor on_host(const at::Tensor& tensor) {
  return is_on_device(tensor) ? on_other_device(tensor, c10::kCPU) : tensor;
}

}  // namespace eager
