#include "hooks/kept_save.h"

#include <structmember.h>

#include <algorithm>
#include <cstddef>
#include <new>

namespace vdnn::hooks {
namespace {

PyTypeObject* kept_save_type = nullptr;

// Memory of freed saves, for the next ones: after the first settled step a save allocates nothing of its own.
struct Free final {
  Free* next;
};
Free* free_saves = nullptr;
std::int32_t number_free = 0;
constexpr std::int32_t kMostFree = 1 << 14;

void leave_ledger(KeptSave* save) {
  Ledger* ledger = save->ledger;
  if (ledger != nullptr) {
    save->ledger = nullptr;
    ledger->unlink(save);
    ledger->freed(save->step, save->lifetime);
    ledger->drop();
  }
}

PyObject* replace(PyObject* self, PyObject* packed) {
  auto* save = reinterpret_cast<KeptSave*>(self);
  leave_ledger(save);
  Py_XSETREF(save->tensor, Py_NewRef(packed));
  Py_RETURN_NONE;
}

void dealloc(PyObject* self) {
  auto* save = reinterpret_cast<KeptSave*>(self);
  if (save->references != nullptr) {
    PyObject_ClearWeakRefs(self);
  }
  PyObject* tensor = save->tensor;
  leave_ledger(save);
  PyTypeObject* type = Py_TYPE(self);
  if (number_free < kMostFree) {
    free_saves = new (self) Free{free_saves};
    ++number_free;
  } else {
    PyObject_Free(self);
  }
  Py_DECREF(type);
  Py_XDECREF(tensor);  // last: it may run any code
}

PyMemberDef members[] = {
    {"tensor", T_OBJECT_EX, offsetof(KeptSave, tensor), READONLY, nullptr},
    {"version", T_LONGLONG, offsetof(KeptSave, version), READONLY, nullptr},
    {"step", T_LONGLONG, offsetof(KeptSave, step), READONLY, nullptr},
    {"lifetime", T_INT, offsetof(KeptSave, lifetime), READONLY, nullptr},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(KeptSave, references), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyMethodDef methods[] = {
    {"replace", replace, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(&dealloc)},
    {Py_tp_members, members},
    {Py_tp_methods, methods},
    {0, nullptr},
};

PyType_Spec spec = {"vdnn._C.KeptSave", sizeof(KeptSave), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                    slots};

}  // namespace

bool is_kept_save(PyObject* object) {
  return Py_TYPE(object) == kept_save_type;
}

PyObject* make_kept_save(PyObject* tensor, std::int64_t version, std::int64_t step, Ledger* ledger,
                         std::int32_t lifetime) {
  void* memory = free_saves;
  if (memory != nullptr) {
    free_saves = free_saves->next;
    --number_free;
  } else {
    memory = PyObject_Malloc(sizeof(KeptSave));
    if (memory == nullptr) {
      Py_DECREF(tensor);
      PyErr_NoMemory();
      return nullptr;
    }
  }
  auto* save = reinterpret_cast<KeptSave*>(PyObject_Init(static_cast<PyObject*>(memory), kept_save_type));
  save->tensor = tensor;
  save->ledger = ledger;
  ledger->hold();
  ledger->link(save);
  save->version = version;
  save->step = step;
  save->lifetime = lifetime;
  save->references = nullptr;
  return reinterpret_cast<PyObject*>(save);
}

bool add_kept_save(PyObject* module) {
  if (kept_save_type == nullptr) {
    kept_save_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  }
  return kept_save_type != nullptr &&
         PyObject_SetAttrString(module, "KeptSave", reinterpret_cast<PyObject*>(kept_save_type)) == 0;
}

void Ledger::begin_step(std::int32_t lifetimes) {
  lifetimes_.assign(static_cast<std::size_t>(lifetimes), Lifetime{});
  ++step_;
  kept_bytes_ = 0;
  notes_ends_ = false;
  ended_.clear();
}

void Ledger::begin_unplanned_step() {
  begin_step(0);
  notes_ends_ = true;
}

void Ledger::saved(std::int32_t lifetime, std::int64_t storage_bytes) {
  const auto number = static_cast<std::size_t>(lifetime);
  if (number >= lifetimes_.size()) {
    lifetimes_.resize(number + 1);
  }
  Lifetime& one = lifetimes_[number];
  ++living_;
  if (one.saves++ == 0) {
    one.nbytes = storage_bytes;
    one.is_followed = true;
    kept_bytes_ += storage_bytes;
  }
}

void Ledger::freed(std::int64_t step, std::int32_t lifetime) {
  --living_;
  if (step != step_) {
    return;
  }
  Lifetime& one = lifetimes_[static_cast<std::size_t>(lifetime)];
  if (--one.saves == 0) {
    kept_bytes_ -= one.nbytes;
    if (notes_ends_ && one.is_followed) {
      ended_.push_back(lifetime);
    }
  }
}

const KeptSave* Ledger::newest(std::int32_t lifetime) const {
  const KeptSave* save = last_;
  while (save != nullptr && (save->lifetime != lifetime || save->step != step_)) {
    save = save->earlier;
  }
  return save;
}

PyObject* Ledger::saves_of_lifetime(long lifetime) const {
  PyObject* found = PyList_New(0);
  for (KeptSave* save = first_; found != nullptr && save != nullptr; save = save->later) {
    if (save->lifetime == lifetime && save->step == step_ &&
        PyList_Append(found, reinterpret_cast<PyObject*>(save)) != 0) {
      Py_CLEAR(found);
    }
  }
  return found;
}

void Ledger::forget(std::int32_t lifetime) {
  ended_.erase(std::remove(ended_.begin(), ended_.end(), lifetime), ended_.end());
  lifetimes_[static_cast<std::size_t>(lifetime)].is_followed = false;
}

PyObject* Ledger::take_ended() {
  PyObject* found = PyList_New(0);
  for (const std::int32_t lifetime : ended_) {
    PyObject* boxed = found == nullptr ? nullptr : PyLong_FromLong(lifetime);
    if (boxed == nullptr || PyList_Append(found, boxed) != 0) {
      Py_CLEAR(found);
    }
    Py_XDECREF(boxed);
  }
  ended_.clear();
  return found;
}

void Ledger::link(KeptSave* save) {
  save->earlier = last_;
  save->later = nullptr;
  (last_ == nullptr ? first_ : last_->later) = save;
  last_ = save;
}

void Ledger::unlink(KeptSave* save) {
  (save->earlier == nullptr ? first_ : save->earlier->later) = save->later;
  (save->later == nullptr ? last_ : save->later->earlier) = save->earlier;
}

PyObject* Ledger::saves() const {
  PyObject* found = PyList_New(0);
  for (KeptSave* save = first_; found != nullptr && save != nullptr; save = save->later) {
    if (PyList_Append(found, reinterpret_cast<PyObject*>(save)) != 0) {
      Py_CLEAR(found);
    }
  }
  return found;
}

PyObject* Ledger::alive() const {
  PyObject* found = PyList_New(0);
  for (std::size_t number = 0; found != nullptr && number < lifetimes_.size(); ++number) {
    if (lifetimes_[number].saves <= 0) {
      continue;
    }
    PyObject* boxed = PyLong_FromSize_t(number);
    if (boxed == nullptr || PyList_Append(found, boxed) != 0) {
      Py_CLEAR(found);
    }
    Py_XDECREF(boxed);
  }
  return found;
}

}  // namespace vdnn::hooks
