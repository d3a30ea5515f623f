// Translates native errors into the classes of vdnn.errors, which build the messages.
#include "device/errors.h"

#include "bindings/bindings.h"

namespace py = pybind11;

namespace vdnn {
namespace {

void raise(const Error& error) {
  py::dict facts;
  for (const auto& [name, value] : error.facts()) {
    if (const auto* number = std::get_if<std::uint64_t>(&value)) {
      facts[name] = *number;
    } else {
      facts[name] = std::get<std::string>(value);
    }
  }
  const py::object made = py::module_::import("vdnn.errors").attr("from_native")(error.kind(), facts);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(made.ptr())), made.ptr());
}

}  // namespace

void bind_errors(py::module_&) {
  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const Error& error) {
      raise(error);
    }
  });
}

}  // namespace vdnn
