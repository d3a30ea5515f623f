// Saves and uses that the mover serves.
#include <new>

#include "hooks/gate_state.h"
#include "hooks/mover_state.h"

namespace vdnn::hooks {
namespace {

// Attributes that are read at each save.
struct Names final {
  PyObject* const address = PyUnicode_InternFromString("_cdata");
  PyObject* const was_paused = PyUnicode_InternFromString("was_paused");
  PyObject* const nbytes = PyUnicode_InternFromString("nbytes");
  PyObject* const data_ptr = PyUnicode_InternFromString("data_ptr");

  static const Names& all() {
    static const Names made;
    return made;
  }
};

// The storage of a tensor, and the address of its native object.
struct Found final {
  Reference storage;
  Reference address;
  std::uintptr_t native = 0;
};

bool find(const Mover* mover, PyObject* tensor, Found& found) {
  found.storage = Reference::stolen(PyObject_CallOneArg(mover->parts[kStorage], tensor));
  if (!found.storage) {
    return false;
  }
  found.address = Reference::stolen(PyObject_GetAttr(found.storage.get(), Names::all().address));
  if (!found.address) {
    return false;
  }
  found.native = reinterpret_cast<std::uintptr_t>(PyLong_AsVoidPtr(found.address.get()));
  return found.native != 0;
}

bool equals(const Reference& found, const Reference& expected) {
  return found && PyObject_RichCompareBool(found.get(), expected.get(), Py_EQ) == 1;
}

// True if the tensor is one of whose bytes Python would move the same: see Exemptions.always.
bool may_move(const Mover* mover, PyObject* tensor, PyObject* address, bool is_leaf) {
  const auto& parts = mover->parts;
  if (!is_false(Reference::stolen(PyObject_GetAttr(parts[kExemptions], Names::all().was_paused))) ||
      PySet_Size(parts[kMarkedModules]) != 0 || PySequence_Contains(parts[kParameters], address) != 0 ||
      PySequence_Contains(parts[kMarked], address) != 0) {
    return false;
  }
  if (is_leaf && !is_false(Reference::stolen(get(parts[kRequiresGrad], tensor)))) {
    return false;
  }
  const Reference base = Reference::stolen(get(parts[kBase], tensor));
  if (!base || base.get() == Py_None) {
    return static_cast<bool>(base);
  }
  const Reference node = Reference::stolen(get(parts[kNode], base.get()));
  return node && (node.get() != Py_None || is_false(Reference::stolen(get(parts[kRequiresGrad], base.get()))));
}

// True if the rest of its save key, which the gate has not compared, is as in the script.
bool is_as_planned(const Mover* mover, const Moving& moving, PyObject* tensor) {
  const auto& parts = mover->parts;
  const Reference node = Reference::stolen(get(parts[kNode], tensor));
  return node && reinterpret_cast<PyObject*>(Py_TYPE(node.get())) == moving.node_type.get() &&
         equals(Reference::stolen(get(parts[kShape], tensor)), moving.size) &&
         equals(Reference::stolen(PyObject_CallOneArg(parts[kStride], tensor)), moving.strides) &&
         equals(Reference::stolen(get(parts[kDevice], tensor)), moving.device) &&
         is_false(Reference::stolen(PyObject_CallOneArg(parts[kIsNeg], tensor)));
}

// The first save of its lifetime. Null if Python has to handle it.
LightSave* begin(Mover* mover, Ledger* ledger, ScriptObject* script, const Event& event, std::size_t position,
                 PyObject* tensor, const Found& found) {
  const auto& parts = mover->parts;
  MoverState* state = mover->state;
  const auto number = static_cast<std::size_t>(event.lifetime);
  std::int64_t whole = 0, bytes_at = 0, offset = 0;
  if (!as_number(Reference::stolen(PyObject_CallMethodNoArgs(found.storage.get(), Names::all().nbytes)), whole) ||
      whole != event.storage_bytes || state->by_lifetime[number] != nullptr ||
      PyDict_Contains(parts[kLatest], found.address.get()) != 0) {
    return nullptr;
  }
  const auto known = state->by_address.find(found.native);
  if (known != state->by_address.end()) {
    hand_over(known->second);  // the table has to find it
    return nullptr;
  }
  if (!as_number(Reference::stolen(PyObject_CallMethodNoArgs(found.storage.get(), Names::all().data_ptr)), bytes_at) ||
      !as_number(Reference::stolen(PyObject_CallOneArg(parts[kOffset], tensor)), offset) ||
      static_cast<Address>(bytes_at) % state->transfer.alignment != 0) {
    return nullptr;
  }
  const Moving& moving = *event.moving;
  Reference witness = with_data(mover, tensor, moving.empty.get());
  LightSource* source =
      witness ? make_light_source(mover, moving.event.get(), found.storage.get(), found.address.get()) : nullptr;
  if (source == nullptr) {
    return nullptr;
  }
  source->bytes_at = static_cast<Address>(bytes_at);
  source->nbytes = whole;
  LightStorage* storage = LightStorage::make(mover, ledger, script, event);
  if (storage == nullptr) {
    Py_DECREF(source);
    return nullptr;
  }
  const Held held(storage);
  source->owner = storage;
  storage->source = source;
  storage->version = version_of(mover, witness.get());
  storage->witness = std::move(witness);
  LightSave* save = storage->save(moving, offset);
  if (save == nullptr || storage->version < 0) {
    Py_XDECREF(save);
    return nullptr;
  }
  state->by_lifetime[number] = storage;
  state->by_address[found.native] = storage;
  state->is_in_python[number] = 0;
  const bool is_complete = moving.node_type.get() != reinterpret_cast<PyObject*>(Py_TYPE(Py_None));
  if (!(moving.is_discarded ? discard(save, tensor, position)
        : is_complete       ? offload(storage)
                            : wait_for_operation(storage))) {
    state->is_in_python[number] = 1;
    Py_DECREF(save);
    return nullptr;
  }
  return save;
}

// A further save of bytes that the mover has. Null if Python has to handle it.
LightSave* join(Mover* mover, const Event& event, PyObject* tensor, const Found& found) {
  LightStorage* storage = mover->state->by_lifetime[static_cast<std::size_t>(event.lifetime)];
  std::int64_t offset = 0;
  const auto known = mover->state->by_address.find(found.native);
  if (storage == nullptr || known == mover->state->by_address.end() || known->second != storage ||
      event.moving->dtype.get() != storage->first.dtype.get() || version_of(mover, tensor) != storage->version ||
      version_of(mover, storage->witness.get()) != storage->version ||
      !has_same_counter(mover, storage->witness.get(), tensor, storage->version) ||
      !as_number(Reference::stolen(PyObject_CallOneArg(mover->parts[kOffset], tensor)), offset)) {
    return nullptr;
  }
  ++mover->state->counts.shared_saves;
  return storage->save(*event.moving, offset);
}

// After a save or a use that the mover served. Returns false with a Python error set.
bool finish(const Gate* gate, Mover* mover, const Event& event, std::size_t position) {
  return make_moves(mover, event, false) &&
         ((gate->calls_python == 0 && !has_moves_for_python(mover, event)) || moved(gate, position)) &&
         make_moves(mover, event, true);
}

bool is_at(const Gate* gate, const ScriptObject* script, std::size_t position) {
  return gate->mover->is_open && gate->followed == script && gate->position == position &&
         !gate->mover->state->transfer.queue->fork_guard().in_forked_child();
}

// The tensor of a use, from the reload that `storage` has.
Reference tensor_of(const LightStorage* storage, const LightSave* save) {
  const Mover* mover = storage->mover;
  Reference tensor(storage->target.get());
  const Moving &moving = *save->moving, &first = storage->first;
  if (save->offset != 0 || !equals(Reference(moving.size.get()), first.target_size) ||
      !equals(Reference(moving.strides.get()), first.target_strides)) {
    const Reference offset = Reference::stolen(PyLong_FromLongLong(save->offset));
    tensor =
        offset
            ? Reference::stolen(PyObject_CallFunctionObjArgs(mover->parts[kAsStrided], tensor.get(), moving.size.get(),
                                                             moving.strides.get(), offset.get(), nullptr))
            : Reference();
  }
  return tensor ? with_data(mover, storage->witness.get(), tensor.get()) : Reference();
}

// True if autograd records nothing of the code that unpacks.
bool is_not_recorded(const Mover* mover) {
  return is_false(Reference::stolen(PyObject_CallNoArgs(mover->parts[kIsGradEnabled])));
}

// True if a use may return the bytes of a storage that has left the device.
bool may_return(const LightStorage* storage) {
  const Mover* mover = storage->mover;
  return storage->source->storage == nullptr && !is_held(storage) && only_reads(mover) && is_not_recorded(mover) &&
         may_move_here(mover) && version_of(mover, storage->witness.get()) == storage->version;
}

// The storage of bytes that never left the device: the plan has not released them yet, or the program holds them.
Reference on_device(const LightStorage* storage) {
  const LightSource* source = storage->source;
  if (source->storage != nullptr) {
    return Reference(source->storage);
  }
  Reference stored = held_storage(storage);
  return stored.get() == Py_None ? Reference() : std::move(stored);
}

// The tensor of a use of such bytes, whose copy may wait for its operation. Null, perhaps with a Python error set, if
// Python has to handle the use.
Reference in_place(const LightStorage* storage, const LightSave* save, const Reference& stored) {
  const Mover* mover = storage->mover;
  if (!only_reads(mover) || !is_not_recorded(mover) || !may_move_here(mover) ||
      version_of(mover, storage->witness.get()) != storage->version) {
    return {};
  }
  const Moving& moving = *save->moving;
  const Reference none = Reference::stolen(Py_BuildValue("(i)", 0)), one = Reference::stolen(Py_BuildValue("(i)", 1));
  PyObject* const arguments[] = {none.get(), one.get(), moving.dtype.get(), moving.device.get()};
  const Reference tensor =
      none && one
          ? Reference::stolen(PyObject_Vectorcall(mover->parts[kEmptyStrided], arguments, 2, mover->parts[kKeywords]))
          : Reference();
  if (!tensor || !Reference::stolen(PyObject_CallMethod(tensor.get(), "set_", "OLOO", stored.get(),
                                                        static_cast<long long>(save->offset), moving.size.get(),
                                                        moving.strides.get()))) {
    return {};
  }
  ++mover->state->counts.used_in_place;
  return with_data(mover, storage->witness.get(), tensor.get());
}

// Recomputes what was discarded. The recompute uses what it reads, at points of the script. False, perhaps with a
// Python error set, if Python has to handle the use.
bool restore(LightStorage* storage, LightSave* save) {
  if (!may_return(storage)) {
    return false;
  }
  return storage->target ||
         (Reference::stolen(PyObject_CallOneArg(storage->mover->parts[kRestore], reinterpret_cast<PyObject*>(save))) &&
          !storage->is_handed_over && storage->target);
}

// Null, perhaps with a Python error set, if Python has to handle the use.
Reference reloaded(LightStorage* storage, const LightSave* save) {
  Mover* mover = storage->mover;
  MoverState* state = mover->state;
  if (storage->copy == nullptr || !may_return(storage)) {
    return {};
  }
  if (storage->reload == nullptr) {
    if (!issue_reload(storage)) {
      return {};
    }
    ++state->counts.demand_reloads;
  }
  if (!storage->is_waited_for) {
    const std::shared_ptr<TransferQueue> queue = state->transfer.queue;
    const std::shared_ptr<Reload> reload = storage->reload;
    const Stream stream = state->transfer.stream;
    if (!on_queue(*queue, [&] { queue->wait(reload, stream); }) || storage->is_handed_over) {
      return {};
    }
    storage->is_waited_for = true;
  }
  return tensor_of(storage, save);
}

}  // namespace

bool only_reads(const Mover* mover) {
  const Reference node = Reference::stolen(PyObject_CallNoArgs(mover->parts[kCurrentNode]));
  if (!node) {
    PyErr_Clear();
    return false;
  }
  return PyDict_GetItem(mover->parts[kOverwrites], reinterpret_cast<PyObject*>(Py_TYPE(node.get()))) == Py_False;
}

// One call increments and restores a shared counter, as in version_counter.py.
bool has_same_counter(const Mover* mover, PyObject* witness, PyObject* tensor, std::int64_t version) {
  const Reference tensors = Reference::stolen(PyTuple_Pack(2, witness, tensor));
  const Reference versions =
      Reference::stolen(Py_BuildValue("(LL)", static_cast<long long>(version) + 1, static_cast<long long>(version)));
  PyObject* set = mover->parts[kSetVersions];
  if (!tensors || !versions ||
      !Reference::stolen(PyObject_CallFunctionObjArgs(set, tensors.get(), versions.get(), nullptr))) {
    return false;
  }
  if (version_of(mover, witness) == version) {
    return true;
  }
  const Reference alone = Reference::stolen(PyTuple_Pack(1, witness));
  const Reference before = Reference::stolen(Py_BuildValue("(L)", static_cast<long long>(version)));
  if (alone && before) {
    Py_XDECREF(PyObject_CallFunctionObjArgs(set, alone.get(), before.get(), nullptr));
  }
  return false;
}

std::int64_t version_of(const Mover* mover, PyObject* tensor) {
  std::int64_t version = 0;
  if (!as_number(Reference::stolen(get(mover->parts[kVersionOf], tensor)), version)) {
    PyErr_Clear();
    return -1;
  }
  return version;
}

Reference with_data(const Mover* mover, PyObject* tensor, PyObject* data) {
  Reference shared = Reference::stolen(PyObject_CallOneArg(mover->parts[kDetachOf], tensor));
  PyObject* descriptor = mover->parts[kData];
  if (shared && Py_TYPE(descriptor)->tp_descr_set(descriptor, shared.get(), data) != 0) {
    return {};
  }
  return shared;
}

bool offload(LightStorage* storage) {
  Mover* mover = storage->mover;
  if (!note_producer(storage)) {
    return false;
  }
  const Transfer& transfer = mover->state->transfer;
  const std::shared_ptr<TransferQueue> queue = transfer.queue;
  const Stream stream = transfer.stream;
  const Address bytes_at = storage->source->bytes_at;
  const std::int64_t nbytes = storage->source->nbytes;
  std::shared_ptr<HostCopy> copy;
  Keepalive kept = keep_alive(reinterpret_cast<PyObject*>(storage->source));
  if (!on_queue(*queue,
                [&] {
                  copy = queue->offload(bytes_at, static_cast<std::uint64_t>(nbytes), stream, stream, std::move(kept),
                                        Growth::Now);
                }) ||
      copy == nullptr || storage->is_handed_over) {
    return false;
  }
  storage->copy = std::move(copy);
  ++mover->state->counts.storages;
  mover->state->counts.storage_bytes += nbytes;
  return true;
}

PyObject* move_save(Gate* gate, Mover* mover, const Event& event, std::size_t position, PyObject* tensor) {
  const Reference held(reinterpret_cast<PyObject*>(gate->followed));
  auto* script = reinterpret_cast<ScriptObject*>(held.get());
  const Locked locked(mover);
  if (!locked || !is_at(gate, script, position) || !release_sources(mover)) {
    return nullptr;
  }
  Found found;
  LightSave* save = nullptr;
  if (may_move_here(mover) && is_as_planned(mover, *event.moving, tensor) && find(mover, tensor, found) &&
      may_move(mover, tensor, found.address.get(), event.is_leaf) && is_at(gate, script, position)) {
    save = event.moving->is_first ? begin(mover, gate->ledger, script, event, position, tensor, found)
                                  : join(mover, event, tensor, found);
  }
  if (save == nullptr) {
    LightStorage* other = mover->state->by_lifetime[static_cast<std::size_t>(event.lifetime)];
    if (clear_error() && other != nullptr) {
      hand_over(other);
    }
    return nullptr;
  }
  gate->position = position + 1;
  const bool was_closed = !mover->is_open;  // by another thread, while the queue worked
  if (was_closed ? !hand_over(save->storage) : !finish(gate, mover, event, position)) {
    Py_DECREF(save);
    return nullptr;
  }
  return reinterpret_cast<PyObject*>(save);
}

PyObject* move_use(Gate* gate, Mover* mover, std::size_t position, LightSave* save) {
  const Reference held(reinterpret_cast<PyObject*>(gate->followed));
  const auto* script = reinterpret_cast<ScriptObject*>(held.get());
  LightStorage* storage = save->storage;
  const Held storage_held(storage);
  const Reference save_held(reinterpret_cast<PyObject*>(save));
  const Locked locked(mover);
  if (!locked || !is_at(gate, script, position) || storage->is_handed_over || storage->step != gate->ledger->step() ||
      !release_sources(mover)) {
    return nullptr;
  }
  const bool is_discarded = !storage->is_handed_over && storage->recipe;
  if (is_discarded && !restore(storage, save)) {
    clear_error();
    return nullptr;
  }
  position = gate->position;  // a recompute uses what it reads first
  const Event* event = is_at(gate, script, position) && position < script->script.events.size()
                           ? &script->script.events[position]
                           : nullptr;
  if (event == nullptr || event->kind != Kind::Fetch || event->lifetime != storage->lifetime) {
    return nullptr;
  }
  const Reference stored = storage->is_handed_over || is_discarded ? Reference() : on_device(storage);
  const bool is_here = static_cast<bool>(stored);
  Reference tensor = storage->is_handed_over ? Reference()
                     : is_here               ? in_place(storage, save, stored)
                     : is_discarded          ? tensor_of(storage, save)
                                             : reloaded(storage, save);
  if (!tensor || !(is_here || is_discarded || note_reload(storage))) {
    clear_error();
    return nullptr;
  }
  if (!is_here && --storage->unused_views <= 0) {
    // The last known use: the caller's view keeps the bytes alive as long as it needs them.
    storage->forget_reload();
  }
  Counts& counts = mover->state->counts;
  ++counts.uses;
  counts.used_recomputed += is_discarded ? 1 : 0;
  gate->position = position + 1;
  return finish(gate, mover, *event, position) ? tensor.release() : nullptr;
}

}  // namespace vdnn::hooks
