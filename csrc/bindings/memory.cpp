// Python bindings of pinned memory and host limits.
#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "memory/host_limits.h"
#include "memory/pinned_pool.h"

namespace py = pybind11;
using py::arg;

namespace vdnn {
namespace {

using WithoutGil = py::call_guard<py::gil_scoped_release>;

void bind_limits(py::module_& module) {
  py::class_<HostLimits>(module, "HostLimits")
      .def_readonly("total_bytes", &HostLimits::total_bytes)
      .def_readonly("available_bytes", &HostLimits::available_bytes)
      .def_readonly("cgroup_limit_bytes", &HostLimits::cgroup_limit_bytes)
      .def_readonly("cgroup_used_bytes", &HostLimits::cgroup_used_bytes)
      .def_readonly("memlock_limit_bytes", &HostLimits::memlock_limit_bytes)
      .def_readonly("numa_nodes", &HostLimits::numa_nodes)
      .def_readonly("huge_page_bytes", &HostLimits::huge_page_bytes)
      .def_readonly("huge_pages_free", &HostLimits::huge_pages_free)
      .def_readonly("transparent_huge_pages", &HostLimits::transparent_huge_pages);
  module.def("host_limits", &read_host_limits, arg("root") = "/");
  module.def("default_pinned_cap_bytes", &default_pinned_cap_bytes, arg("limits"));
}

void bind_stats(py::module_& module) {
  py::class_<PoolStats>(module, "PoolStats")
      .def_readonly("live_bytes", &PoolStats::live_bytes)
      .def_readonly("live_peak_bytes", &PoolStats::live_peak_bytes)
      .def_readonly("pinned_bytes", &PoolStats::pinned_bytes)
      .def_readonly("pinned_peak_bytes", &PoolStats::pinned_peak_bytes)
      .def_readonly("cap_bytes", &PoolStats::cap_bytes)
      .def_readonly("slabs", &PoolStats::slabs)
      .def_readonly("blocks_given", &PoolStats::blocks_given)
      .def_readonly("growths_awaited", &PoolStats::growths_awaited)
      .def_readonly("growths_ahead", &PoolStats::growths_ahead)
      .def_readonly("slabs_given_back", &PoolStats::slabs_given_back)
      .def_readonly("refusals", &PoolStats::refusals)
      .def_readonly("last_growth_error", &PoolStats::last_growth_error);
}

}  // namespace

void bind_memory(py::module_& module) {
  bind_limits(module);
  bind_stats(module);
  py::enum_<Growth>(module, "Growth").value("NOW", Growth::Now).value("LATER", Growth::Later);
  py::class_<PinnedBlock, std::shared_ptr<PinnedBlock>>(module, "PinnedBlock")
      .def_property_readonly("address", &PinnedBlock::address)
      .def_property_readonly("bytes", &PinnedBlock::bytes)
      .def_property_readonly("last_uses", [](const PinnedBlock& block) { return block.last_uses().events(); })
      .def("note_use", &PinnedBlock::note_use, arg("event"));
  const PoolOptions defaults;
  py::class_<PinnedPool, std::shared_ptr<PinnedPool>>(module, "PinnedPool")
      .def(py::init([](std::shared_ptr<Device> device, std::uint64_t cap_bytes, std::uint64_t slab_bytes,
                       double slack) { return PinnedPool::create(std::move(device), {cap_bytes, slab_bytes, slack}); }),
           arg("device").none(false), arg("cap_bytes") = defaults.cap_bytes, arg("slab_bytes") = defaults.slab_bytes,
           arg("slack") = defaults.slack)
      .def("allocate", &PinnedPool::allocate, arg("bytes"), arg("growth") = Growth::Now, WithoutGil())
      .def("reserve", &PinnedPool::reserve, arg("bytes"), WithoutGil())
      .def("wait_for_growth", &PinnedPool::wait_for_growth, WithoutGil())
      .def("trim", &PinnedPool::trim, arg("kept_bytes") = 0, WithoutGil())
      .def("room_bytes", &PinnedPool::room_bytes, arg("block_bytes"), WithoutGil())
      .def_property_readonly("stats", py::cpp_function(&PinnedPool::stats, WithoutGil()))
      .def("close", &PinnedPool::close, WithoutGil());
}

}  // namespace vdnn
