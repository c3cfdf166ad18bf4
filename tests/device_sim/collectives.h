// Collectives of the device: those of the hosts, carried out by a stream of their own.

#pragma once

#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "guard.h"
#include "operators.h"
#include "streams.h"

namespace device_sim {

// A collective on a stream. As with NCCL, to wait for it is to let the current stream wait.
class Work final : public c10d::Work {
 public:
  Work(int rank, c10d::OpType type, Stream& stream, DeviceIndex device, bool holds_host)
      : c10d::Work(rank, type),
        done_(stream.record()),
        stream_(stream),
        device_(device),
        holds_host_(holds_host) {}

  bool isCompleted() override { return done_->at_ns() != 0; }
  bool isSuccess() const override { return true; }
  void synchronize() override { current_stream(device_).wait_for(done_); }
  bool wait(std::chrono::milliseconds /*timeout*/) override {
    synchronize();
    if (holds_host_) {
      stream_.synchronize("barrier");
    }
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

  // The future is completed at once, on the stream of the collective: what goes on after it waits on
  // its own stream and not on the host.
  void complete(const std::vector<Tensor>& results, c10::Stream stream) {
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{stream.device()});
    const auto before = Guard().exchangeStream(stream);
    future_->markCompleted(IValue(results));
    Guard().exchangeStream(before);
  }

 private:
  const Recorded done_;
  Stream& stream_;
  const DeviceIndex device_;
  const bool holds_host_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

inline std::vector<Tensor> on_host(const std::vector<Tensor>& tensors) {
  std::vector<Tensor> made;
  for (const auto& each : tensors) {
    made.push_back(on_host(each));
  }
  return made;
}

inline std::vector<std::vector<Tensor>> on_host(const std::vector<std::vector<Tensor>>& tensors) {
  std::vector<std::vector<Tensor>> made;
  for (const auto& each : tensors) {
    made.push_back(on_host(each));
  }
  return made;
}

// Collectives of the hosts, carried out in order by a stream that does nothing else. Each device has
// such a stream, and hosts of its own: two streams come to their collectives in no order.
class Collectives final : public c10d::Backend {
 public:
  using Hosts = c10::intrusive_ptr<c10d::Backend>;
  using Works = c10::intrusive_ptr<c10d::Work>;

  Collectives(std::vector<Hosts> hosts, std::string name)
      : Backend(hosts.front()->getRank(), hosts.front()->getSize()),
        hosts_(std::move(hosts)),
        name_(name) {}

  const std::string getBackendName() const override { return name_; }
  uint64_t getSequenceNumberForGroup() override { return launched_; }

  Works allreduce(std::vector<Tensor>& tensors, const c10d::AllreduceOptions& how) override {
    return queue(
        c10d::OpType::ALLREDUCE, tensors, [tensors = on_host(tensors), how](auto& hosts) mutable {
          return hosts.allreduce(tensors, how);
        });
  }
  Works broadcast(std::vector<Tensor>& tensors, const c10d::BroadcastOptions& how) override {
    return queue(
        c10d::OpType::BROADCAST, tensors, [tensors = on_host(tensors), how](auto& hosts) mutable {
          return hosts.broadcast(tensors, how);
        });
  }
  Works allgather(
      std::vector<std::vector<Tensor>>& to,
      std::vector<Tensor>& from,
      const c10d::AllgatherOptions& how) override {
    auto run = [to = on_host(to), from = on_host(from), how](auto& hosts) mutable {
      return hosts.allgather(to, from, how);
    };
    return queue(c10d::OpType::ALLGATHER, to.front(), std::move(run));
  }
  Works all_gather_single(
      Tensor& to, Tensor& from, const c10d::AllgatherOptions& how) override {
    auto run = [to = on_host(to), from = on_host(from), how](auto& hosts) mutable {
      return hosts.all_gather_single(to, from, how);
    };
    return queue(c10d::OpType::_ALLGATHER_BASE, {to}, std::move(run));
  }
  Works reduce_scatter_single(
      Tensor& to, Tensor& from, const c10d::ReduceScatterOptions& how) override {
    auto run = [to = on_host(to), from = on_host(from), how](auto& hosts) mutable {
      return hosts.reduce_scatter_single(to, from, how);
    };
    return queue(c10d::OpType::_REDUCE_SCATTER_BASE, {to}, std::move(run));
  }
  Works barrier(const c10d::BarrierOptions& how) override {
    return queue(c10d::OpType::BARRIER, {}, [how](auto& hosts) { return hosts.barrier(how); });
  }

 private:
  using Run = std::function<Works(c10d::Backend&)>;

  // Queue it behind what the current stream has to do so far; the host goes on.
  Works queue(c10d::OpType type, const std::vector<Tensor>& results, Run run) {
    ++launched_;
    const auto device = results.empty() ? current_device : results.front().device().index();
    const auto id = stream_of(device);
    auto& stream = streams().of(id);
    stream.wait_for(current_stream(device).record());
    stream.push([hosts = hosts_.at(device), run = std::move(run)] { run(*hosts)->wait(); });
    const bool holds_host = type == c10d::OpType::BARRIER;
    auto work = c10::make_intrusive<Work>(rank_, type, stream, device, holds_host);
    work->complete(results, id);
    return work;
  }

  c10::Stream stream_of(DeviceIndex device) {
    const std::lock_guard lock(mutex_);
    auto& found = streams_.at(device);
    if (!found) {
      found = streams().make(device);
    }
    return *found;
  }

  const std::vector<Hosts> hosts_;
  const std::string name_;
  std::atomic<uint64_t> launched_{0};
  std::mutex mutex_;
  std::array<std::optional<c10::Stream>, kMostDevices> streams_;
};

}  // namespace device_sim
