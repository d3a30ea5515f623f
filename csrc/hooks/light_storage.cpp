#include "hooks/light_storage.h"

// Python.h comes first
#include <structmember.h>

#include <cstddef>
#include <new>
#include <utility>

#include "hooks/mover_state.h"

namespace vdnn::hooks {
namespace {

PyTypeObject* save_type = nullptr;
PyTypeObject* source_type = nullptr;

// The packed view of a light save, which is handed over for it.
PyObject* full(PyObject* self, PyObject*) {
  auto* save = reinterpret_cast<LightSave*>(self);
  if (save->full == nullptr && !hand_over(save->storage)) {
    return nullptr;
  }
  return Py_XNewRef(save->full);
}

// Its packed view, if it was handed over; else None.
PyObject* view(PyObject* self, void*) {
  PyObject* view = reinterpret_cast<LightSave*>(self)->full;
  return Py_NewRef(view == nullptr ? Py_None : view);
}

// True if nothing was written to its bytes since the save. Only while it is light.
PyObject* is_current(PyObject* self, void*) {
  const LightStorage* storage = reinterpret_cast<LightSave*>(self)->storage;
  return PyBool_FromLong(!storage->is_handed_over &&
                         version_of(storage->mover, storage->witness.get()) == storage->version);
}

// A number that all saves of its storage have, and no other object.
PyObject* identity(PyObject* self, void*) {
  return PyLong_FromVoidPtr(reinterpret_cast<LightSave*>(self)->storage);
}

PyObject* native_address_of(PyObject* self, void*) {
  const LightSource* source = reinterpret_cast<LightSave*>(self)->storage->source;
  return source == nullptr ? PyLong_FromLong(0) : Py_NewRef(source->address);
}

PyObject* witness(PyObject* self, void*) {
  PyObject* witness = reinterpret_cast<LightSave*>(self)->storage->witness.get();
  return Py_NewRef(witness == nullptr ? Py_None : witness);
}

PyObject* geometry(PyObject* self, void*) {
  const Moving* moving = reinterpret_cast<LightSave*>(self)->moving;
  return PyTuple_Pack(3, moving->dtype.get(), moving->size.get(), moving->strides.get());
}

// The size and strides of a tensor with all bytes of its storage, which gives the geometry of its saves.
PyObject* whole_geometry(PyObject* self, void*) {
  const Moving& first = reinterpret_cast<LightSave*>(self)->storage->first;
  return PyTuple_Pack(2, first.target_size.get(), first.target_strides.get());
}

// The recipe of a storage that was discarded; else None.
PyObject* recipe(PyObject* self, void*) {
  PyObject* recipe = reinterpret_cast<LightSave*>(self)->storage->recipe.get();
  return Py_NewRef(recipe == nullptr ? Py_None : recipe);
}

// True if it was discarded and has to be recomputed before its next use. Only while it is light.
PyObject* is_missing(PyObject* self, void*) {
  return PyBool_FromLong(hooks::is_missing(reinterpret_cast<LightSave*>(self)->storage));
}

// Its storage was recomputed: `made` has all its bytes.
PyObject* restore(PyObject* self, PyObject* made) {
  LightStorage* storage = reinterpret_cast<LightSave*>(self)->storage;
  if (storage->recipe && !storage->is_handed_over && !recomputed(storage, made)) {
    return nullptr;
  }
  Py_RETURN_NONE;
}

void dealloc_save(PyObject* self) {
  auto* save = reinterpret_cast<LightSave*>(self);
  if (save->references != nullptr) {
    PyObject_ClearWeakRefs(self);
  }
  LightStorage* storage = save->storage;
  PyObject* view = save->full;
  storage->freed(save);
  PyTypeObject* type = Py_TYPE(self);
  PyObject_Free(self);
  Py_DECREF(type);
  Py_XDECREF(view);  // these last: they may run any code
  storage->drop();
}

PyObject* release(PyObject* self, PyObject*) {
  if (!release_source(reinterpret_cast<LightSource*>(self))) {
    return nullptr;
  }
  Py_RETURN_NONE;
}

void dealloc_source(PyObject* self) {
  auto* source = reinterpret_cast<LightSource*>(self);
  if (source->mover != nullptr) {
    source->mover->state->ownerless.erase(source);
  }
  PyObject* const held[] = {source->storage, source->address, source->event,
                            source->full,    source->others,  reinterpret_cast<PyObject*>(source->mover)};
  PyTypeObject* type = Py_TYPE(self);
  PyObject_Free(self);
  Py_DECREF(type);
  for (PyObject* one : held) {
    Py_XDECREF(one);
  }
}

PyMethodDef save_methods[] = {
    {"full", full, METH_NOARGS, nullptr},
    {"restore", restore, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyGetSetDef save_properties[] = {
    {"view", view, nullptr, nullptr, nullptr},
    {"is_current", is_current, nullptr, nullptr, nullptr},
    {"identity", identity, nullptr, nullptr, nullptr},
    {"native_address", native_address_of, nullptr, nullptr, nullptr},
    {"witness", witness, nullptr, nullptr, nullptr},
    {"geometry", geometry, nullptr, nullptr, nullptr},
    {"whole_geometry", whole_geometry, nullptr, nullptr, nullptr},
    {"recipe", recipe, nullptr, nullptr, nullptr},
    {"is_missing", is_missing, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};
PyMemberDef save_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(LightSave, references), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};
PyType_Slot save_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(&dealloc_save)},
    {Py_tp_methods, save_methods},
    {Py_tp_getset, save_properties},
    {Py_tp_members, save_members},
    {0, nullptr},
};
PyType_Spec save_spec = {"vdnn._C.LightSave", sizeof(LightSave), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, save_slots};

PyMethodDef source_methods[] = {{"release", release, METH_NOARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
PyType_Slot source_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(&dealloc_source)},
    {Py_tp_methods, source_methods},
    {0, nullptr},
};
PyType_Spec source_spec = {"vdnn._C.LightSource", sizeof(LightSource), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, source_slots};

// A zeroed object.
template <class Object>
Object* make(PyTypeObject* type) {
  return reinterpret_cast<Object*>(type->tp_alloc(type, 0));
}

bool add(PyObject* module, PyTypeObject*& type, PyType_Spec& spec, const char* name) {
  if (type == nullptr) {
    type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  }
  return type != nullptr && PyObject_SetAttrString(module, name, reinterpret_cast<PyObject*>(type)) == 0;
}

}  // namespace

LightStorage::LightStorage(Mover* its_mover, Ledger* its_ledger, ScriptObject* script, const Event& event)
    : mover(its_mover),
      ledger(its_ledger),
      step(its_ledger->step()),
      lifetime(event.lifetime),
      first(*event.moving),
      script_(reinterpret_cast<PyObject*>(script)) {
  Py_INCREF(mover);
  ledger->hold();
}

LightStorage::~LightStorage() {
  MoverState* state = mover->state;
  if (!is_handed_over) {
    state->discarded -= recipe ? 1 : 0;
    wait_no_more(this);
    const auto number = static_cast<std::size_t>(lifetime);
    if (number < state->by_lifetime.size() && state->by_lifetime[number] == this) {
      state->by_lifetime[number] = nullptr;
    }
  }
  copy.reset();
  forget_reload();
  if (source != nullptr) {
    source->owner = nullptr;
    const auto known = state->by_address.find(native_address(source));
    if (known != state->by_address.end() && known->second == this) {
      state->by_address.erase(known);
    }
    if (source->storage != nullptr) {
      state->ownerless.insert(source);
    }
    Py_DECREF(source);
  }
  ledger->drop();
  Py_DECREF(mover);
}

LightStorage* LightStorage::make(Mover* mover, Ledger* ledger, ScriptObject* script, const Event& event) {
  auto* made = new (std::nothrow) LightStorage(mover, ledger, script, event);
  if (made == nullptr) {
    PyErr_NoMemory();
  }
  return made;
}

LightSave* LightStorage::save(const Moving& moving, std::int64_t offset) {
  auto* made = reinterpret_cast<LightSave*>(PyObject_Malloc(sizeof(LightSave)));
  if (made == nullptr) {
    PyErr_NoMemory();
    return nullptr;
  }
  PyObject_Init(reinterpret_cast<PyObject*>(made), save_type);
  made->storage = this;
  made->full = nullptr;
  made->moving = &moving;
  made->offset = offset;
  made->references = nullptr;
  made->next = nullptr;
  made->previous = newest;
  if (newest != nullptr) {
    newest->next = made;
  }
  newest = made;
  ++views;
  hold();
  ledger->saved(lifetime, 0);  // the gate keeps no bytes for it
  return made;
}

void LightStorage::freed(LightSave* save) {
  (save->next == nullptr ? newest : save->next->previous) = save->previous;
  if (save->previous != nullptr) {
    save->previous->next = save->next;
  }
  --views;
  if (!is_handed_over) {
    ledger->freed(step, lifetime);
  }
}

void LightStorage::forget_reload() {
  reload.reset();
  is_waited_for = false;
  target = Reference();
}

void LightStorage::became(PyObject* made_views, PyObject* made_source) {
  is_handed_over = true;
  mover->state->discarded -= recipe ? 1 : 0;
  wait_no_more(this);
  Py_ssize_t index = PyList_GET_SIZE(made_views);
  for (LightSave* save = newest; save != nullptr; save = save->previous) {
    save->full = Py_NewRef(PyList_GET_ITEM(made_views, --index));
    ledger->freed(step, lifetime);
  }
  source->owner = nullptr;
  Py_XSETREF(source->full, Py_NewRef(made_source));
  Py_CLEAR(source->storage);
  Py_CLEAR(source->others);
  Py_CLEAR(source->mover);
  Py_CLEAR(source);
  copy.reset();
  forget_reload();
  witness = Reference();
  const Reference before = std::exchange(recipe, Reference());  // the last: dropping it may run any code
}

bool is_light_save(PyObject* object) {
  return Py_TYPE(object) == save_type;
}

bool is_light_source(PyObject* object) {
  return Py_TYPE(object) == source_type;
}

LightSource* make_light_source(Mover* mover, PyObject* event, PyObject* storage, PyObject* address) {
  auto* made = make<LightSource>(source_type);
  if (made != nullptr) {
    made->storage = Py_NewRef(storage);
    made->address = Py_NewRef(address);
    made->event = Py_NewRef(event);
    Py_INCREF(mover);
    made->mover = mover;
  }
  return made;
}

bool add_light_storage(PyObject* module) {
  return add(module, save_type, save_spec, "LightSave") && add(module, source_type, source_spec, "LightSource");
}

}  // namespace vdnn::hooks
