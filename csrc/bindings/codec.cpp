// Python bindings of the codec: a kernel call as a checked value, and its CPU reference.
//
// A KernelCall is checked when it is constructed, so it can be launched without another check. It borrows its memory:
// the caller keeps source and target alive and in place until the call has run.

#include "codec/codec.h"

#include <cstdio>
#include <string>

#include "bindings/bindings.h"

namespace py = pybind11;

namespace vdnn {
namespace {

KernelCall make_call(Kernel kernel, std::uint64_t source, std::uint64_t target, std::uint64_t count) {
  const KernelCall call{kernel, source, target, count};
  check(call);
  return call;
}

std::string represent(const KernelCall& call) {
  const auto kernel = py::cast(call.kernel).attr("name").cast<std::string>();
  char text[96];
  std::snprintf(text, sizeof(text), "source=0x%llx, target=0x%llx, count=%llu",
                static_cast<unsigned long long>(call.source), static_cast<unsigned long long>(call.target),
                static_cast<unsigned long long>(call.count));
  return "KernelCall(" + kernel + ", " + text + ")";
}

void bind_kernel_call(py::module_& m) {
  py::enum_<Kernel>(m, "Kernel", "The codec's kernels.")
      .value("PACK_BITS", Kernel::PackBits, "Packs each byte into one bit, set if the byte is not 0.")
      .value("UNPACK_BITS", Kernel::UnpackBits, "Unpacks each bit into one byte, 0 or 1.")
      .value("CONTENT_HASH", Kernel::ContentHash, "Hashes the bytes into one 64-bit word.");

  py::class_<KernelCall>(m, "KernelCall",
                         "One call of a codec kernel. Checked when constructed; borrows the memory that it names.")
      .def(py::init(&make_call), py::arg("kernel"), py::arg("source"), py::arg("target"), py::arg("count"))
      .def_readonly("kernel", &KernelCall::kernel)
      .def_readonly("source", &KernelCall::source)
      .def_readonly("target", &KernelCall::target)
      .def_readonly("count", &KernelCall::count)
      .def_property_readonly("source_bytes", &source_bytes)
      .def_property_readonly("target_bytes", &target_bytes)
      .def("__repr__", &represent);
}

}  // namespace

void bind_codec(py::module_& m) {
  bind_kernel_call(m);
  m.def("run_on_cpu", &run_on_cpu, py::arg("call"), py::call_guard<py::gil_scoped_release>(),
        "Runs the call's CPU reference on the calling thread; source and target are host memory. Blocks.");
  m.def(
      "device_code_present", [] { return embedded_device_code() != nullptr; },
      "True if this build contains the CUDA kernels.");
  m.def("device_code_missing_reason", &device_code_missing_reason,
        "Why this build lacks the CUDA kernels, as a sentence; \"\" if it has them.");
}

}  // namespace vdnn
