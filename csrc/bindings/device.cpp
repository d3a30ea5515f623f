// Python bindings of devices, streams and events.
#include "device/device.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <sstream>
#include <vector>

#include "bindings/bindings.h"
#include "device/check/issue_log.h"
#include "device/check/ordering_checker.h"
#include "device/cuda/cuda_device.h"
#include "device/cuda/driver_library.h"
#include "device/errors.h"
#include "device/sim/sim_device.h"

namespace py = pybind11;
using py::arg;

namespace vdnn {
namespace {

using WithoutGil = py::call_guard<py::gil_scoped_release>;

// Closes the devices that are still open when the interpreter exits, while the driver is still alive. Destructors that
// run later find them closed and do nothing.
class OpenDevices {
 public:
  void add(const std::shared_ptr<Device>& device) {
    if (devices_.size() == devices_.capacity()) {  // before it grows
      const auto is_gone = [](const std::weak_ptr<Device>& weak) { return weak.expired(); };
      devices_.erase(std::remove_if(devices_.begin(), devices_.end(), is_gone), devices_.end());
    }
    devices_.push_back(device);
  }
  void close_all() noexcept {
    for (const auto& weak : devices_) {
      try {
        if (const auto device = weak.lock()) device->close();
      } catch (const std::exception&) {
        continue;  // the process is exiting, so the error cannot be reported
      }
    }
    devices_.clear();
  }

 private:
  std::vector<std::weak_ptr<Device>> devices_;  // guarded by the GIL
};

OpenDevices& open_devices() {
  static auto* devices = new OpenDevices;
  return *devices;
}

template <class Made>
std::shared_ptr<Made> noted(std::shared_ptr<Made> device) {
  open_devices().add(device);
  return device;
}

Event record(Device& device, Stream stream, bool timing) {
  return device.record(stream, timing ? Timing::On : Timing::Off);
}

std::string describe_device(const Device& device) {
  std::ostringstream text;
  text << "<vdnn " << device.info().kind << " device '" << device.info().name << "'"
       << (device.closed() ? ", closed>" : ">");
  return text.str();
}

void bind_values(py::module_& module) {
  py::class_<Stream>(module, "Stream")
      .def_readonly("device_id", &Stream::device_id)
      .def_readonly("index", &Stream::index)
      .def("__eq__", [](Stream a, Stream b) { return a == b; })
      .def("__eq__", [](Stream, const py::object&) { return false; })
      .def("__hash__", [](Stream stream) { return py::hash(py::make_tuple(stream.device_id, stream.index)); })
      .def("__repr__", [](Stream stream) {
        return "<Stream " + std::to_string(stream.index) + " of device " + std::to_string(stream.device_id) + ">";
      });
  py::class_<Event>(module, "Event")
      .def(py::init<>())
      .def_property_readonly("empty", &Event::empty)
      .def_property_readonly("stream", [](const Event& event) -> py::object {
        return event.empty() ? py::none() : py::cast(event.record().stream);
      });
  py::class_<DeviceInfo>(module, "DeviceInfo")
      .def_readonly("kind", &DeviceInfo::kind)
      .def_readonly("name", &DeviceInfo::name)
      .def_readonly("total_bytes", &DeviceInfo::total_bytes)
      .def_readonly("ordinal", &DeviceInfo::ordinal)
      .def_readonly("compute_capability", &DeviceInfo::compute_capability)
      .def_readonly("numa_node", &DeviceInfo::numa_node)
      .def_readonly("integrated", &DeviceInfo::integrated)
      .def_readonly("pci_bus_id", &DeviceInfo::pci_bus_id);
  py::enum_<CopyDirection>(module, "CopyDirection")
      .value("DEVICE_TO_HOST", CopyDirection::DeviceToHost)
      .value("HOST_TO_DEVICE", CopyDirection::HostToDevice);
  py::enum_<Access>(module, "Access")
      .value("READ", Access::Read)
      .value("WRITE", Access::Write)
      .value("RELEASE", Access::Release);
  py::enum_<Schedule>(module, "Schedule")
      .value("EAGER", Schedule::Eager)
      .value("LAZY", Schedule::Lazy)
      .value("RANDOM", Schedule::Random);
}

void bind_interface(py::module_& module) {
  py::class_<Device, std::shared_ptr<Device>>(module, "Device")
      .def_property_readonly("info", &Device::info, py::return_value_policy::copy)
      .def_property_readonly("closed", py::cpp_function(&Device::closed, WithoutGil()))
      .def("create_stream", &Device::create_stream, arg("name"), WithoutGil())
      .def("adopt_stream", &Device::adopt_stream, arg("native_handle") = 0, WithoutGil())
      .def("stream_name", &Device::stream_name, arg("stream"), WithoutGil())
      .def("record", &record, arg("stream"), arg("timing") = false, WithoutGil())
      .def("wait", &Device::wait, arg("stream"), arg("event"), WithoutGil())
      .def("query", &Device::query, arg("event"), WithoutGil())
      .def("synchronize", &Device::synchronize, arg("event"), WithoutGil())
      .def("drain", &Device::drain, arg("stream"), WithoutGil())
      .def("elapsed_ns", &Device::elapsed_ns, arg("begin"), arg("end"), WithoutGil())
      .def("copy_async", &Device::copy_async, arg("target"), arg("source"), arg("bytes"), arg("direction"),
           arg("stream"), WithoutGil())
      .def("launch", &Device::launch, arg("call"), arg("stream"), WithoutGil())
      .def("allocate_pinned", &Device::allocate_pinned, arg("bytes"), WithoutGil())
      .def("free_pinned", &Device::free_pinned, arg("address"), WithoutGil())
      .def("allocate_device", &Device::allocate_device, arg("bytes"), WithoutGil())
      .def("free_device", &Device::free_device, arg("address"), WithoutGil())
      .def(
          "note_access",
          [](Device& device, Address address, std::uint64_t bytes, Access access, Stream stream,
             const std::string& label) { device.note_access({address, bytes}, access, stream, label); },
          arg("address"), arg("bytes"), arg("access"), arg("stream"), arg("label") = "note", WithoutGil())
      .def("close", &Device::close, WithoutGil())
      .def("__repr__", &describe_device);
}

void bind_devices(py::module_& module) {
  py::class_<CudaDevice, Device, std::shared_ptr<CudaDevice>>(module, "CudaDevice")
      .def(py::init([](int ordinal, const std::string& library) {
             return noted(std::make_shared<CudaDevice>(ordinal, library));
           }),
           arg("ordinal") = 0, arg("library") = default_driver_library);
  py::class_<LinkModel>(module, "LinkModel")
      .def(py::init([](double to_host, double to_device, double duplex, std::int64_t latency_ns) {
             return LinkModel{to_host, to_device, duplex, latency_ns};
           }),
           arg("to_host_bytes_per_s") = LinkModel().to_host_bytes_per_s,
           arg("to_device_bytes_per_s") = LinkModel().to_device_bytes_per_s,
           arg("duplex_bytes_per_s") = LinkModel().duplex_bytes_per_s, arg("latency_ns") = LinkModel().latency_ns)
      .def_readonly("to_host_bytes_per_s", &LinkModel::to_host_bytes_per_s)
      .def_readonly("to_device_bytes_per_s", &LinkModel::to_device_bytes_per_s)
      .def_readonly("duplex_bytes_per_s", &LinkModel::duplex_bytes_per_s)
      .def_readonly("latency_ns", &LinkModel::latency_ns);
  const SimOptions defaults;
  py::class_<SimDevice, Device, std::shared_ptr<SimDevice>>(module, "SimDevice")
      .def(py::init([](Schedule schedule, std::uint64_t seed, bool poison, bool moves_bytes, const LinkModel& link,
                       const std::string& name, std::uint64_t total_bytes) {
             return noted(
                 std::make_shared<SimDevice>(SimOptions{schedule, seed, poison, moves_bytes, link, name, total_bytes}));
           }),
           arg("schedule") = defaults.schedule, arg("seed") = defaults.seed, arg("poison") = defaults.poison,
           arg("moves_bytes") = defaults.moves_bytes, arg("link") = defaults.link, arg("name") = defaults.name,
           arg("total_bytes") = defaults.total_bytes)
      .def("advance", &SimDevice::advance, arg("stream"), arg("duration_ns"))
      .def("now_ns", &SimDevice::now_ns, arg("stream"))
      .def("stall_ns", &SimDevice::stall_ns, arg("stream"))
      .def("set_eager", &SimDevice::set_eager, arg("stream"), arg("eager"))
      .def("runnable", &SimDevice::runnable)
      .def("run_one", &SimDevice::run_one, arg("stream"), py::call_guard<py::gil_scoped_release>())
      .def("event_ns", &SimDevice::event_ns, arg("event"));
}

void bind_checker(py::module_& module) {
  py::enum_<OnViolation>(module, "OnViolation")
      .value("RAISE", OnViolation::Throw)
      .value("COLLECT", OnViolation::Collect);
  py::class_<OrderingViolation>(module, "OrderingViolation")
      .def_property_readonly("address", [](const OrderingViolation& violation) { return violation.range.address; })
      .def_property_readonly("bytes", [](const OrderingViolation& violation) { return violation.range.bytes; })
      .def_readonly("first", &OrderingViolation::first)
      .def_readonly("first_stream", &OrderingViolation::first_stream)
      .def_readonly("second", &OrderingViolation::second)
      .def_readonly("second_stream", &OrderingViolation::second_stream)
      .def_readonly("first_issued_at", &OrderingViolation::first_issued_at)
      .def_readonly("second_issued_at", &OrderingViolation::second_issued_at)
      .def_property_readonly("missing", &OrderingViolation::missing_edge)
      .def("__repr__", [](const OrderingViolation& violation) {
        const auto at = [](const std::string& origin) { return origin.empty() ? "" : " at " + origin; };
        return "<OrderingViolation: " + violation.first + at(violation.first_issued_at) + ", then " + violation.second +
               at(violation.second_issued_at) + ">";
      });
  py::class_<OrderingChecker, Device, std::shared_ptr<OrderingChecker>>(module, "OrderingChecker")
      .def(py::init<std::shared_ptr<Device>, OnViolation>(), arg("device").none(false),
           arg("on_violation") = OnViolation::Throw)
      .def_property_readonly("inner", &OrderingChecker::inner)
      .def_property_readonly("checked_accesses", &OrderingChecker::checked_accesses)
      .def("set_origin", &OrderingChecker::set_origin, arg("origin"))
      .def("take_violations", &OrderingChecker::take_violations);
}

void bind_issue_log(py::module_& module) {
  py::class_<IssueLog, Device, std::shared_ptr<IssueLog>>(module, "IssueLog")
      .def(py::init<std::shared_ptr<Device>>(), arg("device").none(false))
      .def("take_issues", &IssueLog::take_issues);
}

}  // namespace

void bind_device(py::module_& module) {
  bind_values(module);
  bind_interface(module);
  bind_devices(module);
  bind_checker(module);
  bind_issue_log(module);
  module.attr("DEFAULT_DRIVER_LIBRARY") = default_driver_library;
  module.def(
      "driver_status",
      [](const std::string& library) {
        const DriverStatus status = driver_status(library);
        py::dict facts;
        facts["library"] = status.library;
        facts["loaded"] = status.loaded;
        facts["reason"] = status.reason;
        facts["version"] = status.version;
        facts["device_count"] = status.device_count;
        return facts;
      },
      arg("library") = default_driver_library);
  py::module_::import("atexit").attr("register")(py::cpp_function([] { open_devices().close_all(); }));
}

}  // namespace vdnn
