// The hooks are types of CPython's own C API, because pybind11 takes longer to call than a hook may. Built with the
// module and not with the core, which knows no Python.
#include "hooks/gate.h"

#include "bindings/bindings.h"

namespace py = pybind11;

namespace vdnn {

void bind_hooks(py::module_& module) {
  if (!hooks::add_gate(module.ptr())) {
    throw py::error_already_set();
  }
}

}  // namespace vdnn
