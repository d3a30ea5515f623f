#include "hooks/torch_settings.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "hooks/boundaries.h"
#include "hooks/node_notes.h"
#include "hooks/norm_calls.h"
#include "hooks/script.h"

namespace vdnn::hooks {
namespace {

// A function that reads one setting. If it raises RuntimeError, the setting has the value `otherwise`, unless that is
// null.
struct Getter final {
  Reference read;
  Reference otherwise;
};

struct TorchSettings final {
  PyObject_HEAD std::vector<Getter>* getters;
  PyObject* node_number;  // () -> the sequence number of the next node
  PyObject* last;         // what the last reading of any thread found; or null
};

// Nodes from `begin` on ran under `settings`. Nodes from `unsure_from` to `begin` ran under these or the previous.
struct Epoch final {
  std::int64_t unsure_from = 0;
  std::int64_t begin = 0;
  Reference settings;
};

constexpr std::int64_t kEpochs = 64;      // that a thread remembers
constexpr std::int64_t kNodes = 1 << 13;  // with a save, that a thread remembers
constexpr std::int64_t kAmbiguous = -1;

struct SavedNode final {
  std::int64_t number = -1;
  std::int64_t epoch = kAmbiguous;
};

// What is enough to know the settings of a node that saved nothing itself.
enum class Proof : std::uint8_t {
  AtSave,           // nothing
  AtBoundaries,     // readings at the boundaries of module calls next to it, which agree
  BetweenReadings,  // the readings before and after it, wherever they were, if they agree
};

// The observations of one thread.
class Observations final {
 public:
  // Of the calling thread. Null with a Python error set. Python drops them with its state of the thread.
  static Observations* here(PyObject* settings);

  // Each returns false with a Python error set.
  bool observe(TorchSettings* settings);
  // The same at a save of this tensor. `in_python`: the innermost frame is the hook's.
  bool observe_save(TorchSettings* settings, PyObject* tensor, bool in_python);
  // The settings under which the operation of this node ran, as a borrowed reference; null if they are not known.
  [[nodiscard]] PyObject* of(std::int64_t node, Proof proof) const;
  [[nodiscard]] bool saw_save_of(std::int64_t node) const { return slot(node).number == node; }

 private:
  [[nodiscard]] const SavedNode& slot(std::int64_t node) const {
    return saved_[static_cast<std::size_t>(node & (kNodes - 1))];
  }
  [[nodiscard]] const Epoch& epoch(std::int64_t number) const {
    return epochs_[static_cast<std::size_t>(number % kEpochs)];
  }
  [[nodiscard]] bool remembers(std::int64_t number) const { return number >= 0 && number > newest_ - kEpochs; }
  bool observe_at(TorchSettings* settings, std::int64_t now);
  void note_save(std::int64_t node);

  Reference settings_;  // of the newest epoch; null before the first
  std::int64_t last_ = 0;
  std::int64_t saved_at_ = 0;  // the last reading at a save
  std::int64_t newest_ = -1;   // the number of the newest epoch
  std::array<Epoch, kEpochs> epochs_;
  std::array<SavedNode, kNodes> saved_;
};

PyTypeObject* settings_type = nullptr;
constexpr const char* kObservations = "vdnn.observations";

TorchSettings* settings_of(PyObject* self) {
  return reinterpret_cast<TorchSettings*>(self);
}

// Reading.

// True if a list has the values of a tuple, -1 with a Python error set.
int has_values(PyObject* list, PyObject* values) {
  if (!PyTuple_CheckExact(values) || PyTuple_GET_SIZE(values) != PyList_GET_SIZE(list)) {
    return 0;
  }
  for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(values) && index < PyList_GET_SIZE(list); ++index) {
    const Reference value(PyList_GET_ITEM(list, index));
    const int is_equal = PyObject_RichCompareBool(value.get(), PyTuple_GET_ITEM(values, index), Py_EQ);
    if (is_equal <= 0) {
      return is_equal;
    }
  }
  return 1;
}

// The value of a setting: `before` itself if that is equal. Null with a Python error set.
Reference value_of(const Getter& getter, PyObject* before) {
  Reference value = Reference::stolen(PyObject_CallNoArgs(getter.read.get()));
  if (!value) {
    if (!getter.otherwise || PyErr_ExceptionMatches(PyExc_RuntimeError) == 0) {
      return {};
    }
    PyErr_Clear();
    value = Reference(getter.otherwise.get());
  }
  if (before == value.get()) {
    return value;
  }
  const bool is_list = PyList_CheckExact(value.get());
  if (before != nullptr) {
    const int is_equal =
        is_list ? has_values(value.get(), before) : PyObject_RichCompareBool(value.get(), before, Py_EQ);
    if (is_equal != 0) {
      return is_equal < 0 ? Reference() : Reference(before);
    }
  }
  return is_list ? Reference::stolen(PyList_AsTuple(value.get())) : std::move(value);
}

// All settings, as a tuple: that of the last reading if none has changed. Null with a Python error set.
Reference read(TorchSettings* settings) {
  const auto size = static_cast<Py_ssize_t>(settings->getters->size());
  const Reference before(settings->last);
  Reference made;  // null while all are as before
  for (Py_ssize_t index = 0; index < size; ++index) {
    PyObject* earlier = before ? PyTuple_GET_ITEM(before.get(), index) : nullptr;
    Reference value = value_of((*settings->getters)[static_cast<std::size_t>(index)], earlier);
    if (!value) {
      return {};
    }
    if (!made && value.get() == earlier) {
      continue;
    }
    if (!made) {  // those ahead of the first that differs are as before
      made = Reference::stolen(PyTuple_New(size));
      if (!made) {
        return {};
      }
      for (Py_ssize_t same = 0; same < index; ++same) {
        PyTuple_SET_ITEM(made.get(), same, Py_NewRef(PyTuple_GET_ITEM(before.get(), same)));
      }
    }
    PyTuple_SET_ITEM(made.get(), index, value.release());
  }
  if (!made) {
    return before ? Reference(before.get()) : Reference::stolen(PyTuple_New(0));
  }
  Py_XSETREF(settings->last, Py_NewRef(made.get()));
  return made;
}

// Remembering.

void forget(PyObject* capsule) {
  delete static_cast<Observations*>(PyCapsule_GetPointer(capsule, kObservations));
}

Observations* Observations::here(PyObject* settings) {
  PyObject* of_thread = PyThreadState_GetDict();  // borrowed
  if (of_thread == nullptr) {
    PyErr_SetString(PyExc_RuntimeError, "expected a thread that Python knows");
    return nullptr;
  }
  PyObject* known = PyDict_GetItemWithError(of_thread, settings);
  if (known != nullptr) {
    return static_cast<Observations*>(PyCapsule_GetPointer(known, kObservations));
  }
  if (PyErr_Occurred() != nullptr) {
    return nullptr;
  }
  auto made = std::make_unique<Observations>();
  const Reference capsule = Reference::stolen(PyCapsule_New(made.get(), kObservations, forget));
  if (!capsule) {
    return nullptr;
  }
  Observations* found = made.release();  // the capsule has it
  return PyDict_SetItem(of_thread, settings, capsule.get()) == 0 ? found : nullptr;
}

// The number of the next node on this thread. Returns false with a Python error set.
bool next_node(const TorchSettings* settings, std::int64_t& node) {
  const Reference boxed = Reference::stolen(PyObject_CallNoArgs(settings->node_number));
  return number_of(boxed.get(), node);
}

bool Observations::observe(TorchSettings* settings) {
  std::int64_t now = 0;
  return next_node(settings, now) && observe_at(settings, now);
}

bool Observations::observe_save(TorchSettings* settings, PyObject* tensor, bool in_python) {
  std::int64_t now = 0;
  if (!next_node(settings, now)) {
    return false;
  }
  const bool is_known = now == saved_at_ && now == last_;  // another save of the same node, whose operation still runs
  if (now != 0 && !note_norm_save(now - 1, tensor, !is_known, in_python)) {
    return false;
  }
  if (is_known) {
    return true;
  }
  saved_at_ = now;
  if (!observe_at(settings, now)) {
    return false;
  }
  if (now != 0) {
    note_save(now - 1);
  }
  return true;
}

bool Observations::observe_at(TorchSettings* settings, std::int64_t now) {
  Reference found = read(settings);
  if (!found) {
    return false;
  }
  if (found.get() != settings_.get()) {
    const int is_equal = settings_ ? PyObject_RichCompareBool(found.get(), settings_.get(), Py_EQ) : 0;
    if (is_equal < 0) {
      return false;
    }
    if (is_equal == 0) {
      ++newest_;
      Epoch& begun = epochs_[static_cast<std::size_t>(newest_ % kEpochs)];
      begun.unsure_from = last_;
      begun.begin = now;
      begun.settings = Reference(found.get());
      settings_ = std::move(found);
    }
  }
  last_ = now;
  Boundaries::here().read(now);
  return true;
}

void Observations::note_save(std::int64_t node) {
  SavedNode& saved = saved_[static_cast<std::size_t>(node & (kNodes - 1))];
  if (saved.number != node) {
    saved = {node, newest_};
  } else if (saved.epoch != newest_) {
    saved.epoch = kAmbiguous;
  }
}

PyObject* Observations::of(std::int64_t node, Proof proof) const {
  const SavedNode& saved = slot(node);
  if (saved.number == node) {
    return remembers(saved.epoch) ? epoch(saved.epoch).settings.get() : nullptr;
  }
  if (proof == Proof::AtSave || (proof == Proof::AtBoundaries && !Boundaries::here().were_read_around(node))) {
    return nullptr;
  }
  std::int64_t unsure_from = last_;
  for (std::int64_t number = newest_; remembers(number); --number) {
    const Epoch& one = epoch(number);
    if (node >= unsure_from) {
      return nullptr;
    }
    if (node >= one.begin) {
      return one.settings.get();
    }
    unsure_from = one.unsure_from;
  }
  return nullptr;
}

// The methods.

PyObject* settings_under(PyObject* self, PyObject* node, Proof proof) {
  const Observations* here = Observations::here(self);
  std::int64_t number = 0;
  if (here == nullptr || !sequence_number(node, number)) {
    return nullptr;
  }
  PyObject* found = here->of(number, proof);
  return Py_NewRef(found == nullptr ? Py_None : found);
}

PyObject* read_now(PyObject* self, PyObject*) {
  return read(settings_of(self)).release();
}
PyObject* observe_now(PyObject* self, PyObject*) {
  return observe_settings(self) ? Py_NewRef(Py_None) : nullptr;
}
PyObject* observe_save(PyObject* self, PyObject* tensor) {
  Observations* here = Observations::here(self);
  return here != nullptr && here->observe_save(settings_of(self), tensor, true) ? Py_NewRef(Py_None) : nullptr;
}
PyObject* of_node(PyObject* self, PyObject* node) {
  return settings_under(self, node, Proof::AtBoundaries);
}
PyObject* of_saving_node(PyObject* self, PyObject* node) {
  return settings_under(self, node, Proof::AtSave);
}
PyObject* of_rounding_node(PyObject* self, PyObject* node) {
  return settings_under(self, node, Proof::BetweenReadings);
}

PyObject* were_observed_at_save(PyObject* self, PyObject* boxed) {
  const Observations* here = Observations::here(self);
  std::int64_t number = 0;
  if (here == nullptr || !number_of(boxed, number)) {
    return nullptr;
  }
  return PyBool_FromLong(here->saw_save_of(number));
}

// Torch has no getter. The CPU answers: the smallest denormal is 0 for it if it flushes.
PyObject* flushes_denormals(PyObject*, PyObject*) {
  const volatile double smallest = std::numeric_limits<double>::denorm_min(), one = 1.0;
  const volatile double product = smallest * one;
  return PyBool_FromLong(product == 0.0);
}

// The type.

PyObject* make_settings(PyTypeObject* type, PyObject* arguments, PyObject* keywords) {
  PyObject *getters = nullptr, *node_number = nullptr;
  if ((keywords != nullptr && PyDict_GET_SIZE(keywords) != 0) ||
      !PyArg_ParseTuple(arguments, "O!O", &PyTuple_Type, &getters, &node_number)) {
    if (PyErr_Occurred() == nullptr) {
      PyErr_SetString(PyExc_TypeError, "expected a tuple of getters and a function");
    }
    return nullptr;
  }
  auto found = std::make_unique<std::vector<Getter>>();
  for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(getters); ++index) {
    PyObject* one = PyTuple_GET_ITEM(getters, index);
    if (!PyTuple_CheckExact(one)) {
      found->push_back({Reference(one), Reference()});
    } else if (PyTuple_GET_SIZE(one) == 2) {
      found->push_back({Reference(PyTuple_GET_ITEM(one, 0)), Reference(PyTuple_GET_ITEM(one, 1))});
    } else {
      PyErr_SetString(PyExc_TypeError, "expected a getter, or one with its value where it raises RuntimeError");
      return nullptr;
    }
  }
  TorchSettings* settings = settings_of(type->tp_alloc(type, 0));  // zeroed
  if (settings == nullptr) {
    return nullptr;
  }
  settings->getters = found.release();
  settings->node_number = Py_NewRef(node_number);
  return reinterpret_cast<PyObject*>(settings);
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  const TorchSettings* settings = settings_of(self);
  Py_VISIT(Py_TYPE(self));
  for (const Getter& one : *settings->getters) {
    Py_VISIT(one.read.get());
    Py_VISIT(one.otherwise.get());
  }
  Py_VISIT(settings->node_number);
  Py_VISIT(settings->last);
  return 0;
}

int clear(PyObject* self) {
  TorchSettings* settings = settings_of(self);
  settings->getters->clear();
  Py_CLEAR(settings->node_number);
  Py_CLEAR(settings->last);
  return 0;
}

void dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  clear(self);
  delete settings_of(self)->getters;
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyMethodDef methods[] = {
    {"read", read_now, METH_NOARGS, nullptr},
    {"observe", observe_now, METH_NOARGS, nullptr},
    {"observe_at_save", observe_save, METH_O, nullptr},
    {"of", of_node, METH_O, nullptr},
    {"at_save_of", of_saving_node, METH_O, nullptr},
    {"between_readings_of", of_rounding_node, METH_O, nullptr},
    {"were_observed_at_save", were_observed_at_save, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(&make_settings)},
    {Py_tp_dealloc, reinterpret_cast<void*>(&dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(&traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(&clear)},
    {Py_tp_methods, methods},
    {0, nullptr},
};

PyType_Spec spec = {"vdnn._C.TorchSettings", sizeof(TorchSettings), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};

PyMethodDef functions[] = {
    {"flushes_denormals", flushes_denormals, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

bool is_torch_settings(PyObject* object) {
  return Py_TYPE(object) == settings_type;
}

bool observe_at_save(PyObject* settings, PyObject* tensor) {
  Observations* here = Observations::here(settings);
  return here != nullptr && here->observe_save(settings_of(settings), tensor, false);
}

bool observe_settings(PyObject* settings) {
  Observations* here = Observations::here(settings);
  return here != nullptr && here->observe(settings_of(settings));
}

bool add_torch_settings(PyObject* module) {
  if (settings_type == nullptr) {
    settings_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  }
  return settings_type != nullptr &&
         PyObject_SetAttrString(module, "TorchSettings", reinterpret_cast<PyObject*>(settings_type)) == 0 &&
         PyModule_AddFunctions(module, functions) == 0;
}

}  // namespace vdnn::hooks
