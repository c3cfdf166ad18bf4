// A device for tests, on the CPU: what the host launches returns at once and runs behind it.
//
// It is torch's PrivateUse1. A stream is a thread that carries out closures in order. Its memory is
// the host's, so that a kernel is the CPU's kernel of the same operator, called by that thread.

#include <chrono>
#include <cmath>
#include <map>
#include <string>
#include <thread>
#include <utility>

#include <torch/csrc/Event.h>
#include <torch/csrc/utils/pybind.h>

#include "collectives.h"
#include "guard.h"
#include "memory.h"
#include "streams.h"

namespace {

using namespace device_sim;

// What an event does that is an object of a class derived from torch.Event, which keeps Python's lock
// where it waits for a place in the launch queue, and compares itself with no derived one.
c10::Event& event_of(py::handle event) {
  return reinterpret_cast<THPEvent*>(event.ptr())->event;
}

void record(py::handle event, c10::Stream stream) {
  const py::gil_scoped_release without_lock;
  event_of(event).record(stream);
}

void wait(py::handle event, c10::Stream stream) {
  const py::gil_scoped_release without_lock;
  event_of(event).block(stream);
}

double elapsed_ms(py::handle from, py::handle to) {
  return event_of(from).elapsedTime(event_of(to));
}

// A kernel that does nothing for this time; inf: it never ends.
void busy(double seconds) {
  current_stream(current_device).push([seconds] {
    if (std::isinf(seconds)) {
      Moment().wait();
    }
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  });
}

void capture(Graph& graph) { captured = &graph; }

void end_capture() { captured = nullptr; }

void replay(const std::shared_ptr<Graph>& graph) {
  current_stream(current_device).push([graph] {
    for (const auto& kernel : graph->kernels) {
      kernel();
    }
  });
}

std::map<std::string, int64_t> counted() {
  const std::lock_guard lock(counts().mutex);
  return counts().of;
}

// Whether all streams have nothing to do, within this time: the program's threads must not end
// beneath a kernel that runs.
bool quiet(double within_s) {
  const auto until_ns = now_ns() + static_cast<int64_t>(within_s * 1e9);
  for (DeviceIndex device = 0; device < device_count; ++device) {
    for (auto* each : streams().all(device)) {
      while (!each->idle()) {
        if (now_ns() > until_ns) {
          return false;
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
  }
  return true;
}

void set_up(DeviceIndex devices) {
  TORCH_CHECK(devices <= kMostDevices, "at most ", kMostDevices, " devices");
  device_count = devices;
  c10::SetAllocator(kOurs, &device_memory());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
}

}  // namespace

PYBIND11_MODULE(device_sim_native, m) {
  const py::call_guard<py::gil_scoped_release> without_lock;
  m.def("record", &record);
  m.def("wait", &wait);
  m.def("elapsed_ms", &elapsed_ms);
  m.def("set_up", &set_up);
  m.def("busy", &busy, without_lock);
  py::class_<Graph, std::shared_ptr<Graph>>(m, "Graph")
      .def(py::init<>())
      .def("capture", &capture)
      .def("replay", &replay, without_lock);
  m.def("end_capture", &end_capture);
  m.def("is_capturing", [] { return captured != nullptr; });
  m.def("counts", &counted);
  m.def("quiet", &quiet, without_lock);
  m.def("collectives", [](std::vector<c10::intrusive_ptr<c10d::Backend>> hosts, std::string name) {
    return c10::intrusive_ptr<c10d::Backend>(
        c10::make_intrusive<Collectives>(std::move(hosts), std::move(name)));
  });
}
