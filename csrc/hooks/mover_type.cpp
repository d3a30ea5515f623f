// The Python type of the mover.
#include <new>

#include "hooks/mover_state.h"
#include "hooks/native_parts.h"

namespace vdnn::hooks {
namespace {

PyTypeObject* type_of_movers = nullptr;

Mover* mover_of(PyObject* self) {
  return reinterpret_cast<Mover*>(self);
}

// A settled step begins.
PyObject* begin(PyObject* self, PyObject* arguments) {
  PyObject *script = nullptr, *queue = nullptr, *device = nullptr, *stream = nullptr, *current = nullptr,
           *expected = nullptr, *streams = nullptr;
  int alignment = 0, is_checked = 0, notes_releases = 0;
  if (!PyArg_ParseTuple(arguments, "O!OOOOOO!ipp", script_type(), &script, &queue, &device, &stream, &current,
                        &expected, &PyDict_Type, &streams, &alignment, &is_checked, &notes_releases)) {
    return nullptr;
  }
  Transfer transfer;
  if (alignment < 1) {
    PyErr_SetString(PyExc_ValueError, "expected an alignment of at least 1 byte");
    return nullptr;
  }
  if (!queue_of(queue, transfer.queue) || !device_of(device, transfer.device) || !stream_of(stream, transfer.stream)) {
    return nullptr;
  }
  transfer.python_stream = Reference(stream);
  transfer.current_stream = Reference(current);
  transfer.expected_stream = Reference(expected);
  transfer.streams = Reference(streams);
  transfer.alignment = static_cast<Address>(alignment);
  transfer.is_checked = is_checked != 0;
  transfer.notes_releases = notes_releases != 0;
  Mover* mover = mover_of(self);
  MoverState* state = mover->state;
  const auto lifetimes = static_cast<std::size_t>(reinterpret_cast<ScriptObject*>(script)->script.lifetimes);
  state->by_lifetime.assign(lifetimes, nullptr);
  state->is_in_python.assign(lifetimes, 1);
  std::swap(state->transfer, transfer);  // the old one last: dropping it may run any code
  mover->is_open = true;
  Py_RETURN_NONE;
}

// The step is over, or Python continues with it. Returns what was counted.
PyObject* end(PyObject* self, PyObject*) {
  Mover* mover = mover_of(self);
  mover->is_open = false;
  if (!hand_over_all(mover)) {
    return nullptr;
  }
  const Transfer transfer = std::exchange(mover->state->transfer, Transfer());
  const Counts counts = std::exchange(mover->state->counts, Counts());
  const auto given = [](std::int64_t count) { return static_cast<long long>(count); };
  return Py_BuildValue("(LLLLLLLLLLLLL)", given(counts.storages), given(counts.storage_bytes),
                       given(counts.shared_saves), given(counts.uses), given(counts.demand_reloads),
                       given(counts.prefetched_reloads), given(counts.reloaded_bytes), given(counts.freed_bytes),
                       given(counts.used_in_place), given(counts.used_recomputed), given(counts.discarded),
                       given(counts.discarded_bytes), given(counts.recomputes));
}

// Python is about to manage the storage of this native object.
PyObject* python_manages(PyObject* self, PyObject* address) {
  const MoverState* state = mover_of(self)->state;
  const auto known = state->by_address.find(reinterpret_cast<std::uintptr_t>(PyLong_AsVoidPtr(address)));
  if (PyErr_Occurred() != nullptr || (known != state->by_address.end() && !hand_over(known->second))) {
    return nullptr;
  }
  Py_RETURN_NONE;
}

// The newest save of each storage that was discarded, as a list.
PyObject* discarded(PyObject* self, PyObject*) {
  Reference list = Reference::stolen(PyList_New(0));
  for (const LightStorage* storage : mover_of(self)->state->by_lifetime) {
    if (storage != nullptr && storage->recipe && storage->newest != nullptr &&
        (!list || PyList_Append(list.get(), reinterpret_cast<PyObject*>(storage->newest)) != 0)) {
      return nullptr;
    }
  }
  return list.release();
}

PyObject* make_mover(PyTypeObject* type, PyObject* arguments, PyObject* keywords) {
  if (PyTuple_GET_SIZE(arguments) != kMoverParts || (keywords != nullptr && PyDict_GET_SIZE(keywords) != 0) ||
      !PyDict_Check(PyTuple_GET_ITEM(arguments, kLatest)) || !PyDict_Check(PyTuple_GET_ITEM(arguments, kOverwrites)) ||
      !PyTuple_CheckExact(PyTuple_GET_ITEM(arguments, kKeywords))) {
    PyErr_Format(PyExc_TypeError, "expected the %d parts of a mover", static_cast<int>(kMoverParts));
    return nullptr;
  }
  for (const MoverPart part : {kShape, kDevice, kNode, kBase, kData, kVersionOf, kRequiresGrad}) {
    if (Py_TYPE(PyTuple_GET_ITEM(arguments, part))->tp_descr_get == nullptr) {
      PyErr_SetString(PyExc_TypeError, "expected descriptors of torch.Tensor");
      return nullptr;
    }
  }
  Mover* mover = mover_of(type->tp_alloc(type, 0));  // zeroed
  if (mover == nullptr) {
    return nullptr;
  }
  for (int part = 0; part < kMoverParts; ++part) {
    mover->parts[static_cast<std::size_t>(part)] = Py_NewRef(PyTuple_GET_ITEM(arguments, part));
  }
  mover->state = new MoverState();
  return reinterpret_cast<PyObject*>(mover);
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  for (PyObject* part : mover_of(self)->parts) {
    Py_VISIT(part);
  }
  return 0;
}

int clear(PyObject* self) {
  for (PyObject*& part : mover_of(self)->parts) {
    Py_CLEAR(part);
  }
  return 0;
}

void dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  clear(self);
  delete mover_of(self)->state;
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyMethodDef methods[] = {
    {"begin", begin, METH_VARARGS, nullptr},
    {"end", end, METH_NOARGS, nullptr},
    {"python_manages", python_manages, METH_O, nullptr},
    {"discarded", discarded, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyObject* has_discarded(PyObject* self, void*) {
  return PyBool_FromLong(mover_of(self)->state->discarded != 0);
}

PyGetSetDef properties[] = {
    {"has_discarded", has_discarded, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(&make_mover)},
    {Py_tp_dealloc, reinterpret_cast<void*>(&dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(&traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(&clear)},
    {Py_tp_methods, methods},
    {Py_tp_getset, properties},
    {0, nullptr},
};

PyType_Spec spec = {"vdnn._C.Mover", sizeof(Mover), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};

}  // namespace

PyTypeObject* mover_type() {
  return type_of_movers;
}

bool add_mover(PyObject* module) {
  if (type_of_movers == nullptr) {
    type_of_movers = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  }
  return type_of_movers != nullptr &&
         PyObject_SetAttrString(module, "Mover", reinterpret_cast<PyObject*>(type_of_movers)) == 0 &&
         add_light_storage(module);
}

}  // namespace vdnn::hooks
