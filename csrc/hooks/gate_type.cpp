// The Python type of the gate.
#include <Python.h>
// Python.h comes first
#include <structmember.h>

#include "hooks/gate.h"
#include "hooks/gate_state.h"
#include "hooks/torch_settings.h"

namespace vdnn::hooks {
namespace {

PyTypeObject* type_of_gates = nullptr;

PyObject* open(PyObject* self, PyObject* arguments) {
  Gate* gate = gate_of(self);
  PyObject *script = nullptr, *stack = nullptr;
  if (!PyArg_ParseTuple(arguments, "O!O", script_type(), &script, &stack)) {
    return nullptr;
  }
  if (stack != Py_None && !PyList_CheckExact(stack)) {
    PyErr_SetString(PyExc_TypeError, "expected a list of modules or None");
    return nullptr;
  }
  const bool has_stack = stack != Py_None;
  Py_INCREF(script);
  Py_XSETREF(gate->followed, reinterpret_cast<ScriptObject*>(script));
  Py_XSETREF(gate->stack, has_stack ? Py_NewRef(stack) : nullptr);
  gate->ledger->begin_step(gate->followed->script.lifetimes);
  gate->position = 0;
  gate->noted_depth = has_stack ? PyList_GET_SIZE(stack) : 0;
  gate->save_thread = PyThread_get_thread_ident();
  gate->use_thread = 0;
  gate->calls_python = 0;
  Py_RETURN_NONE;
}

PyObject* close(PyObject* self, PyObject*) {
  Gate* gate = gate_of(self);
  Py_CLEAR(gate->followed);
  Py_CLEAR(gate->stack);
  return PyLong_FromSize_t(gate->position);
}

PyObject* advance(PyObject* self, PyObject*) {
  ++gate_of(self)->position;
  Py_RETURN_NONE;
}

// The moves of an event that Python serves, as far as they are the mover's.
PyObject* make_light_moves(PyObject* self, PyObject* arguments) {
  const Gate* gate = gate_of(self);
  Py_ssize_t position = 0;
  int reloads = 0;
  if (!PyArg_ParseTuple(arguments, "np", &position, &reloads)) {
    return nullptr;
  }
  const Reference held(reinterpret_cast<PyObject*>(gate->followed));
  if (held) {
    const auto& events = gate->followed->script.events;
    if (position < 0 || static_cast<std::size_t>(position) >= events.size()) {
      PyErr_Format(PyExc_IndexError, "expected one of %zu events, got %zd", events.size(), position);
      return nullptr;
    }
    if (!make_moves(gate->mover, events[static_cast<std::size_t>(position)], reloads != 0)) {
      return nullptr;
    }
  }
  Py_RETURN_NONE;
}

// Called in the hook that begins a step. The host is measured from the end of this hook on.
PyObject* measure_host(PyObject* self, PyObject*) {
  HostTimes& times = gate_of(self)->host;
  const std::int64_t hooks = times.hooks;
  times = HostTimes();
  times.hooks = hooks;
  times.last_ns = host_now_ns();
  times.is_on = true;
  Py_RETURN_NONE;
}

// The host is no longer measured. Returns the fields of HostTimes in runtime/steps/host_meter.py.
PyObject* host_times(PyObject* self, PyObject*) {
  HostTimes& times = gate_of(self)->host;
  times.is_on = false;
  const auto given = [](std::int64_t count) { return static_cast<long long>(count); };
  return Py_BuildValue("(LLLLLL)", given(times.outside_ns), given(times.kept_ns), given(times.moving_ns),
                       given(times.moves), given(times.recomputing_ns), given(times.recomputes));
}

PyObject* set_lesson(PyObject* self, PyObject* lesson) {
  Gate* gate = gate_of(self);
  Py_XINCREF(lesson == Py_None ? nullptr : lesson);
  Py_XSETREF(gate->lesson, lesson == Py_None ? nullptr : lesson);
  Py_RETURN_NONE;
}

PyObject* alive(PyObject* self, PyObject*) {
  return gate_of(self)->ledger->alive();
}
PyObject* saves(PyObject* self, PyObject*) {
  return gate_of(self)->ledger->saves();
}
PyObject* is_open(PyObject* self, void*) {
  return PyBool_FromLong(gate_of(self)->followed != nullptr);
}
PyObject* uses_here(PyObject* self, void*) {
  const Gate* gate = gate_of(self);
  return PyBool_FromLong(gate->use_thread == 0 || gate->use_thread == PyThread_get_thread_ident());
}
PyObject* position(PyObject* self, void*) {
  return PyLong_FromSize_t(gate_of(self)->position);
}
PyObject* living(PyObject* self, void*) {
  return PyLong_FromLongLong(gate_of(self)->ledger->living());
}
PyObject* step(PyObject* self, void*) {
  return PyLong_FromLongLong(gate_of(self)->ledger->step());
}
PyObject* kept_bytes(PyObject* self, void*) {
  return PyLong_FromLongLong(gate_of(self)->ledger->kept_bytes());
}

PyObject* make_gate(PyTypeObject* type, PyObject* arguments, PyObject* keywords) {
  if (PyTuple_GET_SIZE(arguments) != kParts || (keywords != nullptr && PyDict_GET_SIZE(keywords) != 0) ||
      !PySet_CheckExact(PyTuple_GET_ITEM(arguments, kDiscarded)) ||
      !is_torch_settings(PyTuple_GET_ITEM(arguments, kSettings)) ||
      Py_TYPE(PyTuple_GET_ITEM(arguments, kMover)) != mover_type() ||
      Py_TYPE(PyTuple_GET_ITEM(arguments, kUnplanned)) != unplanned_saves_type()) {
    PyErr_Format(PyExc_TypeError, "expected %d arguments, among them a set, settings, a mover and unplanned saves",
                 static_cast<int>(kParts));
    return nullptr;
  }
  for (const Part part : {kVersion, kIsLeaf, kNbytes, kDtype, kGradFn, kOutputNr}) {
    if (Py_TYPE(PyTuple_GET_ITEM(arguments, part))->tp_descr_get == nullptr) {
      PyErr_SetString(PyExc_TypeError, "expected descriptors of torch.Tensor");
      return nullptr;
    }
  }
  Gate* gate = gate_of(type->tp_alloc(type, 0));  // zeroed
  if (gate == nullptr) {
    return nullptr;
  }
  for (int part = 0; part < kParts; ++part) {
    gate->parts[static_cast<std::size_t>(part)] = Py_NewRef(PyTuple_GET_ITEM(arguments, part));
  }
  gate->ledger = Ledger::make();
  gate->mover = reinterpret_cast<Mover*>(gate->parts[kMover]);
  gate->unplanned = reinterpret_cast<UnplannedSaves*>(gate->parts[kUnplanned]);
  gate->unplanned->gate = gate;
  return reinterpret_cast<PyObject*>(gate);
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  const Gate* gate = gate_of(self);
  Py_VISIT(Py_TYPE(self));
  for (PyObject* part : gate->parts) {
    Py_VISIT(part);
  }
  Py_VISIT(gate->lesson);
  Py_VISIT(gate->stack);
  Py_VISIT(gate->followed);
  return 0;
}

// A cleared gate is garbage: no graph holds its hooks.
int clear(PyObject* self) {
  Gate* gate = gate_of(self);
  if (gate->unplanned != nullptr) {
    gate->unplanned->gate = nullptr;
    gate->unplanned = nullptr;
  }
  for (PyObject*& part : gate->parts) {
    Py_CLEAR(part);
  }
  Py_CLEAR(gate->lesson);
  Py_CLEAR(gate->stack);
  Py_CLEAR(gate->followed);
  return 0;
}

void dealloc_gate(PyObject* self) {
  PyObject_GC_UnTrack(self);
  clear(self);
  gate_of(self)->ledger->drop();
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyMethodDef gate_methods[] = {
    {"pack", pack, METH_O, nullptr},
    {"unpack", unpack, METH_O, nullptr},
    {"open", open, METH_VARARGS, nullptr},
    {"close", close, METH_NOARGS, nullptr},
    {"set_lesson", set_lesson, METH_O, nullptr},
    {"advance", advance, METH_NOARGS, nullptr},
    {"measure_host", measure_host, METH_NOARGS, nullptr},
    {"host_times", host_times, METH_NOARGS, nullptr},
    {"alive", alive, METH_NOARGS, nullptr},
    {"saves", saves, METH_NOARGS, nullptr},
    {"make_moves", make_light_moves, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef gate_properties[] = {
    {"is_open", is_open, nullptr, nullptr, nullptr},       {"position", position, nullptr, nullptr, nullptr},
    {"living", living, nullptr, nullptr, nullptr},         {"step", step, nullptr, nullptr, nullptr},
    {"kept_bytes", kept_bytes, nullptr, nullptr, nullptr}, {"uses_here", uses_here, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyMemberDef gate_members[] = {
    {"calls_python", T_BOOL, offsetof(Gate, calls_python), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyType_Slot gate_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(&make_gate)},
    {Py_tp_dealloc, reinterpret_cast<void*>(&dealloc_gate)},
    {Py_tp_traverse, reinterpret_cast<void*>(&traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(&clear)},
    {Py_tp_methods, gate_methods},
    {Py_tp_getset, gate_properties},
    {Py_tp_members, gate_members},
    {0, nullptr},
};

PyType_Spec gate_spec = {"vdnn._C.Gate", sizeof(Gate), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, gate_slots};

}  // namespace

PyTypeObject* gate_type() {
  return type_of_gates;
}

bool add_gate(PyObject* module) {
  if (type_of_gates == nullptr) {
    type_of_gates = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&gate_spec));
  }
  return type_of_gates != nullptr &&
         PyObject_SetAttrString(module, "Gate", reinterpret_cast<PyObject*>(type_of_gates)) == 0 &&
         add_script(module) && add_kept_save(module) && add_mover(module) && add_unplanned_saves(module);
}

}  // namespace vdnn::hooks
