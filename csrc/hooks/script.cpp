#include "hooks/script.h"

#include <algorithm>

namespace vdnn::hooks {

bool read_script(PyObject* events, Script& script) {
  const Reference fast = Reference::stolen(PySequence_Fast(events, "expected a sequence of events"));
  if (!fast) {
    return false;
  }
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(fast.get());
  script.events.reserve(static_cast<std::size_t>(count));
  for (Py_ssize_t index = 0; index < count; ++index) {
    int kind = 0, has_moves = 0, in_backward = 0, is_leaf = 0, lifetime = 0;
    long long nbytes = 0, storage_bytes = 0, depth = 0;
    unsigned long long module = 0;
    PyObject *type = nullptr, *dtype = nullptr;
    if (!PyArg_ParseTuple(PySequence_Fast_GET_ITEM(fast.get(), index), "ipppiLLKLOO", &kind, &has_moves, &in_backward,
                          &is_leaf, &lifetime, &nbytes, &storage_bytes, &module, &depth, &type, &dtype)) {
      return false;
    }
    if (kind < 0 || kind > static_cast<int>(Kind::Fetch) || lifetime < -1) {
      PyErr_Format(PyExc_ValueError, "event %zd: expected a kind of 0 to 4 and a lifetime, got kind %d, lifetime %d",
                   index, kind, lifetime);
      return false;
    }
    if (static_cast<Kind>(kind) != Kind::Exempt && lifetime < 0) {
      PyErr_Format(PyExc_ValueError, "event %zd: expected a lifetime, got none", index);
      return false;
    }
    script.lifetimes = std::max(script.lifetimes, lifetime + 1);
    script.events.push_back(Event{static_cast<Kind>(kind), has_moves != 0, in_backward != 0, is_leaf != 0, lifetime,
                                  nbytes, storage_bytes, static_cast<std::uintptr_t>(module), depth, Reference(type),
                                  Reference(dtype)});
  }
  return true;
}

}  // namespace vdnn::hooks
