// Hands light storages and sources over to Python.
#include "hooks/mover_state.h"
#include "hooks/native_parts.h"

namespace vdnn::hooks {
namespace {

// The saves of a storage, the oldest first.
std::vector<Reference> saves_of(const LightStorage* storage) {
  std::vector<Reference> saves(static_cast<std::size_t>(storage->views));
  auto place = saves.rbegin();
  for (LightSave* save = storage->newest; save != nullptr; save = save->previous) {
    *place++ = Reference(reinterpret_cast<PyObject*>(save));
  }
  return saves;
}

// A list of (event, offset in elements).
Reference described(const std::vector<Reference>& saves) {
  Reference list = Reference::stolen(PyList_New(0));
  for (const Reference& one : saves) {
    const auto* save = reinterpret_cast<LightSave*>(one.get());
    const Reference pair =
        Reference::stolen(Py_BuildValue("(OL)", save->moving->event.get(), static_cast<long long>(save->offset)));
    if (!list || !pair || PyList_Append(list.get(), pair.get()) != 0) {
      return {};
    }
  }
  return list;
}

Reference reload_of(const LightStorage* storage) {
  if (storage->reload == nullptr) {
    return Reference(Py_None);
  }
  const Reference reload = Reference::stolen(as_python(storage->reload));
  return reload ? Reference::stolen(Py_BuildValue("(OOOL)", storage->target.get(), reload.get(),
                                                  storage->is_waited_for ? Py_True : Py_False,
                                                  static_cast<long long>(storage->unused_views)))
                : Reference();
}

// (recipe, recomputed tensor, uses) of what was discarded.
Reference discard_of(const LightStorage* storage) {
  if (!storage->recipe) {
    return Reference(Py_None);
  }
  PyObject* made = storage->target ? storage->target.get() : Py_None;
  return Reference::stolen(
      Py_BuildValue("(OOL)", storage->recipe.get(), made, static_cast<long long>(storage->unused_views)));
}

// (views, source) of the managed storage that Python makes.
Reference made_of(const LightStorage* storage, const std::vector<Reference>& saves) {
  const MoverState* state = storage->mover->state;
  const LightSource* source = storage->source;
  const Reference views = described(saves), reload = reload_of(storage), discarded = discard_of(storage);
  const Reference copy = storage->copy == nullptr ? Reference(Py_None) : Reference::stolen(as_python(storage->copy));
  if (!views || !reload || !copy || !discarded) {
    return {};
  }
  PyObject* stored = source->storage != nullptr ? source->storage : source->others;
  return Reference::stolen(PyObject_CallFunction(
      storage->mover->parts[kHandOver], "OOKOOLOOOOL", source->event, stored == nullptr ? Py_None : stored,
      static_cast<unsigned long long>(source->bytes_at), state->transfer.python_stream.get(), storage->witness.get(),
      static_cast<long long>(storage->version), copy.get(), reload.get(), views.get(), discarded.get(),
      static_cast<long long>(storage->more_uses)));
}

}  // namespace

bool hand_over(LightStorage* storage) {
  if (storage->is_handed_over) {
    return true;
  }
  const Held held(storage);
  const std::vector<Reference> saves = saves_of(storage);
  const std::uintptr_t address = native_address(storage->source);
  const Reference made = made_of(storage, saves);
  if (storage->is_handed_over) {  // by another thread, meanwhile
    PyErr_Clear();
    return true;
  }
  if (!made) {
    return false;
  }
  PyObject *views = nullptr, *source = nullptr;
  if (!PyArg_ParseTuple(made.get(), "O!O", &PyList_Type, &views, &source)) {
    return false;
  }
  if (PyList_GET_SIZE(views) != static_cast<Py_ssize_t>(saves.size())) {
    PyErr_SetString(PyExc_RuntimeError, "expected as many packed views as saves");
    return false;
  }
  MoverState* state = storage->mover->state;
  const auto number = static_cast<std::size_t>(storage->lifetime);
  if (number < state->by_lifetime.size() && state->by_lifetime[number] == storage) {
    state->by_lifetime[number] = nullptr;
    state->is_in_python[number] = 1;
  }
  const auto known = state->by_address.find(address);
  if (known != state->by_address.end() && known->second == storage) {
    state->by_address.erase(known);
  }
  storage->became(views, source);
  return true;
}

bool hand_over_source(LightSource* source) {
  const Reference held(reinterpret_cast<PyObject*>(source));
  Mover* mover = source->mover;
  Reference full = Reference::stolen(PyObject_CallFunction(
      mover->parts[kMakeSource], "OOKO", source->event, source->storage,
      static_cast<unsigned long long>(source->bytes_at), mover->state->transfer.python_stream.get()));
  if (!full) {
    return false;
  }
  mover->state->ownerless.erase(source);
  Py_XSETREF(source->full, full.release());
  Py_CLEAR(source->storage);
  Py_CLEAR(source->mover);
  return true;
}

bool hand_over_all(Mover* mover) {
  // Each call may run any code, which may hand over or free others.
  MoverState* state = mover->state;
  for (std::size_t number = 0; number < state->by_lifetime.size(); ++number) {
    if (state->by_lifetime[number] != nullptr && !hand_over(state->by_lifetime[number])) {
      return false;
    }
  }
  while (!state->ownerless.empty()) {
    if (!hand_over_source(*state->ownerless.begin())) {
      return false;
    }
  }
  return true;
}

}  // namespace vdnn::hooks
