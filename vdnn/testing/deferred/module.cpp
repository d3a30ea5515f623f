// The extension for Python: starting and stopping the accelerator, its streams, and what it counted.
#include <torch/extension.h>

#include "accelerator.h"

namespace {

namespace py = pybind11;
using vdnn::deferred::Accelerator;
using vdnn::deferred::MemoryStats;

void start(py::capsule capsule, const std::vector<std::uint32_t>& streams, std::uint64_t capacity_bytes) {
  const auto* table = capsule.get_pointer<VdnnSimTable>();
  TORCH_CHECK(table->version == vdnn_sim_table_version,
              "the native core and the deferred accelerator differ: build both");
  // Tensors and events may outlive the program's own hold on the device, and die on any thread.
  const std::shared_ptr<void> owner(capsule.release().ptr(), [](void* held) {
    if (!Py_IsInitialized()) return;
    const py::gil_scoped_acquire gil;
    Py_DECREF(static_cast<PyObject*>(held));
  });
  Accelerator::start(std::make_shared<Accelerator>(*table, owner, streams, capacity_bytes));
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
