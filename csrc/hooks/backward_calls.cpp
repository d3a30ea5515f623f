#include "hooks/backward_calls.h"

#include <array>
#include <cstdint>

#include "hooks/gate_state.h"

namespace vdnn::hooks {
namespace {

// What Python gives, in the order of its arguments.
enum Part {
  kRun,         // runs a backward
  kRunInputs,   // the same for a backward that names its inputs, or makes a graph: see backward_inputs.py
  kTop,         // (True) -> the innermost hooks of this thread, as a pair, or None
  kPush,        // (pack, unpack)
  kPop,         // ()
  kIsEnabled,   // () -> False where torch has disabled saved-tensor hooks
  kNodeNumber,  // () -> the sequence number of this thread's next node
  kParts,
};
// Places among the arguments of kRun.
constexpr Py_ssize_t kCreateGraph = 3;
constexpr Py_ssize_t kInputs = 4;

struct BackwardCalls final {
  PyObject_HEAD std::array<PyObject*, kParts> parts;
};

// A backward of this thread without the hooks.
struct Away final {
  Gate* gate;
  Away* outer;
  bool is_dropped;  // the session was left meanwhile
};

PyTypeObject* calls_type = nullptr;
PyObject* node_number = nullptr;
thread_local Away* innermost = nullptr;
thread_local std::int64_t last_node = -1;  // of a device's thread

BackwardCalls* calls_of(PyObject* self) {
  return reinterpret_cast<BackwardCalls*>(self);
}

// -1 with no error set if it cannot be read.
std::int64_t next_node(PyObject* function) {
  const Reference number = Reference::stolen(PyObject_CallNoArgs(function));
  const std::int64_t value = number ? PyLong_AsLongLong(number.get()) : -1;
  PyErr_Clear();
  return value;
}

// The gate of a pack hook, or null.
Gate* gate_with(PyObject* pack_hook) {
  PyObject* self = PyCFunction_CheckExact(pack_hook) ? PyCFunction_GET_SELF(pack_hook) : nullptr;
  return self != nullptr && Py_TYPE(self) == gate_type() ? gate_of(self) : nullptr;
}

// The innermost hooks of this thread: null with a Python error set.
PyObject* top(const BackwardCalls* calls) {
  return PyObject_CallOneArg(calls->parts[kTop], Py_True);
}

bool creates_graph(PyObject* arguments, PyObject* keywords) {
  if (PyTuple_GET_SIZE(arguments) > kCreateGraph) {
    return PyTuple_GET_ITEM(arguments, kCreateGraph) != Py_False;
  }
  return keywords != nullptr;  // as torch does not call it
}

PyObject* run(const BackwardCalls* calls, PyObject* arguments, PyObject* keywords) {
  PyObject* inputs = PyTuple_GET_SIZE(arguments) > kInputs ? PyTuple_GET_ITEM(arguments, kInputs) : nullptr;
  const bool has_inputs = inputs != nullptr && PyTuple_CheckExact(inputs) && PyTuple_GET_SIZE(inputs) != 0;
  const bool is_for_python = has_inputs || (inputs != nullptr && creates_graph(arguments, keywords));
  return PyObject_Call(calls->parts[is_for_python ? kRunInputs : kRun], arguments, keywords);
}

// Runs a backward with the hooks, and sees if it saves.
PyObject* run_and_look(const BackwardCalls* calls, Gate* gate, PyObject* arguments, PyObject* keywords) {
  using Known = BackwardSaves::Known;
  const std::size_t before = gate->backward_saves.packed;
  PyObject* result = run(calls, arguments, keywords);
  if (gate->backward_saves.packed != before) {
    gate->backward_saves.known = Known::Some;
  } else if (result != nullptr && gate->backward_saves.known == Known::NotYet) {
    gate->backward_saves.known = Known::None;
  }
  return result;
}

// Installs the hooks again behind a backward. Drops `result` and returns null if that fails.
PyObject* put_back(const BackwardCalls* calls, PyObject* hooks, PyObject* result) {
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  const Reference pushed = Reference::stolen(PyObject_CallObject(calls->parts[kPush], hooks));
  if (pushed) {
    PyErr_Restore(type, value, trace);
    return result;
  }
  Py_XDECREF(type);
  Py_XDECREF(value);
  Py_XDECREF(trace);
  Py_XDECREF(result);
  return nullptr;
}

// Runs a backward without the hooks. No bytecode of this thread's caller runs between, so Ctrl-C cannot lose them.
PyObject* run_without(const BackwardCalls* calls, Gate* gate, PyObject* hooks, PyObject* arguments,
                      PyObject* keywords) {
  BackwardSaves& saves = gate->backward_saves;
  if (!Reference::stolen(PyObject_CallNoArgs(calls->parts[kPop]))) {
    return nullptr;
  }
  const Reference next = Reference::stolen(top(calls));
  if (next.get() != Py_None) {  // those of another session, which would see saves that are not its own
    const Reference is_back = Reference::stolen(put_back(calls, hooks, next ? Py_NewRef(Py_None) : nullptr));
    return is_back ? run(calls, arguments, keywords) : nullptr;
  }
  const std::int64_t before = next_node(calls->parts[kNodeNumber]);
  Away away{gate, innermost, false};
  innermost = &away;
  ++saves.away;
  PyObject* result = run(calls, arguments, keywords);
  --saves.away;
  innermost = away.outer;
  if (!away.is_dropped) {
    result = put_back(calls, hooks, result);
  }
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  if (next_node(calls->parts[kNodeNumber]) != before || saves.made_nodes != 0) {
    saves.made_nodes = 0;
    saves.known = BackwardSaves::Known::NotYet;
  }
  PyErr_Restore(type, value, trace);
  return result;
}

PyObject* call(PyObject* self, PyObject* arguments, PyObject* keywords) {
  const Reference held(self);
  const BackwardCalls* calls = calls_of(self);
  const Reference hooks = Reference::stolen(top(calls));
  if (!hooks) {
    return nullptr;
  }
  Gate* gate = PyTuple_CheckExact(hooks.get()) && PyTuple_GET_SIZE(hooks.get()) == 2
                   ? gate_with(PyTuple_GET_ITEM(hooks.get(), 0))
                   : nullptr;
  if (gate != nullptr && gate->backward_saves.known != BackwardSaves::Known::Some &&
      !creates_graph(arguments, keywords)) {
    const Reference is_enabled = Reference::stolen(PyObject_CallNoArgs(calls->parts[kIsEnabled]));
    if (!is_enabled) {
      return nullptr;
    }
    if (is_enabled.get() == Py_True) {
      return gate->backward_saves.known == BackwardSaves::Known::None
                 ? run_without(calls, gate, hooks.get(), arguments, keywords)
                 : run_and_look(calls, gate, arguments, keywords);
    }
  }
  return run(calls, arguments, keywords);
}

// (pack hook) -> True if a backward of this thread runs without these hooks. It does not install them again then.
PyObject* drop_hooks_away(PyObject*, PyObject* pack_hook) {
  const Gate* gate = gate_with(pack_hook);
  if (innermost == nullptr || gate == nullptr || innermost->gate != gate || innermost->is_dropped) {
    Py_RETURN_FALSE;
  }
  innermost->is_dropped = true;
  Py_RETURN_TRUE;
}

PyObject* make(PyTypeObject* type, PyObject* arguments, PyObject* keywords) {
  if (PyTuple_GET_SIZE(arguments) != kParts || (keywords != nullptr && PyDict_GET_SIZE(keywords) != 0)) {
    PyErr_Format(PyExc_TypeError, "expected %d functions", static_cast<int>(kParts));
    return nullptr;
  }
  BackwardCalls* calls = calls_of(type->tp_alloc(type, 0));  // zeroed
  if (calls == nullptr) {
    return nullptr;
  }
  for (int part = 0; part < kParts; ++part) {
    calls->parts[static_cast<std::size_t>(part)] = Py_NewRef(PyTuple_GET_ITEM(arguments, part));
  }
  Py_XSETREF(node_number, Py_NewRef(calls->parts[kNodeNumber]));
  return reinterpret_cast<PyObject*>(calls);
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  for (PyObject* part : calls_of(self)->parts) {
    Py_VISIT(part);
  }
  return 0;
}

int clear(PyObject* self) {
  for (PyObject*& part : calls_of(self)->parts) {
    Py_CLEAR(part);
  }
  return 0;
}

void dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  clear(self);
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(&make)},          {Py_tp_call, reinterpret_cast<void*>(&call)},
    {Py_tp_traverse, reinterpret_cast<void*>(&traverse)}, {Py_tp_clear, reinterpret_cast<void*>(&clear)},
    {Py_tp_dealloc, reinterpret_cast<void*>(&dealloc)},   {0, nullptr},
};
PyType_Spec spec = {"vdnn._C.BackwardCalls", sizeof(BackwardCalls), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};

PyMethodDef functions[] = {
    {"drop_hooks_away", drop_hooks_away, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

void look_for_nodes(Gate* gate) {
  if (innermost != nullptr || node_number == nullptr) {  // the thread that called the backward, which looks itself
    return;
  }
  const std::int64_t now = next_node(node_number);
  if (last_node != -1 && now != last_node) {
    gate->backward_saves.made_nodes = 1;
  }
  last_node = now;
}

bool add_backward_calls(PyObject* module) {
  if (calls_type == nullptr) {
    calls_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  }
  return calls_type != nullptr && PyModule_AddFunctions(module, functions) == 0 &&
         PyObject_SetAttrString(module, "BackwardCalls", reinterpret_cast<PyObject*>(calls_type)) == 0;
}

}  // namespace vdnn::hooks
