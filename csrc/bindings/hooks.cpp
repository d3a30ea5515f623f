// The hooks are types of CPython's own C API, because pybind11 takes longer to call than a hook may. Built with the
// module and not with the core, which knows no Python.
#include "hooks/gate.h"

#include "bindings/bindings.h"
#include "hooks/backward_calls.h"
#include "hooks/counted_recipe.h"
#include "hooks/native_parts.h"
#include "hooks/node_notes.h"
#include "hooks/norm_calls.h"
#include "hooks/plain_run.h"
#include "hooks/running_modules.h"
#include "hooks/torch_settings.h"
#include "hooks/usable_saves.h"
#include "hooks/weak_storage.h"

namespace py = pybind11;

namespace vdnn {

void bind_hooks(py::module_& module) {
  if (!hooks::add_gate(module.ptr()) || !hooks::add_backward_calls(module.ptr()) ||
      !hooks::add_running_modules(module.ptr()) || !hooks::add_torch_settings(module.ptr()) ||
      !hooks::add_node_notes(module.ptr()) || !hooks::add_plain_run(module.ptr()) ||
      !hooks::add_norm_calls(module.ptr()) || !hooks::add_counted_recipe(module.ptr()) ||
      !hooks::add_weak_storage(module.ptr()) || !hooks::add_usable_saves(module.ptr())) {
    throw py::error_already_set();
  }
}

namespace hooks {
namespace {

template <class Native>
bool cast(PyObject* object, Native& native) {
  try {
    native = py::handle(object).cast<Native>();
    return true;
  } catch (const py::cast_error& error) {
    PyErr_SetString(PyExc_TypeError, error.what());
    return false;
  }
}

template <class Native>
PyObject* wrapped(const Native& native) {
  try {
    return py::cast(native).release().ptr();
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  }
}

}  // namespace

bool queue_of(PyObject* object, std::shared_ptr<TransferQueue>& queue) {
  return cast(object, queue);
}
bool device_of(PyObject* object, std::shared_ptr<Device>& device) {
  return cast(object, device);
}
bool stream_of(PyObject* object, Stream& stream) {
  return cast(object, stream);
}
PyObject* as_python(const std::shared_ptr<HostCopy>& copy) {
  return wrapped(copy);
}
PyObject* as_python(const std::shared_ptr<Reload>& reload) {
  return wrapped(reload);
}

}  // namespace hooks
}  // namespace vdnn
