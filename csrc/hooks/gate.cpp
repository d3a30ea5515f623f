// The hooks of the gate, from the cheapest test to the most expensive.
#include "hooks/gate_state.h"
#include "hooks/node_notes.h"
#include "hooks/torch_settings.h"

namespace vdnn::hooks {
namespace {

PyObject* read(const Gate* gate, Part part, PyObject* tensor) {
  return get(gate->parts[part], tensor);
}

// Returns false with a Python error set.
bool read_number(const Gate* gate, Part part, PyObject* tensor, std::int64_t& number) {
  const Reference value = Reference::stolen(read(gate, part, tensor));
  if (!value) {
    return false;
  }
  number = PyLong_AsLongLong(value.get());
  return number != -1 || PyErr_Occurred() == nullptr;
}

const Event* expected(const Gate* gate) {
  if (gate->followed == nullptr || gate->position >= gate->followed->script.events.size()) {
    return nullptr;
  }
  return &gate->followed->script.events[gate->position];
}

bool is_in_module(const Gate* gate, const Event& event) {
  if (gate->stack == nullptr) {
    return true;  // calls of modules are not followed
  }
  const Py_ssize_t depth = PyList_GET_SIZE(gate->stack);
  if (depth != event.depth) {
    return false;
  }
  PyObject* module = depth == 0 ? nullptr : PyList_GET_ITEM(gate->stack, depth - 1);
  return reinterpret_cast<std::uintptr_t>(module) == event.module ||
         (module != nullptr && reinterpret_cast<std::uintptr_t>(Py_TYPE(module)) == event.module);
}

// True if all that can be read at once is as in the script. A tensor that cannot be read does not match.
bool matches(const Gate* gate, const Event& event, PyObject* tensor) {
  if (event.kind > Kind::Planned || reinterpret_cast<PyObject*>(Py_TYPE(tensor)) != event.type.get() ||
      PyThread_get_thread_ident() != gate->save_thread || !is_in_module(gate, event)) {
    return false;
  }
  const Reference dtype = Reference::stolen(read(gate, kDtype, tensor));
  const Reference is_leaf = Reference::stolen(read(gate, kIsLeaf, tensor));
  std::int64_t nbytes = 0;
  if (!dtype || !is_leaf || !read_number(gate, kNbytes, tensor, nbytes)) {
    PyErr_Clear();
    return false;
  }
  if (dtype.get() != event.dtype.get() || (is_leaf.get() == Py_True) != event.is_leaf || nbytes != event.nbytes) {
    return false;
  }
  if (event.in_backward) {
    const Reference task = Reference::stolen(PyObject_CallNoArgs(gate->parts[kGraphTask]));
    if (!task || PyLong_AsLong(task.get()) == -1) {
      PyErr_Clear();
      return false;
    }
  }
  return true;
}

PyObject* call_at(PyObject* callable, PyObject* argument, std::size_t position) {
  const Reference index = Reference::stolen(PyLong_FromSize_t(position));
  return index ? PyObject_CallFunctionObjArgs(callable, argument, index.get(), nullptr) : nullptr;
}

const Script& script_in(const Reference& followed) {
  return reinterpret_cast<ScriptObject*>(followed.get())->script;
}

// Issues the moves of an event that the gate served. Returns false with a Python error set.
bool act(Gate* gate, const Script& script, std::size_t position) {
  const Event& event = script.events[position];
  const bool is_python = gate->calls_python != 0 || has_moves_for_python(gate->mover, event);
  return submit_complete(gate) && make_moves(gate->mover, event, false) && (!is_python || moved(gate, position)) &&
         make_moves(gate->mover, event, true);
}

// Tells the lesson, if there is one. Drops `result` and returns null if it raises.
PyObject* tell_lesson(const Gate* gate, const char* what, PyObject* argument, PyObject* result) {
  if (gate->lesson == nullptr || result == nullptr) {
    return result;
  }
  const Reference lesson(gate->lesson);
  const Reference done = Reference::stolen(PyObject_CallMethod(lesson.get(), what, "OO", argument, result));
  if (!done) {
    Py_DECREF(result);
    return nullptr;
  }
  return result;
}

// Returns false with a Python error set.
bool note(const Gate* gate, PyObject* tensor, PyObject* packed, bool is_exempt) {
  if (!observe_at_save(gate->parts[kSettings], tensor)) {
    return false;
  }
  const Reference node = is_exempt ? Reference(Py_None) : Reference::stolen(read(gate, kGradFn, tensor));
  if (!node || node.get() == Py_None) {
    return static_cast<bool>(node);
  }
  const Reference output = Reference::stolen(read(gate, kOutputNr, tensor));
  return output && note_saved(node.get(), output.get(), packed);
}

// Notes a save that a recipe reads, and the settings of torch at it. Drops `packed` and returns null if that raises.
PyObject* noted(const Gate* gate, PyObject* tensor, PyObject* packed, bool is_exempt) {
  if (packed != nullptr && !note(gate, tensor, packed, is_exempt)) {
    Py_DECREF(packed);
    return nullptr;
  }
  return packed;
}

// The packed form of a save that stays on the device. See kept.py for what is held.
PyObject* keep(Gate* gate, const Event& event, std::size_t position, PyObject* tensor) {
  std::int64_t version = 0;
  if (!read_number(gate, kVersion, tensor, version)) {
    return nullptr;
  }
  const bool is_exempt = event.kind == Kind::Exempt, is_leaf = event.is_leaf, is_read = event.is_read;
  const std::int32_t lifetime = event.lifetime;
  gate->position = position + 1;
  const bool calls = !is_exempt && (event.has_moves || gate->calls_python != 0 || has_waiting(gate->mover));
  const Reference followed(calls ? reinterpret_cast<PyObject*>(gate->followed) : nullptr);
  Ledger* ledger = gate->ledger;
  const std::int64_t step = ledger->step();
  if (!is_exempt) {
    ledger->saved(lifetime, event.storage_bytes);
  }
  // From here on another thread may run: `event` may be gone.
  PyObject* held = is_leaf ? Py_NewRef(tensor) : PyObject_CallOneArg(gate->parts[kDetach], tensor);
  if (is_exempt) {
    PyObject* kept = held == nullptr ? nullptr : Py_BuildValue("(NL)", held, static_cast<long long>(version));
    return is_read ? noted(gate, tensor, kept, true) : kept;
  }
  PyObject* save = held == nullptr ? nullptr : make_kept_save(held, version, step, ledger, lifetime);
  if (save == nullptr) {
    ledger->freed(step, lifetime);
    return nullptr;
  }
  if (calls && !act(gate, script_in(followed), position)) {
    Py_DECREF(save);
    return nullptr;
  }
  return is_read ? noted(gate, tensor, save, false) : save;
}

// A save that does not stay: the mover's, or Python's.
PyObject* save_planned(Gate* gate, std::size_t position, PyObject* tensor) {
  if (!submit_complete(gate)) {
    return nullptr;
  }
  const Event* now = expected(gate);
  if (now == nullptr || gate->position != position) {  // another thread has left the event
    return call_at(gate->parts[kPlannedSave], tensor, position);
  }
  const Event& event = *now;
  if (event.moving != nullptr && gate->mover->is_open) {
    const bool is_read = event.is_read, is_discarded = event.moving->is_discarded && event.moving->is_first;
    PyObject* save = move_save(gate, gate->mover, event, position, tensor);
    if (save != nullptr || PyErr_Occurred() != nullptr) {
      return is_read && !is_discarded ? noted(gate, tensor, save, false) : save;
    }
  }
  return call_at(gate->parts[kPlannedSave], tensor, position);
}

// The tensor of a use of a save that does not stay. Null with a Python error set.
PyObject* use_planned(Gate* gate, std::size_t position, PyObject* packed) {
  if (!submit_complete(gate)) {
    return nullptr;
  }
  if (expected(gate) == nullptr || gate->position != position) {
    return call_at(gate->parts[kPlannedUse], packed, position);
  }
  if (is_light_save(packed) && gate->mover->is_open) {
    PyObject* tensor = move_use(gate, gate->mover, position, reinterpret_cast<LightSave*>(packed));
    if (tensor != nullptr || PyErr_Occurred() != nullptr) {
      return tensor;
    }
  }
  return call_at(gate->parts[kPlannedUse], packed, gate->position);  // which a recompute may have changed
}

// True if the tensor has the version of its save and no recompute that reads it has to come first. False also where
// Python has to raise.
bool may_be_returned(const Gate* gate, PyObject* tensor, std::int64_t version) {
  std::int64_t now = 0;
  if (!read_number(gate, kVersion, tensor, now)) {
    PyErr_Clear();
    return false;
  }
  if (now != version) {
    return false;
  }
  const bool has_readers = PySet_GET_SIZE(gate->parts[kDiscarded]) != 0 || gate->mover->state->discarded != 0;
  return !has_readers || only_reads(gate->mover);
}

bool is_use_here(Gate* gate, const Event* event, Kind kind) {
  if (event == nullptr || event->kind != kind) {
    return false;
  }
  const unsigned long thread = PyThread_get_thread_ident();
  if (gate->use_thread == 0) {
    gate->use_thread = thread;
  }
  return gate->use_thread == thread;
}

PyObject* unpack_kept(Gate* gate, PyObject* packed) {
  const auto* save = reinterpret_cast<KeptSave*>(packed);
  const Event* event = expected(gate);
  const bool is_operand = is_use_here(gate, event, Kind::Fetch);  // of a recompute
  if ((!is_operand && !is_use_here(gate, event, Kind::Use)) || event->lifetime != save->lifetime ||
      save->step != gate->ledger->step() || !may_be_returned(gate, save->tensor, save->version) ||
      expected(gate) != event) {
    return nullptr;
  }
  const std::size_t position = gate->position++;
  const Reference tensor(save->tensor);
  if (is_operand) {  // the uses of the program are counted with the script
    ++gate->mover->state->counts.uses;
    ++gate->mover->state->counts.used_in_place;
  }
  if (event->has_moves || gate->calls_python != 0 || has_waiting(gate->mover)) {
    const Reference followed(reinterpret_cast<PyObject*>(gate->followed));
    if (!act(gate, script_in(followed), position)) {
      return nullptr;
    }
  }
  return Py_NewRef(tensor.get());
}

PyObject* unpack_unplanned(Gate* gate, PyObject* packed) {
  auto* save = reinterpret_cast<KeptSave*>(packed);
  return save->ledger != nullptr && may_be_returned(gate, save->tensor, save->version) ? use_unplanned(gate, save)
                                                                                       : nullptr;
}

PyObject* unpack_exempt(const Gate* gate, PyObject* packed) {
  if (PyTuple_GET_SIZE(packed) != 2) {
    return nullptr;
  }
  PyObject* tensor = PyTuple_GET_ITEM(packed, 0);
  const long long version = PyLong_AsLongLong(PyTuple_GET_ITEM(packed, 1));
  if (version == -1 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    return nullptr;
  }
  return may_be_returned(gate, tensor, version) ? Py_NewRef(tensor) : nullptr;
}

}  // namespace

bool moved(const Gate* gate, std::size_t position) {
  const Reference index = Reference::stolen(PyLong_FromSize_t(position));
  return index && Reference::stolen(PyObject_CallOneArg(gate->parts[kMoved], index.get()));
}

PyObject* pack(PyObject* self, PyObject* tensor) {
  Gate* gate = gate_of(self);
  const InHook timed(gate->host, gate->mover);
  ++gate->backward_saves.packed;
  while (true) {
    const Event* event = expected(gate);
    const std::size_t position = gate->position;
    if (event != nullptr && matches(gate, *event, tensor) && expected(gate) == event) {
      return event->kind == Kind::Planned ? save_planned(gate, position, tensor) : keep(gate, *event, position, tensor);
    }
    PyObject* packed = event == nullptr ? keep_unplanned(gate, tensor) : nullptr;
    if (packed != nullptr || PyErr_Occurred() != nullptr) {
      return packed;
    }
    packed = PyObject_CallOneArg(gate->parts[kPack], tensor);
    if (packed != Py_None) {
      return tell_lesson(gate, "saved", tensor, packed);
    }
    Py_DECREF(packed);  // the first save of a settled step, for which the gate has just opened
  }
}

PyObject* unpack(PyObject* self, PyObject* packed) {
  Gate* gate = gate_of(self);
  const InHook timed(gate->host, gate->mover);
  PyObject* tensor = nullptr;
  if (gate->backward_saves.away != 0) {
    look_for_nodes(gate);
  }
  if (is_kept_save(packed)) {
    tensor = gate->followed == nullptr ? unpack_unplanned(gate, packed) : unpack_kept(gate, packed);
  } else if (PyTuple_CheckExact(packed)) {
    tensor = unpack_exempt(gate, packed);
  } else if (is_use_here(gate, expected(gate), Kind::Fetch)) {
    return use_planned(gate, gate->position, packed);
  }
  if (tensor != nullptr || PyErr_Occurred() != nullptr) {
    return tensor;
  }
  return tell_lesson(gate, "used", packed, PyObject_CallOneArg(gate->parts[kUnpack], packed));
}

}  // namespace vdnn::hooks
