// Reads many settings of Python at once: the functions that return them are called one after another, and if all return
// what they returned before, the answer is the same tuple as before. So a reader of settings that rarely change pays
// for the calls alone, and compares by identity.
#include <Python.h>
#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <optional>

#include "bindings/bindings.h"

namespace py = pybind11;

namespace vdnn {
namespace {

using Getters = py::typing::Tuple<py::typing::Callable<py::object()>, py::ellipsis>;
using Settings = py::typing::Tuple<py::object, py::ellipsis>;

// True if both are equal, -1 with an exception if that cannot be said.
int are_equal(PyObject* value, PyObject* before) {
  return value == before ? 1 : PyObject_RichCompareBool(value, before, Py_EQ);
}

Settings read_settings(const Getters& getters, const std::optional<Settings>& last) {
  const auto size = static_cast<py::ssize_t>(getters.size());
  const py::object before = last ? py::object(*last) : py::none();
  const bool has_before = last && static_cast<py::ssize_t>(last->size()) == size;
  py::object made;  // null while all are as before
  for (py::ssize_t index = 0; index < size; ++index) {
    const auto value = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(PyTuple_GET_ITEM(getters.ptr(), index)));
    if (!value) throw py::error_already_set();
    const int is_equal = has_before && !made ? are_equal(value.ptr(), PyTuple_GET_ITEM(before.ptr(), index)) : 0;
    if (is_equal < 0) throw py::error_already_set();
    if (is_equal > 0) continue;
    if (!made) {  // those ahead of the first that differs are as before
      made = py::tuple(size);
      for (py::ssize_t earlier = 0; earlier < index; ++earlier) {
        PyTuple_SET_ITEM(made.ptr(), earlier, Py_NewRef(PyTuple_GET_ITEM(before.ptr(), earlier)));
      }
    }
    PyTuple_SET_ITEM(made.ptr(), index, Py_NewRef(value.ptr()));
  }
  return py::reinterpret_borrow<Settings>(made ? made : before);
}

}  // namespace

void bind_settings(py::module_& module) {
  module.def("read_settings", &read_settings, py::arg("getters"), py::arg("before"));
}

}  // namespace vdnn
