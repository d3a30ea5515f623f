#include "hooks/script.h"

#include <algorithm>
#include <new>
#include <utility>

namespace vdnn::hooks {
namespace {

PyTypeObject* type_of_scripts = nullptr;

// Returns false with a Python error set.
bool read_moves(PyObject* given, std::vector<PlannedMove>& moves) {
  for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(given); ++index) {
    int lifetime = 0, is_reload = 0;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(given, index), "ip", &lifetime, &is_reload)) {
      return false;
    }
    if (lifetime < -1) {
      PyErr_Format(PyExc_ValueError, "expected a move of a lifetime or of none of the script, got %d", lifetime);
      return false;
    }
    moves.push_back({lifetime, is_reload != 0});
  }
  return true;
}

// Returns false with a Python error set. `given` is None for a save that Python moves.
bool read_moving(PyObject* given, PyObject* dtype, std::unique_ptr<Moving>& moving) {
  if (given == Py_None) {
    return true;
  }
  int is_first = 0, is_discarded = 0;
  PyObject *size = nullptr, *strides = nullptr, *target_size = nullptr, *target_strides = nullptr, *node_type = nullptr,
           *device = nullptr, *empty = nullptr, *event = nullptr;
  if (!PyArg_ParseTuple(given, "ppO!O!O!O!OOOO", &is_first, &is_discarded, &PyTuple_Type, &size, &PyTuple_Type,
                        &strides, &PyTuple_Type, &target_size, &PyTuple_Type, &target_strides, &node_type, &device,
                        &empty, &event)) {
    return false;
  }
  moving.reset(new Moving{is_first != 0, is_discarded != 0, Reference(size), Reference(strides), Reference(target_size),
                          Reference(target_strides), Reference(node_type), Reference(dtype), Reference(device),
                          Reference(empty), Reference(event)});
  return true;
}

// Returns false with a Python error set.
bool read_script(PyObject* events, Script& script) {
  const Reference fast = Reference::stolen(PySequence_Fast(events, "expected a sequence of events"));
  if (!fast) {
    return false;
  }
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(fast.get());
  script.events.reserve(static_cast<std::size_t>(count));
  for (Py_ssize_t index = 0; index < count; ++index) {
    int kind = 0, has_moves = 0, in_backward = 0, is_leaf = 0, is_read = 0, lifetime = 0;
    long long nbytes = 0, storage_bytes = 0, depth = 0;
    unsigned long long module = 0;
    PyObject *type = nullptr, *dtype = nullptr, *given_moves = nullptr, *given_moving = nullptr;
    std::vector<PlannedMove> moves;
    std::unique_ptr<Moving> moving;
    if (!PyArg_ParseTuple(PySequence_Fast_GET_ITEM(fast.get(), index), "ippppiLLKLOOO!O", &kind, &has_moves,
                          &in_backward, &is_leaf, &is_read, &lifetime, &nbytes, &storage_bytes, &module, &depth, &type,
                          &dtype, &PyTuple_Type, &given_moves, &given_moving) ||
        !read_moves(given_moves, moves) || !read_moving(given_moving, dtype, moving)) {
      return false;
    }
    if (kind < 0 || kind > static_cast<int>(Kind::Fetch) || lifetime < -1) {
      PyErr_Format(PyExc_ValueError, "event %zd: expected a kind of 0 to 4 and a lifetime, got kind %d, lifetime %d",
                   index, kind, lifetime);
      return false;
    }
    if ((static_cast<Kind>(kind) == Kind::Kept || static_cast<Kind>(kind) == Kind::Use) && lifetime < 0) {
      PyErr_Format(PyExc_ValueError, "event %zd: expected a lifetime, got none", index);
      return false;
    }
    script.lifetimes = std::max(script.lifetimes, lifetime + 1);
    for (const PlannedMove& move : moves) {
      script.lifetimes = std::max(script.lifetimes, move.lifetime + 1);
    }
    script.events.push_back(Event{static_cast<Kind>(kind), has_moves != 0, in_backward != 0, is_leaf != 0, is_read != 0,
                                  lifetime, nbytes, storage_bytes, static_cast<std::uintptr_t>(module), depth,
                                  Reference(type), Reference(dtype), std::move(moves), std::move(moving)});
  }
  return true;
}

PyObject* make_script(PyTypeObject* type, PyObject* arguments, PyObject*) {
  PyObject* events = nullptr;
  if (!PyArg_ParseTuple(arguments, "O", &events)) {
    return nullptr;
  }
  auto* made = reinterpret_cast<ScriptObject*>(type->tp_alloc(type, 0));
  if (made == nullptr) {
    return nullptr;
  }
  new (&made->script) Script();
  if (!read_script(events, made->script)) {
    Py_DECREF(made);
    return nullptr;
  }
  return reinterpret_cast<PyObject*>(made);
}

void dealloc_script(PyObject* self) {
  reinterpret_cast<ScriptObject*>(self)->script.~Script();
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyType_Slot script_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(&make_script)},
    {Py_tp_dealloc, reinterpret_cast<void*>(&dealloc_script)},
    {0, nullptr},
};

PyType_Spec script_spec = {"vdnn._C.Script", sizeof(ScriptObject), 0, Py_TPFLAGS_DEFAULT, script_slots};

}  // namespace

PyTypeObject* script_type() {
  return type_of_scripts;
}

bool add_script(PyObject* module) {
  if (type_of_scripts == nullptr) {
    type_of_scripts = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&script_spec));
  }
  return type_of_scripts != nullptr &&
         PyObject_SetAttrString(module, "Script", reinterpret_cast<PyObject*>(type_of_scripts)) == 0;
}

}  // namespace vdnn::hooks
