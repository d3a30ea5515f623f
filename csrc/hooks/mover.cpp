// Releases, reloads and sources of the mover.
#include "hooks/mover.h"

#include "hooks/mover_state.h"
#include "hooks/weak_storage.h"

namespace vdnn::hooks {
namespace {

bool is_on_stream(const Transfer& transfer) {
  if (transfer.current_stream.get() == Py_None) {
    return true;
  }
  const Reference now = Reference::stolen(PyObject_CallNoArgs(transfer.current_stream.get()));
  return now && PyObject_RichCompareBool(now.get(), transfer.expected_stream.get(), Py_EQ) == 1;
}

// True if the storage is freed as soon as the mover drops it. See [Note: Memory of others] in source.py.
bool frees_its_memory(const LightSource* source) {
  const Mover* mover = source->mover;
  if (Py_REFCNT(source->storage) != 1) {
    return false;
  }
  const Reference is_own = Reference::stolen(PyObject_CallMethod(source->storage, "resizable", nullptr));
  if (is_own.get() != Py_True) {
    PyErr_Clear();
    return false;
  }
  std::int64_t holders = 0;
  if (!as_number(Reference::stolen(PyObject_CallOneArg(mover->parts[kUseCount], source->address)), holders)) {
    PyErr_Clear();
    return false;
  }
  return holders == 1;
}

bool note(const Transfer& transfer, Address address, std::int64_t nbytes, Access access, const char* label) {
  try {
    const ByteRange range{address, static_cast<std::uint64_t>(nbytes)};
    transfer.device->note_access(range, access, transfer.stream, label);
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

// False if Python has to do it.
bool release(LightStorage* storage) {
  if (storage->is_waited_for) {
    storage->forget_reload();
  }
  if (storage->copy == nullptr || storage->source->storage == nullptr) {
    return true;
  }
  const std::shared_ptr<TransferQueue> queue = storage->mover->state->transfer.queue;
  const std::shared_ptr<HostCopy> copy = storage->copy;
  return on_queue(*queue, [&] { queue->release(copy); });
}

// False, perhaps with a Python error set, if Python has to do it.
bool reload_early(LightStorage* storage) {
  if (storage->copy == nullptr || storage->source->storage != nullptr || storage->reload != nullptr ||
      version_of(storage->mover, storage->witness.get()) != storage->version) {
    return true;
  }
  if (is_held(storage)) {
    return true;
  }
  if (!may_move_here(storage->mover) || !issue_reload(storage)) {
    return false;
  }
  ++storage->mover->state->counts.prefetched_reloads;
  return true;
}

bool has_light_moves(const Mover* mover, const Event& event, bool reloads) {
  if (!mover->is_open) {
    return false;
  }
  for (const PlannedMove& move : event.moves) {
    const auto number = static_cast<std::size_t>(move.lifetime);
    if (move.is_reload == reloads && number < mover->state->by_lifetime.size() &&
        mover->state->by_lifetime[number] != nullptr) {
      return true;
    }
  }
  return false;
}

}  // namespace

Reference held_storage(const LightStorage* storage) {
  const LightSource* source = storage->source;
  if (source->others == nullptr) {
    return Reference(Py_None);
  }
  PyObject* number = number_of_weak(source->others);
  Reference alive = number == nullptr
                        ? Reference()
                        : Reference::stolen(PyObject_CallOneArg(storage->mover->parts[kFromWeak], number));
  PyErr_Clear();
  return alive;
}

bool is_held(const LightStorage* storage) {
  return held_storage(storage).get() != Py_None;
}

bool is_untraced(const Mover* mover) {
  const auto& parts = mover->parts;
  const Reference level = Reference::stolen(PyObject_CallNoArgs(parts[kTransformLevel]));
  std::int64_t modes = 0;
  if (level.get() != Py_None || !as_number(Reference::stolen(PyObject_CallNoArgs(parts[kNumModes])), modes) ||
      (modes != 0 && !is_false(Reference::stolen(PyObject_CallNoArgs(parts[kIsTraced]))))) {
    return false;
  }
  return parts[kIsCapturing] == Py_None || is_false(Reference::stolen(PyObject_CallNoArgs(parts[kIsCapturing])));
}

bool may_move_here(const Mover* mover) {
  return is_untraced(mover) && is_on_stream(mover->state->transfer);
}

bool issue_reload(LightStorage* storage) {
  const Mover* mover = storage->mover;
  const Moving& first = storage->first;
  PyObject* const arguments[] = {first.target_size.get(), first.target_strides.get(), first.dtype.get(),
                                 first.device.get()};
  Reference target =
      Reference::stolen(PyObject_Vectorcall(mover->parts[kEmptyStrided], arguments, 2, mover->parts[kKeywords]));
  const Reference at =
      target ? Reference::stolen(PyObject_CallOneArg(mover->parts[kAddress], target.get())) : Reference();
  if (!at) {
    return false;
  }
  const Transfer& transfer = mover->state->transfer;
  const auto address = static_cast<Address>(PyLong_AsUnsignedLongLong(at.get()));
  if (address % transfer.alignment != 0) {
    return false;
  }
  const std::shared_ptr<TransferQueue> queue = transfer.queue;
  const std::shared_ptr<HostCopy> copy = storage->copy;
  const Stream stream = transfer.stream;
  std::shared_ptr<Reload> reload;
  Keepalive kept = keep_alive(target.get());
  if (!on_queue(*queue, [&] { reload = queue->reload(copy, address, stream, std::move(kept)); }) ||
      storage->is_handed_over) {
    return false;
  }
  storage->reload = std::move(reload);
  storage->target = std::move(target);
  storage->target_at = address;
  storage->is_waited_for = false;
  storage->unused_views = storage->views + storage->more_uses;
  mover->state->counts.reloaded_bytes += storage->source->nbytes;
  return true;
}

bool release_sources(Mover* mover) {
  const std::shared_ptr<TransferQueue> queue = mover->state->transfer.queue;
  if (queue == nullptr || !queue->may_have_released()) {
    return true;
  }
  std::vector<Keepalive> released;
  if (!on_queue(*queue, [&] { released = queue->take_released(); })) {
    return true;  // closed: Python finds that out
  }
  bool is_done = true;
  for (const Keepalive& kept : released) {
    auto* source = static_cast<PyObject*>(kept.get());
    if (source == nullptr || !is_done) {
      continue;
    }
    is_done = is_light_source(source)
                  ? release_source(reinterpret_cast<LightSource*>(source))
                  : static_cast<bool>(Reference::stolen(PyObject_CallMethod(source, "release", nullptr)));
  }
  return is_done;
}

bool release_source(LightSource* source) {
  const Reference held(reinterpret_cast<PyObject*>(source));
  if (source->full == nullptr && source->storage != nullptr) {
    Mover* mover = source->mover;
    const Transfer& transfer = mover->state->transfer;
    const bool is_usual = mover->is_open && PyDict_Size(transfer.streams.get()) <= 1;
    const bool frees = is_usual && frees_its_memory(source);
    if (is_usual && !frees && source->owner != nullptr) {
      source->others = PyObject_CallFunctionObjArgs(mover->parts[kHeld], source->event, source->storage, nullptr);
      if (source->others != nullptr) {
        Py_CLEAR(source->storage);
      }
      return source->others != nullptr;
    }
    if (frees && (!transfer.notes_releases ||
                  note(transfer, source->bytes_at, source->nbytes, Access::Release, "storage released"))) {
      mover->state->counts.freed_bytes += source->nbytes;
      mover->state->by_address.erase(native_address(source));
      mover->state->ownerless.erase(source);
      Py_CLEAR(source->storage);
      return true;
    }
    if (!(source->owner != nullptr ? hand_over(source->owner) : hand_over_source(source))) {
      return false;
    }
  }
  return source->full == nullptr || Reference::stolen(PyObject_CallMethod(source->full, "release", nullptr));
}

bool note_producer(const LightStorage* storage) {
  const Transfer& transfer = storage->mover->state->transfer;
  const LightSource* source = storage->source;
  return !transfer.is_checked || note(transfer, source->bytes_at, source->nbytes, Access::Write, "producer");
}

bool note_reload(const LightStorage* storage) {
  const Transfer& transfer = storage->mover->state->transfer;
  if (storage->is_handed_over) {
    return false;
  }
  return !transfer.is_checked || note(transfer, storage->target_at, storage->source->nbytes, Access::Read, "use");
}

bool note_recompute(const LightStorage* storage, PyObject* made) {
  const Mover* mover = storage->mover;
  const Transfer& transfer = mover->state->transfer;
  if (!transfer.is_checked) {
    return true;
  }
  std::int64_t address = 0;
  if (!as_number(Reference::stolen(PyObject_CallOneArg(mover->parts[kAddress], made)), address)) {
    return false;
  }
  if (!note(transfer, static_cast<Address>(address), storage->source->nbytes, Access::Write, "recompute")) {
    PyErr_SetString(PyExc_RuntimeError, "the device refuses a recompute");
    return false;
  }
  return true;
}

bool make_moves(Mover* mover, const Event& event, bool reloads) {
  if (!has_light_moves(mover, event, reloads)) {
    return true;
  }
  const Locked locked(mover);
  if (!locked) {
    return false;
  }
  for (const PlannedMove& move : event.moves) {
    const MoverState* state = mover->state;
    const auto number = static_cast<std::size_t>(move.lifetime);
    if (move.is_reload != reloads || number >= state->by_lifetime.size() || state->by_lifetime[number] == nullptr) {
      continue;
    }
    LightStorage* storage = state->by_lifetime[number];
    const Held held(storage);
    if (reloads ? reload_early(storage) : release(storage)) {
      if (!reloads && !release_sources(mover)) {
        return false;
      }
      continue;
    }
    if (!clear_error()) {
      return false;
    }
    const Reference by = Reference(storage->first.event.get());
    if (!hand_over(storage) ||
        !Reference::stolen(PyObject_CallFunction(mover->parts[kMove], "OO", by.get(), reloads ? Py_True : Py_False))) {
      return false;
    }
  }
  return true;
}

bool has_moves_for_python(const Mover* mover, const Event& event) {
  if (!mover->is_open) {
    return !event.moves.empty();
  }
  for (const PlannedMove& move : event.moves) {
    const auto number = static_cast<std::size_t>(move.lifetime);
    if (number >= mover->state->is_in_python.size() || mover->state->is_in_python[number] != 0) {
      return true;
    }
  }
  return false;
}

}  // namespace vdnn::hooks
