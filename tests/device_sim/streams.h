// Streams, each of them a thread, what is recorded on them, and what hosts wait for.

#pragma once

#include <sched.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

namespace device_sim {

using at::Tensor;
using c10::DeviceIndex;
using c10::IValue;
using torch::jit::Stack;
using Kernel = std::function<void()>;

inline constexpr auto kOurs = c10::DeviceType::PrivateUse1;
// As many kernels as CUDA lets a host launch ahead, about.
inline constexpr size_t kLaunchQueue = 1024;
inline constexpr DeviceIndex kMostDevices = 8;

inline DeviceIndex device_count = 1;

inline int64_t now_ns() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

struct Counts {
  std::mutex mutex;
  std::map<std::string, int64_t> of;

  void add(const std::string& what) {
    const std::lock_guard lock(mutex);
    ++of[what];
  }
};

// Nothing that a stream's thread may still use at the end of the process is ever destroyed.
inline Counts& counts() {
  static auto* const made = new Counts;
  return *made;
}

// When a stream passes what was recorded on it; 0 until then.
class Moment {
 public:
  void pass() {
    at_ns_ = now_ns();
    at_ns_.notify_all();
  }
  void wait() const { at_ns_.wait(0); }
  int64_t at_ns() const { return at_ns_; }

 private:
  std::atomic<int64_t> at_ns_{0};
};

using Recorded = std::shared_ptr<Moment>;

// What was launched while it was captured, to be launched again at once.
struct Graph {
  std::vector<Kernel> kernels;
};

// The one that is being captured. Backward launches from a thread of its own.
inline std::atomic<Graph*> captured{nullptr};

// How a thread gets a processor, as the kernel takes it: older C libraries have no call for it.
struct Scheduling {
  uint32_t size = sizeof(Scheduling);
  uint32_t policy = SCHED_OTHER;
  uint64_t flags = 0;
  int32_t nice = 0;
  uint32_t priority = 0;
  uint64_t slice_ns = 0;
  uint64_t deadline_ns = 0;
  uint64_t period_ns = 0;

  bool set() const { return syscall(SYS_sched_setattr, 0, this, 0) == 0; }
};

class Stream {
 public:
  Stream() {
    std::thread([this] { run(); }).detach();
  }

  // Where the launch queue is full, the host waits for a place in it.
  void push(Kernel kernel) {
    if (auto* graph = captured.load()) {
      graph->kernels.push_back(std::move(kernel));
      return;
    }
    std::unique_lock lock(mutex_);
    if (queue_.size() >= kLaunchQueue) {
      counts().add("queue_full");
      changed_.wait(lock, [this] { return queue_.size() < kLaunchQueue; });
    }
    queue_.push_back(std::move(kernel));
    changed_.notify_all();
  }

  Recorded record() {
    // CUDA records such an event with each replay, and fails where the program asks for it.
    TORCH_CHECK(captured == nullptr, "an event is recorded while a graph is captured");
    auto moment = std::make_shared<Moment>();
    push([moment] { moment->pass(); });
    return moment;
  }

  void wait_for(Recorded moment) {
    push([moment = std::move(moment)] { moment->wait(); });
  }

  // *why*: what is counted as a synchronisation.
  void synchronize(const std::string& why) {
    TORCH_CHECK(captured == nullptr, "the host waits while a graph is captured: ", why);
    counts().add(why);
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return queue_.empty(); });
    // As under CUDA: a device that has failed says so where the host waits for it.
    TORCH_CHECK(failure_.empty(), "a kernel has failed: ", failure_);
  }

  bool idle() {
    const std::lock_guard lock(mutex_);
    return queue_.empty();
  }

 private:
  void run() {
    // A device has processors of its own: it gets one at once, or soon where that is not allowed.
    Scheduling{.policy = SCHED_FIFO, .priority = 1}.set() || Scheduling{.slice_ns = 100'000}.set();
    // A kernel of a given time ends a few microseconds late, not fifty.
    prctl(PR_SET_TIMERSLACK, 1UL, 0UL, 0UL, 0UL);
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return !queue_.empty(); });
      // It stays in the queue while it runs. A deque that grows at its end moves no element.
      const Kernel& kernel = queue_.front();
      lock.unlock();
      std::string failure;
      try {
        kernel();
      } catch (const c10::Error& error) {
        failure = error.what_without_backtrace();
      } catch (const std::exception& error) {
        failure = error.what();
      }
      lock.lock();
      if (failure_.empty()) {
        failure_ = failure;
      }
      queue_.pop_front();
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Kernel> queue_;
  std::string failure_;
};

// Stream 0 of each device is its default one.
class Streams {
 public:
  Stream& of(const c10::Stream& stream) {
    const std::lock_guard lock(mutex_);
    auto& made = made_.at(stream.device_index());
    while (made.size() <= static_cast<size_t>(stream.id())) {
      made.push_back(std::make_unique<Stream>());
    }
    return *made[stream.id()];
  }

  c10::Stream make(DeviceIndex device) {
    const std::lock_guard lock(mutex_);
    auto& made = made_.at(device);
    while (made.size() < 2) {
      made.push_back(std::make_unique<Stream>());
    }
    made.push_back(std::make_unique<Stream>());
    return id(device, made.size() - 1);
  }

  std::vector<Stream*> all(DeviceIndex device) {
    const std::lock_guard lock(mutex_);
    std::vector<Stream*> found;
    for (const auto& each : made_.at(device)) {
      found.push_back(each.get());
    }
    return found;
  }

  static c10::Stream id(DeviceIndex device, c10::StreamId stream) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kOurs, device), stream);
  }

 private:
  std::mutex mutex_;
  std::array<std::deque<std::unique_ptr<Stream>>, kMostDevices> made_;
};

inline Streams& streams() {
  static auto* const made = new Streams;
  return *made;
}

inline thread_local DeviceIndex current_device = 0;
inline thread_local std::array<c10::StreamId, kMostDevices> current_streams{};

inline DeviceIndex index_of(c10::Device device) {
  return device.has_index() ? device.index() : current_device;
}

inline Stream& current_stream(DeviceIndex device) {
  return streams().of(Streams::id(device, current_streams.at(device)));
}

}  // namespace device_sim
