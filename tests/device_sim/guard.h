// What torch asks of the streams, events and devices of a backend.

#pragma once

#include <optional>
#include <utility>

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "streams.h"

namespace device_sim {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  // An event of torch is one of these, made when it is recorded for the first time.
  struct Event {
    Recorded recorded;
  };

  c10::DeviceType type() const override { return kOurs; }
  DeviceIndex deviceCount() const noexcept override { return device_count; }
  c10::Device getDevice() const override { return {kOurs, current_device}; }
  void setDevice(c10::Device device) const override { current_device = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current_device = device.index();
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {kOurs, std::exchange(current_device, device.index())};
  }

  c10::Stream getStream(c10::Device device) const override {
    const auto index = index_of(device);
    return Streams::id(index, current_streams.at(index));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return Streams::id(index_of(device), 0);
  }
  // Stream 1: what goes on after a future has one of its own, and there are few of those at a time.
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*isHighPriority*/) const override {
    return Streams::id(index_of(device), 1);
  }
  c10::Stream getNewStream(c10::Device device, int /*priority*/) const override {
    return streams().make(index_of(device));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto& current = current_streams.at(stream.device_index());
    return Streams::id(stream.device_index(), std::exchange(current, stream.id()));
  }
  bool queryStream(const c10::Stream& stream) const override { return streams().of(stream).idle(); }
  void synchronizeStream(const c10::Stream& stream) const override {
    streams().of(stream).synchronize("stream");
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    for (auto* each : streams().all(device < 0 ? current_device : device)) {
      each->synchronize("device");
    }
  }

  void destroyEvent(void* event, const DeviceIndex /*device*/) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void record(
      void** event,
      const c10::Stream& stream,
      const DeviceIndex /*device*/,
      const c10::EventFlag /*flag*/) const override {
    if (*event == nullptr) {
      *event = new Event;
    }
    static_cast<Event*>(*event)->recorded = streams().of(stream).record();
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      streams().of(stream).wait_for(static_cast<Event*>(event)->recorded);
    }
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || static_cast<Event*>(event)->recorded->at_ns() != 0;
  }
  void synchronizeEvent(void* event) const override {
    counts().add("event");
    if (event != nullptr) {
      static_cast<Event*>(event)->recorded->wait();
    }
  }
  double elapsedTime(void* from, void* to, const DeviceIndex /*device*/) const override {
    TORCH_CHECK(from != nullptr && to != nullptr, "both events must be recorded");
    const auto from_ns = static_cast<Event*>(from)->recorded->at_ns();
    const auto to_ns = static_cast<Event*>(to)->recorded->at_ns();
    TORCH_CHECK(from_ns != 0 && to_ns != 0, "both events must be passed");
    return static_cast<double>(to_ns - from_ns) / 1e6;
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace device_sim
