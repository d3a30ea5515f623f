#include "hooks/running_modules.h"

// Python.h comes first
#include <structmember.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <unordered_map>

#include "hooks/boundaries.h"
#include "hooks/gate_state.h"
#include "hooks/node_notes.h"
#include "hooks/torch_settings.h"

namespace vdnn::hooks {
namespace {

// What Python gives, in the order of its arguments.
enum RunningPart {
  kBegins,          // (module): the outermost call begins; or None
  kAdd,             // (tensor): notes the storage of a parameter or buffer
  kPlain,           // a tuple of the classes of tensors whose storage torch's method returns
  kKnown,           // a dict with the native addresses of the storages that are noted
  kUntypedStorage,  // torch's method
  kNodeNumber,      // () -> the sequence number of the next node
  kCompiler,        // the dict of torch.compiler
  kRunningParts,
};

// The facts that are noted. vdnn/runtime/torch_internals/module_watch.py has the same numbers.
constexpr unsigned char kSettings = 1;
constexpr unsigned char kLeaves = 2;
constexpr unsigned char kAllFacts = kSettings | kLeaves;

using Needs = std::unordered_map<std::uintptr_t, unsigned char>;  // facts by module

struct RunningModules final {
  PyObject_HEAD std::array<PyObject*, kRunningParts> parts;
  PyObject* of_thread;  // its attribute `stack` is this thread's list of running modules
  PyObject* before;     // (module): notes the versions of its leaves; null: nothing is noted
  PyObject* settings;   // see torch_settings.h
  PyObject* gate;       // or null
  Needs* needs;
  Py_ssize_t boundaries;  // calls that have begun or ended
  char notes_everything;
  char needs_boundaries;
};

PyObject* stack_name = nullptr;
PyObject* address_name = nullptr;
PyObject* compiling_name = nullptr;
std::array<PyObject*, 2> group_names{};

RunningModules* running_of(PyObject* self) {
  return reinterpret_cast<RunningModules*>(self);
}

std::uintptr_t id_of(PyObject* object) {
  return reinterpret_cast<std::uintptr_t>(object);
}

// A traced program has no module calls: its saves belong to the whole region.
bool is_traced(const RunningModules* running) {
  return PyDict_GetItemWithError(running->parts[kCompiler], compiling_name) == Py_True;
}

// The running modules of this thread. Null with a Python error set.
Reference stack_of(const RunningModules* running) {
  Reference stack = Reference::stolen(PyObject_GetAttr(running->of_thread, stack_name));
  if (stack && !PyList_CheckExact(stack.get())) {
    PyErr_SetString(PyExc_TypeError, "expected a list of modules");
    return {};
  }
  return stack;
}

bool is_plain(const RunningModules* running, PyObject* tensor) {
  PyObject* classes = running->parts[kPlain];
  for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(classes); ++index) {
    if (PyTuple_GET_ITEM(classes, index) == reinterpret_cast<PyObject*>(Py_TYPE(tensor))) {
      return true;
    }
  }
  return false;
}

// True if the storage of a plain tensor is noted. False also where only Python can tell.
bool is_known(const RunningModules* running, PyObject* tensor) {
  if (!is_plain(running, tensor)) {
    return false;
  }
  const Reference storage = Reference::stolen(PyObject_CallOneArg(running->parts[kUntypedStorage], tensor));
  const Reference address = storage ? Reference::stolen(PyObject_GetAttr(storage.get(), address_name)) : Reference();
  const int found = address ? PyDict_Contains(running->parts[kKnown], address.get()) : -1;
  PyErr_Clear();
  return found == 1;
}

// Returns false with a Python error set. `tensor` may be None.
bool note_storage(const RunningModules* running, PyObject* tensor) {
  const Reference held(tensor);
  return tensor == Py_None || is_known(running, tensor) ||
         Reference::stolen(PyObject_CallOneArg(running->parts[kAdd], tensor));
}

// Returns false with a Python error set. A scripted module has no dict of its parameters.
bool note_storages_of_values(const RunningModules* running, PyObject* group) {
  const Reference values = Reference::stolen(PyObject_CallMethod(group, "values", nullptr));
  const Reference iterator = values ? Reference::stolen(PyObject_GetIter(values.get())) : Reference();
  while (iterator) {
    const Reference tensor = Reference::stolen(PyIter_Next(iterator.get()));
    if (!tensor) {
      break;
    }
    if (!note_storage(running, tensor.get())) {
      return false;
    }
  }
  return PyErr_Occurred() == nullptr;
}

// Returns false with a Python error set.
bool note_storages(const RunningModules* running, PyObject* module) {
  for (PyObject* name : group_names) {
    const Reference group = Reference::stolen(PyObject_GetAttr(module, name));
    if (!group) {
      return false;
    }
    if (!PyDict_Check(group.get())) {
      if (!note_storages_of_values(running, group.get())) {
        return false;
      }
      continue;
    }
    Py_ssize_t position = 0;
    PyObject *key = nullptr, *value = nullptr;
    while (PyDict_Next(group.get(), &position, &key, &value) != 0) {
      if (!note_storage(running, value)) {
        return false;
      }
    }
  }
  return true;
}

// The gate, if it serves a settled step on this thread; else null.
Gate* open_gate(const RunningModules* running) {
  Gate* gate = running->gate == nullptr ? nullptr : gate_of(running->gate);
  const bool is_open = gate != nullptr && gate->followed != nullptr;
  return is_open && gate->save_thread == PyThread_get_thread_ident() ? gate : nullptr;
}

// The facts that are noted where a call of this module begins.
unsigned char facts_ahead(const RunningModules* running, PyObject* module) {
  if (running->notes_everything != 0 || open_gate(running) == nullptr) {
    return kAllFacts;
  }
  const auto found = running->needs->find(id_of(module));
  return found == running->needs->end() ? 0 : found->second;
}

// The facts that are noted where a call of this module ends, and `depth` modules still run. Everything was noted where
// those calls began that ran when the gate opened.
unsigned char facts_behind(const RunningModules* running, PyObject* module, Py_ssize_t depth) {
  Gate* gate = open_gate(running);
  if (gate != nullptr && depth < gate->noted_depth) {
    gate->noted_depth = depth;
    return kAllFacts;
  }
  return facts_ahead(running, module);
}

// Notes a boundary, where these facts are noted. Returns the number of the next node; -1 with a Python error set.
long long cross(const RunningModules* running, PyObject* module, unsigned char facts) {
  const Reference number = Reference::stolen(PyObject_CallNoArgs(running->parts[kNodeNumber]));
  const long long node = number ? PyLong_AsLongLong(number.get()) : -1;
  if (node >= 0) {
    Boundaries::here().cross({node, id_of(module), (facts & kSettings) != 0});
  }
  return node;
}

// Who notes facts. Held, because another thread may end that meanwhile.
struct Noters final {
  explicit Noters(const RunningModules* running) : before(running->before), settings(running->settings) {}
  const Reference before;
  const Reference settings;
};

// Notes the facts of this module where a call of it begins. Returns false with a Python error set.
bool note_ahead(const RunningModules* running, PyObject* module) {
  const Noters noters(running);
  const unsigned char facts = facts_ahead(running, module);
  const long long node = cross(running, module, facts);
  if (node < 0 || ((facts & kSettings) != 0 && !observe_settings(noters.settings.get()))) {
    return false;
  }
  return (facts & kLeaves) == 0 || Reference::stolen(PyObject_CallOneArg(noters.before.get(), module));
}

// The same where the call ends, and `depth` modules still run.
bool note_behind(const RunningModules* running, PyObject* module, Py_ssize_t depth) {
  const Noters noters(running);
  const unsigned char facts = facts_behind(running, module, depth);
  const long long node = cross(running, module, facts);
  if (node < 0) {
    return false;
  }
  return (facts & kSettings) == 0 || observe_settings(noters.settings.get());
}

PyObject* enter(PyObject* self, PyObject* module) {
  RunningModules* running = running_of(self);
  if (is_traced(running)) {
    Py_RETURN_NONE;
  }
  ++running->boundaries;
  const Reference stack = stack_of(running);
  if (!stack) {
    return nullptr;
  }
  if (PyList_GET_SIZE(stack.get()) == 0 && running->parts[kBegins] != Py_None &&
      !Reference::stolen(PyObject_CallOneArg(running->parts[kBegins], module))) {
    return nullptr;
  }
  if (PyList_Append(stack.get(), module) != 0 || !note_storages(running, module)) {
    return nullptr;
  }
  if (running->before != nullptr && !note_ahead(running, module)) {
    return nullptr;
  }
  Py_RETURN_NONE;
}

// The number of modules that run when this one is over; -1 with a Python error set. An exception may have skipped the
// exits of inner modules, and a graph break the entry of this one.
Py_ssize_t leave_stack(const RunningModules* running, PyObject* module) {
  const Reference stack = stack_of(running);
  if (!stack) {
    return -1;
  }
  const Py_ssize_t size = PyList_GET_SIZE(stack.get());
  for (Py_ssize_t index = size; index-- > 0;) {
    if (PyList_GET_ITEM(stack.get(), index) == module) {
      return PyList_SetSlice(stack.get(), index, size, nullptr) == 0 ? index : -1;
    }
  }
  return size;
}

PyObject* leave(PyObject* self, PyObject* module) {
  RunningModules* running = running_of(self);
  if (is_traced(running)) {
    Py_RETURN_NONE;
  }
  ++running->boundaries;
  const Py_ssize_t depth = leave_stack(running, module);
  if (depth < 0) {
    return nullptr;
  }
  if (running->before != nullptr && !note_behind(running, module, depth)) {
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyObject* stack(PyObject* self, PyObject*) {
  return stack_of(running_of(self)).release();
}

// From now on facts are noted.
PyObject* note(PyObject* self, PyObject* arguments) {
  RunningModules* running = running_of(self);
  PyObject *before = nullptr, *settings = nullptr, *gate = nullptr;
  if (!PyArg_ParseTuple(arguments, "OOO", &before, &settings, &gate)) {
    return nullptr;
  }
  if (!is_torch_settings(settings)) {
    PyErr_SetString(PyExc_TypeError, "expected settings of torch");
    return nullptr;
  }
  if (gate != Py_None && Py_TYPE(gate) != gate_type()) {
    PyErr_SetString(PyExc_TypeError, "expected a gate or None");
    return nullptr;
  }
  Py_XSETREF(running->gate, gate == Py_None ? nullptr : Py_NewRef(gate));
  Py_XSETREF(running->settings, Py_NewRef(settings));
  Py_XSETREF(running->before, Py_NewRef(before));
  Py_RETURN_NONE;
}

PyObject* note_nothing(PyObject* self, PyObject*) {
  RunningModules* running = running_of(self);
  for (PyObject** part : {&running->before, &running->settings, &running->gate}) {
    Py_CLEAR(*part);
  }
  Py_RETURN_NONE;
}

PyObject* need(PyObject* self, PyObject* arguments) {
  unsigned long long module = 0;
  unsigned char facts = 0;
  if (!PyArg_ParseTuple(arguments, "Kb", &module, &facts)) {
    return nullptr;
  }
  (*running_of(self)->needs)[static_cast<std::uintptr_t>(module)] |= facts;
  Py_RETURN_NONE;
}

PyObject* needs(PyObject* self, PyObject*) {
  Reference found = Reference::stolen(PyDict_New());
  for (const auto& [module, facts] : *running_of(self)->needs) {
    const Reference id = Reference::stolen(PyLong_FromSize_t(module)),
                    given = Reference::stolen(PyLong_FromLong(facts));
    if (!found || !id || !given || PyDict_SetItem(found.get(), id.get(), given.get()) != 0) {
      return nullptr;
    }
  }
  return found.release();
}

PyObject* notes_all(PyObject* self, PyObject*) {
  const RunningModules* running = running_of(self);
  return PyBool_FromLong(running->notes_everything != 0 || open_gate(running) == nullptr);
}

PyObject* rest(PyObject* self, PyObject* begins) {
  Boundaries::here().rest(id_of(self), begins == Py_True);
  Py_RETURN_NONE;
}

PyObject* begin_anew(PyObject* self, PyObject* of_thread) {
  Py_XSETREF(running_of(self)->of_thread, Py_NewRef(of_thread));
  Py_RETURN_NONE;
}

// Functions of the module.

PyObject* modules_around(PyObject*, PyObject* number) {
  std::int64_t node = 0;
  if (!number_of(number, node)) {
    return nullptr;
  }
  const auto around = Boundaries::here().around(node);
  Reference found = Reference::stolen(PyList_New(0));
  for (const Boundary* one : {around.before, around.after}) {
    if (one == nullptr || one->module == 0 || !found) {
      continue;
    }
    const Reference id = Reference::stolen(PyLong_FromSize_t(one->module));
    if (!id || PyList_Append(found.get(), id.get()) != 0) {
      return nullptr;
    }
  }
  return found.release();
}

// The type.

PyObject* make_running(PyTypeObject* type, PyObject* arguments, PyObject* keywords) {
  if (PyTuple_GET_SIZE(arguments) != kRunningParts + 1 || (keywords != nullptr && PyDict_GET_SIZE(keywords) != 0) ||
      !PyTuple_CheckExact(PyTuple_GET_ITEM(arguments, kPlain)) || !PyDict_Check(PyTuple_GET_ITEM(arguments, kKnown)) ||
      !PyDict_Check(PyTuple_GET_ITEM(arguments, kCompiler))) {
    PyErr_Format(PyExc_TypeError, "expected the %d parts of running modules", static_cast<int>(kRunningParts) + 1);
    return nullptr;
  }
  RunningModules* running = running_of(type->tp_alloc(type, 0));  // zeroed
  if (running == nullptr) {
    return nullptr;
  }
  for (int part = 0; part < kRunningParts; ++part) {
    running->parts[static_cast<std::size_t>(part)] = Py_NewRef(PyTuple_GET_ITEM(arguments, part));
  }
  running->of_thread = Py_NewRef(PyTuple_GET_ITEM(arguments, kRunningParts));
  running->needs = new Needs();
  return reinterpret_cast<PyObject*>(running);
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  const RunningModules* running = running_of(self);
  Py_VISIT(Py_TYPE(self));
  for (PyObject* part : running->parts) {
    Py_VISIT(part);
  }
  Py_VISIT(running->of_thread);
  Py_VISIT(running->before);
  Py_VISIT(running->settings);
  Py_VISIT(running->gate);
  return 0;
}

// It is garbage: torch does not have their hooks any more.
int clear(PyObject* self) {
  RunningModules* running = running_of(self);
  for (PyObject*& part : running->parts) {
    Py_CLEAR(part);
  }
  Py_CLEAR(running->of_thread);
  Reference::stolen(note_nothing(self, nullptr));
  return 0;
}

void dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  clear(self);
  delete running_of(self)->needs;
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyMethodDef methods[] = {
    {"enter", enter, METH_O, nullptr},
    {"leave", leave, METH_O, nullptr},
    {"stack", stack, METH_NOARGS, nullptr},
    {"note", note, METH_VARARGS, nullptr},
    {"note_nothing", note_nothing, METH_NOARGS, nullptr},
    {"need", need, METH_VARARGS, nullptr},
    {"needs", needs, METH_NOARGS, nullptr},
    {"notes_all", notes_all, METH_NOARGS, nullptr},
    {"rest", rest, METH_O, nullptr},
    {"begin_anew", begin_anew, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyMemberDef members[] = {
    {"boundaries", T_PYSSIZET, offsetof(RunningModules, boundaries), READONLY, nullptr},
    {"notes_everything", T_BOOL, offsetof(RunningModules, notes_everything), 0, nullptr},
    {"needs_boundaries", T_BOOL, offsetof(RunningModules, needs_boundaries), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(&make_running)},
    {Py_tp_dealloc, reinterpret_cast<void*>(&dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(&traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(&clear)},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {0, nullptr},
};

PyType_Spec spec = {"vdnn._C.RunningModules", sizeof(RunningModules), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                    slots};

PyMethodDef functions[] = {
    {"modules_around", modules_around, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

bool add_running_modules(PyObject* module) {
  stack_name = PyUnicode_InternFromString("stack");
  address_name = PyUnicode_InternFromString("_cdata");
  compiling_name = PyUnicode_InternFromString("_is_compiling_flag");
  group_names = {PyUnicode_InternFromString("_parameters"), PyUnicode_InternFromString("_buffers")};
  if (PyErr_Occurred() != nullptr) {
    return false;
  }
  const Reference type = Reference::stolen(PyType_FromSpec(&spec));
  return type && PyObject_SetAttrString(module, "RunningModules", type.get()) == 0 &&
         PyModule_AddFunctions(module, functions) == 0;
}

}  // namespace vdnn::hooks
