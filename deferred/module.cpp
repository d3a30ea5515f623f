// The Python extension: starts and stops the accelerator, and returns its current stream and its counts.
#include <torch/extension.h>

#include "accelerator.h"

namespace {

namespace py = pybind11;
using vdnn::deferred::Accelerator;
using vdnn::deferred::MemoryStats;

// Holds a Python object. The last owner may be on any thread, and takes the GIL to release it.
std::shared_ptr<PyObject> held(py::object object) {
  return {object.release().ptr(), [](PyObject* last) {
            if (!Py_IsInitialized()) return;
            const py::gil_scoped_acquire gil;
            Py_DECREF(last);
          }};
}

// A function that calls into Python. Do not call it while holding a lock.
std::function<std::string()> asking(py::object origin) {
  if (origin.is_none()) return {};
  return [function = held(std::move(origin))]() -> std::string {
    if (!Py_IsInitialized()) return "";
    const py::gil_scoped_acquire gil;
    const py::error_scope pending_error;  // memory may be freed while an exception propagates
    return py::reinterpret_borrow<py::object>(function.get())().cast<std::string>();
  };
}

void start(py::capsule capsule, const std::vector<std::uint32_t>& streams, std::uint64_t capacity_bytes,
           py::object origin) {
  const auto* table = capsule.get_pointer<VdnnSimTable>();
  TORCH_CHECK(table->version == vdnn_sim_table_version,
              "the native core and the deferred accelerator differ: build both");
  // Tensors and events may outlive the program's own reference to the device, and are destroyed on any thread.
  const auto owner = std::static_pointer_cast<void>(held(std::move(capsule)));
  Accelerator::start(std::make_shared<Accelerator>(*table, owner, streams, capacity_bytes, asking(std::move(origin))));
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "The deferred accelerator: torch's operations, run later, on the streams of a simulated device.";
  module.def("start", &start);
  module.def("stop", &Accelerator::stop);
  module.def("current_stream", &Accelerator::current_stream);
  module.def("drain_all", [] { Accelerator::running()->drain_all(); }, py::call_guard<py::gil_scoped_release>());
  module.def("deferred", [] { return Accelerator::running()->deferred(); });
  module.def("synchronous_operations", [] { return Accelerator::running()->synchronous_operations(); });
  module.def("memory_stats", [] { return Accelerator::running()->memory().stats(); });
  module.def("reset_peak", [] { Accelerator::running()->memory().reset_peak(); });
  py::class_<MemoryStats>(module, "MemoryStats")
      .def_readonly("capacity_bytes", &MemoryStats::capacity_bytes)
      .def_readonly("allocated_bytes", &MemoryStats::allocated_bytes)
      .def_readonly("peak_bytes", &MemoryStats::peak_bytes)
      .def_readonly("allocations", &MemoryStats::allocations)
      .def_readonly("reused", &MemoryStats::reused)
      .def_readonly("flushes", &MemoryStats::flushes);
}
