// Memory of the device, which is the host's, and page-locked memory of the host.

#pragma once

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_set>
#include <utility>

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>

#include "streams.h"

namespace device_sim {

// The device is taken in pieces of so many bytes.
inline constexpr int64_t kSegment = 32 << 20;

// Memory that a tensor has, and kernels that are launched on it. They hold this and no tensor: the
// last one that lets go of a tensor needs Python's lock, and its host may wait for a full queue
// with that in hand.
struct Block final : c10::intrusive_ptr_target {
  Block(size_t size, c10::Device where) : bytes(size), device(where) {
    TORCH_CHECK(posix_memalign(&data, 64, size) == 0, "out of memory");
  }
  ~Block() override;

  void* data = nullptr;
  const size_t bytes;
  const c10::Device device;
};

inline void let_go(void* block) {
  c10::intrusive_ptr<Block>::reclaim(static_cast<Block*>(block));
}

inline c10::DataPtr held(c10::intrusive_ptr<Block> block, c10::Device device) {
  void* const data = block->data;
  return {data, block.release(), &let_go, device};
}

inline c10::DataPtr new_block(size_t bytes, c10::Device device) {
  if (bytes == 0) {
    return {nullptr, device};
  }
  return held(c10::make_intrusive<Block>(bytes, device), device);
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto data = new_block(bytes, {kOurs, current_device});
    count(current_device, [bytes](auto& stats) {
      stats.allocation[0].increase(1);
      stats.allocated_bytes[0].increase(bytes);
      reserve(stats);
    });
    return data;
  }
  void freed(const Block& block) {
    count(block.device.index(), [&block](auto& stats) {
      stats.allocation[0].decrease(1);
      stats.allocated_bytes[0].decrease(block.bytes);
      reserve(stats);
    });
  }
  c10::DeleterFnPtr raw_deleter() const override { return &let_go; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t /*pool*/) override {}
  void recordStream(const c10::DataPtr& /*data*/, c10::Stream /*stream*/) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    const std::lock_guard lock(mutex_);
    return stats_.at(device);
  }
  void resetAccumulatedStats(DeviceIndex device) override {
    count(device, [](auto& stats) { stats.allocated_bytes[0].reset_accumulated(); });
  }
  void resetPeakStats(DeviceIndex device) override {
    count(device, [](auto& stats) { stats.allocated_bytes[0].reset_peak(); });
  }

 private:
  template <class Change>
  void count(DeviceIndex device, Change&& change) {
    const std::lock_guard lock(mutex_);
    change(stats_.at(device));
  }
  // Allocators of real devices take more of them than they give out.
  static void reserve(c10::CachingDeviceAllocator::DeviceStats& stats) {
    auto& reserved = stats.reserved_bytes[0];
    const int64_t segments = (stats.allocated_bytes[0].current + kSegment - 1) / kSegment;
    const int64_t change = segments * kSegment - reserved.current;
    change > 0 ? reserved.increase(change) : reserved.decrease(-change);
  }

  std::mutex mutex_;
  std::array<c10::CachingDeviceAllocator::DeviceStats, kMostDevices> stats_;
};

inline DeviceMemory& device_memory() {
  static auto* const made = new DeviceMemory;
  return *made;
}

// Page-locked memory, as far as torch can tell.
struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto data = new_block(bytes, c10::kCPU);
    const std::lock_guard lock(mutex_);
    pinned_.insert(data.get());
    return data;
  }
  void freed(const Block& block) {
    const std::lock_guard lock(mutex_);
    pinned_.erase(block.data);
  }
  bool has(const void* data) {
    const std::lock_guard lock(mutex_);
    return pinned_.count(data) != 0;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &let_go; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  std::mutex mutex_;
  std::unordered_set<const void*> pinned_;
};

inline PinnedMemory& pinned_memory() {
  static auto* const made = new PinnedMemory;
  return *made;
}

Block::~Block() {
  if (device.type() == kOurs) {
    device_memory().freed(*this);
  } else {
    pinned_memory().freed(*this);
  }
  std::free(data);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex /*device*/) const override { return true; }
  DeviceIndex deviceCount() const override { return device_count; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(DeviceIndex device) const override { current_device = device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return std::exchange(current_device, device);
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return device < 0 ? current_device : exchangeDevice(device);
  }
  bool isPinnedPtr(const void* data) const override { return pinned_memory().has(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory(); }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto* const impl = storage.unsafeGetStorageImpl();
    const c10::DeviceGuard guard(storage.device());
    auto grown = device_memory().allocate(bytes);
    if (const size_t kept = std::min(bytes, storage.nbytes()); kept != 0) {
      using Held = c10::intrusive_ptr<Block>;
      auto from = Held::reclaim_copy(static_cast<Block*>(storage.data_ptr().get_context()));
      auto to = Held::reclaim_copy(static_cast<Block*>(grown.get_context()));
      current_stream(storage.device().index()).push([from, to, kept] {
        std::memcpy(to->data, from->data, kept);
      });
    }
    impl->set_data_ptr_noswap(std::move(grown));
    impl->set_nbytes(bytes);
  }
};

}  // namespace device_sim
