// Light storages that are discarded without a copy, and recomputed before their next use.
//
// Python finds the recipe and follows it. What is recomputed is held until its last known use, as a reload is.
#include "hooks/mover_state.h"
#include "hooks/weak_storage.h"

namespace vdnn::hooks {

bool is_missing(const LightStorage* storage) {
  return !storage->is_handed_over && storage->recipe && !storage->target && !is_held(storage);
}

bool discard(LightSave* save, PyObject* tensor, std::size_t position) {
  LightStorage* storage = save->storage;
  const Mover* mover = storage->mover;
  if (PyDict_Size(mover->state->transfer.streams.get()) > 1) {
    return false;  // each stream has to wait for the others before the memory goes back
  }
  const Reference at = Reference::stolen(PyLong_FromSize_t(position));
  Reference recipe = at ? Reference::stolen(PyObject_CallFunctionObjArgs(
                              mover->parts[kDiscard], tensor, reinterpret_cast<PyObject*>(save), at.get(), nullptr))
                        : Reference();
  if (!recipe || recipe.get() == Py_None || storage->is_handed_over) {
    return false;
  }
  LightSource* source = storage->source;
  // Whoever else holds it keeps it alive: then it need not be recomputed. The native object's address is not used
  // again meanwhile.
  source->others = weakly(source->storage);
  if (source->others == nullptr) {
    return false;
  }
  MoverState* state = mover->state;
  ++state->discarded;
  ++state->counts.discarded;
  state->counts.discarded_bytes += source->nbytes;
  storage->recipe = std::move(recipe);
  Py_CLEAR(source->storage);
  return true;
}

bool recomputed(LightStorage* storage, PyObject* made) {
  Mover* mover = storage->mover;
  if (!note_recompute(storage, made)) {
    return false;
  }
  storage->target = Reference(made);
  storage->unused_views = storage->views + storage->more_uses;
  ++mover->state->counts.recomputes;
  return true;
}

}  // namespace vdnn::hooks
