#include "hooks/unplanned_saves.h"

#include <algorithm>
#include <new>
#include <utility>

#include "hooks/gate_state.h"
#include "hooks/mover_state.h"

namespace vdnn::hooks {
namespace {

PyTypeObject* type_of_saves = nullptr;

UnplannedSaves* saves_of(PyObject* self) {
  return reinterpret_cast<UnplannedSaves*>(self);
}

bool is_true(const Reference& object) {
  return object.get() == Py_True;
}

// True if hooks may manage anything here, and the tensor is plain memory of the device that the step uses.
bool is_plain(const Gate* gate, const UnplannedSaves* saves, PyObject* tensor) {
  const auto& parts = saves->parts;
  const Reference layout = Reference::stolen(get(parts[kLayout], tensor));
  const Reference device = Reference::stolen(get(gate->mover->parts[kDevice], tensor));
  return layout.get() == parts[kStrided] && device &&
         PyObject_RichCompareBool(device.get(), saves->state->device.get(), Py_EQ) == 1 &&
         is_false(Reference::stolen(get(parts[kIsQuantized], tensor))) &&
         is_false(Reference::stolen(get(parts[kIsNested], tensor))) &&
         is_false(Reference::stolen(PyObject_CallOneArg(parts[kIsZero], tensor))) && is_untraced(gate->mover);
}

// The elements that a tensor spans, from its first to its last; -1 with a Python error set.
std::int64_t span_of(const Mover* mover, PyObject* tensor) {
  const Reference sizes = Reference::stolen(get(mover->parts[kShape], tensor));
  const Reference strides = Reference::stolen(PyObject_CallOneArg(mover->parts[kStride], tensor));
  if (!sizes || !strides) {
    return -1;
  }
  std::int64_t span = 1;
  for (Py_ssize_t dimension = 0; dimension < PyTuple_GET_SIZE(sizes.get()); ++dimension) {
    const std::int64_t size = PyLong_AsLongLong(PyTuple_GET_ITEM(sizes.get(), dimension));
    const std::int64_t stride = PyLong_AsLongLong(PyTuple_GET_ITEM(strides.get(), dimension));
    if (PyErr_Occurred() != nullptr) {
      return -1;
    }
    span += (size - 1) * stride;
  }
  return span;
}

// True if Python would manage all bytes of the storage for this tensor: see bytes_to_manage in table.py.
bool takes_all(const Gate* gate, PyObject* tensor, std::int64_t whole) {
  std::int64_t nbytes = 0;
  if (!as_number(Reference::stolen(get(gate->parts[kNbytes], tensor)), nbytes) || nbytes == 0) {
    return false;
  }
  if (nbytes == whole) {
    return true;
  }
  std::int64_t itemsize = 0;
  const std::int64_t span = span_of(gate->mover, tensor);
  return span > 0 && as_number(Reference::stolen(PyObject_GetAttrString(tensor, "itemsize")), itemsize) &&
         2 * span * itemsize >= whole;
}

// The place of a storage among those that are kept here; none if it is not, or if nothing of it is alive.
const std::size_t kNone = static_cast<std::size_t>(-1);
std::size_t alive_at(const Gate* gate, const UnplannedState* state, std::uintptr_t address) {
  const auto known = state->by_address.find(address);
  return known != state->by_address.end() && gate->ledger->is_alive(state->storages[known->second].lifetime)
             ? known->second
             : kNone;
}

// True if a save of these bytes is one more of that storage: the same version and counter.
bool joins(const Gate* gate, const KeptStorage& storage, PyObject* tensor, std::int64_t version, PyObject* dtype) {
  const KeptSave* newest = gate->ledger->newest(storage.lifetime);
  if (newest == nullptr || version != storage.version || dtype != storage.dtype.get()) {
    return false;
  }
  const Reference witness(newest->tensor);
  return version_of(gate->mover, witness.get()) == version &&
         has_same_counter(gate->mover, witness.get(), tensor, version);
}

struct Facts final {
  Reference storage;
  Reference address;
  Reference dtype;
  std::uintptr_t native = 0;
  std::int64_t whole = 0;
  std::int64_t version = 0;
};

// Reads a tensor. False, perhaps with a Python error set, if Python has to handle it.
bool read(const Gate* gate, const UnplannedSaves* saves, PyObject* tensor, Facts& facts) {
  const auto& parts = gate->mover->parts;
  facts.storage = Reference::stolen(PyObject_CallOneArg(parts[kStorage], tensor));
  facts.address =
      facts.storage ? Reference::stolen(PyObject_GetAttrString(facts.storage.get(), "_cdata")) : Reference();
  if (!facts.address || PySequence_Contains(parts[kParameters], facts.address.get()) != 0 ||
      PyDict_Contains(parts[kLatest], facts.address.get()) != 0) {
    return false;
  }
  facts.native = reinterpret_cast<std::uintptr_t>(PyLong_AsVoidPtr(facts.address.get()));
  facts.dtype = Reference::stolen(get(gate->parts[kDtype], tensor));
  return facts.dtype &&
         as_number(Reference::stolen(PyObject_CallMethod(facts.storage.get(), "nbytes", nullptr)), facts.whole) &&
         facts.whole >= saves->state->least_bytes && takes_all(gate, tensor, facts.whole) &&
         (facts.version = version_of(gate->mover, tensor)) >= 0;
}

// What the step has counted so far, by the name of its attribute; -1 with a Python error set.
std::int64_t number_of(const UnplannedSaves* saves, const char* name) {
  std::int64_t number = -1;
  return as_number(Reference::stolen(PyObject_GetAttrString(saves->state->step.get(), name)), number) ? number : -1;
}

// How often a storage is held natively, and its Python object by Python. That object exists, because a hook has read
// the storage; some releases of torch count it as a native holder. False with a Python error set.
struct Holders final {
  std::int64_t native = 0;
  std::int64_t python = 0;
};
bool count_holders(const UnplannedSaves* saves, PyObject* address, PyObject* handle, Holders& holders) {
  const auto& parts = saves->gate->mover->parts;
  if (!as_number(Reference::stolen(PyObject_CallOneArg(parts[kUseCount], address)), holders.native)) {
    return false;
  }
  const Reference storage = Reference::stolen(PyObject_CallOneArg(parts[kFromWeak], handle));
  holders.python = storage ? static_cast<std::int64_t>(Py_REFCNT(storage.get())) : 0;
  return static_cast<bool>(storage);
}

// Counts the holders of the storage of a tensor that nobody else holds. Returns false with a Python error set.
bool calibrate(const UnplannedSaves* saves) {
  Reference storage = Reference::stolen(PyObject_CallOneArg(saves->gate->mover->parts[kStorage], saves->parts[kAlone]));
  const Reference address = storage ? Reference::stolen(PyObject_GetAttrString(storage.get(), "_cdata")) : Reference();
  const Reference handle =
      address ? Reference::stolen(PyObject_CallOneArg(saves->parts[kWeakHandle], storage.get())) : Reference();
  if (!handle) {
    return false;
  }
  storage = Reference();
  Holders holders;
  const bool is_counted = count_holders(saves, address.get(), handle.get(), holders);
  saves->state->others_native = holders.native - 1;
  saves->state->others_python = holders.python;
  return Reference::stolen(PyObject_CallOneArg(saves->parts[kFreeHandle], handle.get())) && is_counted;
}

void forget(UnplannedState* state, const UnplannedSaves* saves) {
  for (const KeptStorage& storage : state->storages) {
    Py_XDECREF(PyObject_CallOneArg(saves->parts[kFreeHandle], storage.handle.get()));
  }
  state->storages.clear();
  state->by_address.clear();
  state->held.clear();
}

// Adds a storage. Returns false with a Python error set.
bool add(const UnplannedSaves* saves, std::int32_t lifetime, Facts& facts) {
  UnplannedState* state = saves->state;
  Reference handle = Reference::stolen(PyObject_CallOneArg(saves->parts[kWeakHandle], facts.storage.get()));
  if (!handle) {
    return false;
  }
  const std::size_t place = state->storages.size();
  state->storages.push_back(
      {lifetime, facts.version, Reference(facts.address.get()), std::move(handle), Reference(facts.dtype.get())});
  state->by_address[facts.native] = place;
  state->held.push_back(place);
  return true;
}

// Forgets a save of a storage that was added last: Python handles it.
void take_back(const Gate* gate, const UnplannedSaves* saves, std::int32_t lifetime, std::uintptr_t address) {
  UnplannedState* state = saves->state;
  if (state->storages.empty() || state->storages.back().lifetime != lifetime) {
    return;
  }
  gate->ledger->forget(lifetime);
  Py_XDECREF(PyObject_CallOneArg(saves->parts[kFreeHandle], state->storages.back().handle.get()));
  if (!state->held.empty() && state->held.back() == state->storages.size() - 1) {
    state->held.pop_back();
  }
  state->storages.pop_back();
  state->by_address.erase(address);
}

// Methods of the type.

PyObject* open(PyObject* self, PyObject* arguments) {
  UnplannedSaves* saves = saves_of(self);
  PyObject *step = nullptr, *device = nullptr;
  long long least_bytes = 0;
  if (!PyArg_ParseTuple(arguments, "OOL", &step, &device, &least_bytes)) {
    return nullptr;
  }
  UnplannedState* state = saves->state;
  if (saves->gate == nullptr) {
    PyErr_SetString(PyExc_RuntimeError, "the gate is gone");
    return nullptr;
  }
  forget(state, saves);
  if (state->others_native < 0 && !calibrate(saves)) {
    return nullptr;
  }
  state->step = Reference(step);
  state->device = Reference(device);
  state->least_bytes = least_bytes;
  saves->gate->ledger->begin_unplanned_step();
  saves->thread = PyThread_get_thread_ident();
  saves->is_open = true;
  Py_RETURN_NONE;
}

// Keeps nothing more. What is kept stays.
PyObject* close(PyObject* self, PyObject*) {
  saves_of(self)->is_open = false;
  Py_RETURN_NONE;
}

// The step is over.
PyObject* end(PyObject* self, PyObject*) {
  UnplannedSaves* saves = saves_of(self);
  saves->is_open = false;
  forget(saves->state, saves);
  const Reference before = std::exchange(saves->state->step, Reference());
  Py_RETURN_NONE;
}

// The lifetime of the storage with this native address, alive or not; None if the step has kept nothing of it.
PyObject* lifetime_at(PyObject* self, PyObject* address) {
  const UnplannedState* state = saves_of(self)->state;
  const auto known = state->by_address.find(reinterpret_cast<std::uintptr_t>(PyLong_AsVoidPtr(address)));
  if (known == state->by_address.end()) {
    Py_RETURN_NONE;
  }
  return PyLong_FromLong(state->storages[known->second].lifetime);
}

// The place of a lifetime among the storages, which are in the order of lifetimes; none if nothing of it was kept.
std::size_t place_of(const UnplannedState* state, std::int32_t lifetime) {
  const auto found =
      std::lower_bound(state->storages.begin(), state->storages.end(), lifetime,
                       [](const KeptStorage& one, std::int32_t number) { return one.lifetime < number; });
  return found != state->storages.end() && found->lifetime == lifetime
             ? static_cast<std::size_t>(found - state->storages.begin())
             : kNone;
}

// The saves of a lifetime that are alive, or of all for -1, the oldest first: Python manages the storages from now on.
// None of a storage that was written to, because its uses raise an error.
PyObject* hand_over(PyObject* self, PyObject* number) {
  const UnplannedSaves* saves = saves_of(self);
  const long lifetime = PyLong_AsLong(number);
  if (lifetime == -1 && PyErr_Occurred() != nullptr) {
    return nullptr;
  }
  if (saves->gate == nullptr) {
    return PyList_New(0);
  }
  UnplannedState* state = saves->state;
  Ledger* ledger = saves->gate->ledger;
  Reference found = Reference::stolen(lifetime < 0 ? ledger->saves() : ledger->saves_of_lifetime(lifetime));
  Reference given = Reference::stolen(PyList_New(0));
  for (Py_ssize_t index = 0; found && given && index < PyList_GET_SIZE(found.get()); ++index) {
    PyObject* one = PyList_GET_ITEM(found.get(), index);
    const auto* save = reinterpret_cast<KeptSave*>(one);
    const std::size_t place = save->step == ledger->step() ? place_of(state, save->lifetime) : kNone;
    if (place == kNone || version_of(saves->gate->mover, save->tensor) != state->storages[place].version) {
      continue;
    }
    state->by_address.erase(reinterpret_cast<std::uintptr_t>(PyLong_AsVoidPtr(state->storages[place].address.get())));
    ledger->hand_over(save->lifetime);
    if (PyList_Append(given.get(), one) != 0) {
      return nullptr;
    }
  }
  return found ? given.release() : nullptr;
}

PyObject* is_alive(PyObject* self, PyObject* number) {
  const long lifetime = PyLong_AsLong(number);
  if (lifetime == -1 && PyErr_Occurred() != nullptr) {
    return nullptr;
  }
  const Gate* gate = saves_of(self)->gate;
  return PyBool_FromLong(gate != nullptr && gate->ledger->is_alive(static_cast<std::int32_t>(lifetime)));
}

// Adds the lifetimes whose storages nobody else holds any more, as far as no earlier call did. Returns false with a
// Python error set.
bool add_unheld(const UnplannedSaves* saves, PyObject* unheld) {
  UnplannedState* state = saves->state;
  const Ledger* ledger = saves->gate->ledger;
  std::size_t left = 0;
  for (std::size_t index = 0; index < state->held.size(); ++index) {
    const std::size_t place = state->held[index];
    const KeptStorage& storage = state->storages[place];
    if (!ledger->is_alive(storage.lifetime)) {
      continue;
    }
    Holders holders;
    if (!count_holders(saves, storage.address.get(), storage.handle.get(), holders)) {
      return false;
    }
    if (holders.native > ledger->saves_of(storage.lifetime) + state->others_native ||
        holders.python > state->others_python) {
      state->held[left++] = place;
      continue;
    }
    const Reference number = Reference::stolen(PyLong_FromLong(storage.lifetime));
    if (!number || PyList_Append(unheld, number.get()) != 0) {
      return false;
    }
  }
  state->held.resize(left);
  return true;
}

// (ended lifetimes, lifetimes that nobody else holds any more) since the last call; None if there are none.
PyObject* changes(PyObject* self, PyObject*) {
  const UnplannedSaves* saves = saves_of(self);
  Ledger* ledger = saves->gate == nullptr ? nullptr : saves->gate->ledger;
  if (ledger == nullptr) {
    Py_RETURN_NONE;
  }
  if (!ledger->has_ended() && saves->state->held.empty()) {
    Py_RETURN_NONE;
  }
  const Reference ended = Reference::stolen(ledger->take_ended());
  const Reference unheld = Reference::stolen(PyList_New(0));
  if (!ended || !unheld || !add_unheld(saves, unheld.get())) {
    return nullptr;
  }
  if (PyList_GET_SIZE(ended.get()) + PyList_GET_SIZE(unheld.get()) == 0) {
    Py_RETURN_NONE;
  }
  return PyTuple_Pack(2, ended.get(), unheld.get());
}

PyObject* is_open(PyObject* self, void*) {
  return PyBool_FromLong(saves_of(self)->is_open);
}

PyObject* make_saves(PyTypeObject* type, PyObject* arguments, PyObject* keywords) {
  if (PyTuple_GET_SIZE(arguments) != kUnplannedParts || (keywords != nullptr && PyDict_GET_SIZE(keywords) != 0)) {
    PyErr_Format(PyExc_TypeError, "expected %d arguments", static_cast<int>(kUnplannedParts));
    return nullptr;
  }
  for (const UnplannedPart part : {kLayout, kIsQuantized, kIsNested}) {
    if (Py_TYPE(PyTuple_GET_ITEM(arguments, part))->tp_descr_get == nullptr) {
      PyErr_SetString(PyExc_TypeError, "expected descriptors of torch.Tensor");
      return nullptr;
    }
  }
  UnplannedSaves* saves = saves_of(type->tp_alloc(type, 0));  // zeroed
  if (saves == nullptr) {
    return nullptr;
  }
  for (int part = 0; part < kUnplannedParts; ++part) {
    saves->parts[static_cast<std::size_t>(part)] = Py_NewRef(PyTuple_GET_ITEM(arguments, part));
  }
  saves->state = new UnplannedState();
  return reinterpret_cast<PyObject*>(saves);
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  const UnplannedSaves* saves = saves_of(self);
  Py_VISIT(Py_TYPE(self));
  for (PyObject* part : saves->parts) {
    Py_VISIT(part);
  }
  if (saves->state != nullptr) {
    Py_VISIT(saves->state->step.get());
  }
  return 0;
}

// A cleared one is garbage: no gate has it.
int clear(PyObject* self) {
  UnplannedSaves* saves = saves_of(self);
  if (saves->state != nullptr && saves->parts[kFreeHandle] != nullptr) {
    forget(saves->state, saves);
    const Reference before = std::exchange(saves->state->step, Reference());
  }
  for (PyObject*& part : saves->parts) {
    Py_CLEAR(part);
  }
  return 0;
}

void dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  clear(self);
  delete saves_of(self)->state;
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyMethodDef methods[] = {
    {"open", open, METH_VARARGS, nullptr},      {"close", close, METH_NOARGS, nullptr},
    {"end", end, METH_NOARGS, nullptr},         {"lifetime_at", lifetime_at, METH_O, nullptr},
    {"hand_over", hand_over, METH_O, nullptr},  {"is_alive", is_alive, METH_O, nullptr},
    {"changes", changes, METH_NOARGS, nullptr}, {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef properties[] = {
    {"is_open", is_open, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(&make_saves)},
    {Py_tp_dealloc, reinterpret_cast<void*>(&dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(&traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(&clear)},
    {Py_tp_methods, methods},
    {Py_tp_getset, properties},
    {0, nullptr},
};

PyType_Spec spec = {"vdnn._C.UnplannedSaves", sizeof(UnplannedSaves), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                    slots};

}  // namespace

PyObject* keep_unplanned(Gate* gate, PyObject* tensor) {
  UnplannedSaves* saves = gate->unplanned;
  if (saves == nullptr || !saves->is_open ||
      reinterpret_cast<PyObject*>(Py_TYPE(tensor)) != saves->parts[kTensorClass] ||
      PyThread_get_thread_ident() != saves->thread || (gate->ledger->living() == 0 && number_of(saves, "uses") != 0)) {
    return nullptr;
  }
  Facts facts;
  if (!read(gate, saves, tensor, facts) || !is_plain(gate, saves, tensor)) {
    clear_error();
    return nullptr;
  }
  const std::size_t place = alive_at(gate, saves->state, facts.native);
  const bool is_new = place == kNone;
  if (is_new ? saves->state->by_address.count(facts.native) != 0
             : !joins(gate, saves->state->storages[place], tensor, facts.version, facts.dtype.get())) {
    clear_error();
    return nullptr;
  }
  const std::int64_t number = is_new ? number_of(saves, "lifetimes") : saves->state->storages[place].lifetime;
  PyObject* held = number < 0 ? nullptr : PyObject_CallOneArg(gate->parts[kDetach], tensor);
  if (held == nullptr || !saves->is_open) {  // detach() lets other threads run
    Py_XDECREF(held);
    clear_error();
    return nullptr;
  }
  const auto lifetime = static_cast<std::int32_t>(number);
  Ledger* ledger = gate->ledger;
  if (is_new && !add(saves, lifetime, facts)) {
    Py_DECREF(held);
    return nullptr;
  }
  ledger->saved(lifetime, facts.whole);
  Reference save = Reference::stolen(make_kept_save(held, facts.version, ledger->step(), ledger, lifetime));
  if (!save) {
    ledger->freed(ledger->step(), lifetime);
    return nullptr;
  }
  const Reference nbytes = Reference::stolen(PyLong_FromLongLong(facts.whole));
  PyObject* newness = is_new ? Py_True : Py_False;
  const Reference is_served =
      nbytes ? Reference::stolen(PyObject_CallFunctionObjArgs(saves->parts[kSaved], save.get(), tensor,
                                                              facts.storage.get(), nbytes.get(), newness, nullptr))
             : Reference();
  if (is_true(is_served)) {
    return save.release();
  }
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  if (is_new && number_of(saves, "lifetimes") == number) {  // else it was counted, and ends with the save
    take_back(gate, saves, lifetime, facts.native);
  }
  PyErr_Restore(type, value, trace);
  return nullptr;
}

PyObject* use_unplanned(Gate* gate, KeptSave* save) {
  UnplannedSaves* saves = gate->unplanned;
  if (saves == nullptr || !saves->state->step || save->ledger == nullptr || save->step != gate->ledger->step() ||
      !is_untraced(gate->mover)) {
    clear_error();
    return nullptr;
  }
  const Reference tensor(save->tensor);
  if (!Reference::stolen(PyObject_CallOneArg(saves->parts[kUsed], reinterpret_cast<PyObject*>(save)))) {
    return nullptr;
  }
  return Py_NewRef(tensor.get());
}

PyTypeObject* unplanned_saves_type() {
  return type_of_saves;
}

bool add_unplanned_saves(PyObject* module) {
  if (type_of_saves == nullptr) {
    type_of_saves = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  }
  return type_of_saves != nullptr &&
         PyObject_SetAttrString(module, "UnplannedSaves", reinterpret_cast<PyObject*>(type_of_saves)) == 0;
}

}  // namespace vdnn::hooks
