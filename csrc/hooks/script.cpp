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

// What `script.resized(numbers, events)` reads its numbers from.
struct Numbers final {
  PyObject* tuple;

  // Borrowed. Null with a Python error set.
  [[nodiscard]] PyObject* at(std::int64_t index) const {
    if (index < 0 || index >= PyTuple_GET_SIZE(tuple)) {
      PyErr_Format(PyExc_IndexError, "expected one of %zd numbers, got %lld", PyTuple_GET_SIZE(tuple),
                   static_cast<long long>(index));
      return nullptr;
    }
    return PyTuple_GET_ITEM(tuple, index);
  }

  // Returns false with a Python error set.
  [[nodiscard]] bool read(std::int64_t index, std::int64_t& number) const {
    PyObject* found = at(index);
    number = found == nullptr ? -1 : PyLong_AsLongLong(found);
    return number != -1 || PyErr_Occurred() == nullptr;
  }

  // A tuple of numbers in place of one of their indices. Null with a Python error set.
  [[nodiscard]] Reference all(PyObject* indices) const {
    const Py_ssize_t count = PyTuple_GET_SIZE(indices);
    Reference made = Reference::stolen(PyTuple_New(count));
    for (Py_ssize_t place = 0; made && place < count; ++place) {
      PyObject* found = at(PyLong_AsLongLong(PyTuple_GET_ITEM(indices, place)));
      if (found == nullptr) {
        return {};
      }
      PyTuple_SET_ITEM(made.get(), place, Py_NewRef(found));
    }
    return made;
  }
};

// Null with a Python error set.
std::unique_ptr<Moving> resized_moving(const Moving& moving, const Numbers& numbers, PyObject* event) {
  Reference size = numbers.all(moving.size.get()), strides = numbers.all(moving.strides.get());
  Reference target_size = numbers.all(moving.target_size.get()),
            target_strides = numbers.all(moving.target_strides.get());
  if (!size || !strides || !target_size || !target_strides) {
    return nullptr;
  }
  return std::unique_ptr<Moving>(
      new Moving{moving.is_first, moving.is_discarded, std::move(size), std::move(strides), std::move(target_size),
                 std::move(target_strides), Reference(moving.node_type.get()), Reference(moving.dtype.get()),
                 Reference(moving.device.get()), Reference(moving.empty.get()), Reference(event)});
}

// Returns false with a Python error set.
bool resize(const Script& script, const Numbers& numbers, PyObject* events, Script& made) {
  made.lifetimes = script.lifetimes;
  made.events.reserve(script.events.size());
  for (const Event& event : script.events) {
    std::int64_t nbytes = 0, storage_bytes = 0;
    if (!numbers.read(event.nbytes, nbytes) || !numbers.read(event.storage_bytes, storage_bytes)) {
      return false;
    }
    std::unique_ptr<Moving> moving;
    if (event.moving != nullptr) {
      PyObject* later = PyList_GET_ITEM(events, static_cast<Py_ssize_t>(made.events.size()));
      moving = resized_moving(*event.moving, numbers, later);
      if (moving == nullptr) {
        return false;
      }
    }
    made.events.push_back(Event{event.kind, event.has_moves, event.in_backward, event.is_leaf, event.is_read,
                                event.lifetime, nbytes, storage_bytes, event.module, event.depth,
                                Reference(event.type.get()), Reference(event.dtype.get()), event.moves,
                                std::move(moving)});
  }
  return true;
}

// (numbers, events): the same script with other numbers. In this one all sizes and bytes are indices of numbers.
// `events` is a list with an object for each event: what Python is given for the saves that the gate moves.
PyObject* resized(PyObject* self, PyObject* arguments) {
  const Script& script = reinterpret_cast<ScriptObject*>(self)->script;
  PyObject *numbers = nullptr, *events = nullptr;
  if (!PyArg_ParseTuple(arguments, "O!O!", &PyTuple_Type, &numbers, &PyList_Type, &events)) {
    return nullptr;
  }
  if (static_cast<std::size_t>(PyList_GET_SIZE(events)) != script.events.size()) {
    PyErr_Format(PyExc_ValueError, "expected %zu events, got %zd", script.events.size(), PyList_GET_SIZE(events));
    return nullptr;
  }
  auto* made = reinterpret_cast<ScriptObject*>(type_of_scripts->tp_alloc(type_of_scripts, 0));
  if (made == nullptr) {
    return nullptr;
  }
  new (&made->script) Script();
  if (!resize(script, Numbers{numbers}, events, made->script)) {
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

PyMethodDef script_methods[] = {
    {"resized", resized, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot script_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(&make_script)},
    {Py_tp_dealloc, reinterpret_cast<void*>(&dealloc_script)},
    {Py_tp_methods, script_methods},
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
