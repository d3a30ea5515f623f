#include "hooks/node_notes.h"

#include <limits>
#include <utility>

#include "hooks/kept_save.h"
#include "hooks/light_storage.h"
#include "hooks/script.h"

namespace vdnn::hooks {
namespace {

PyObject* metadata_name = nullptr;
PyObject* data_name = nullptr;
PyObject* hook_name = nullptr;
PyObject* sequence_name = nullptr;
PyObject* mark = nullptr;  // the first part of each key

// The notes of a node, and the key of one. Both are null with a Python error set.
struct Place final {
  Reference notes;
  Reference key;
};

Place place_of(PyObject* node, PyObject* what) {
  Reference notes = Reference::stolen(PyObject_GetAttr(node, metadata_name));
  if (notes && !PyDict_Check(notes.get())) {
    PyErr_SetString(PyExc_TypeError, "expected a dict as the metadata of a node");
    return {};
  }
  Reference key = notes ? Reference::stolen(PyTuple_Pack(2, mark, what)) : Reference();
  return key ? Place{std::move(notes), std::move(key)} : Place{};
}

// The packed view that has replaced a save of the native gate, if one has; else the save. Borrowed.
PyObject* form_of(PyObject* packed) {
  if (is_kept_save(packed)) {
    const auto* save = reinterpret_cast<KeptSave*>(packed);
    return save->ledger == nullptr ? save->tensor : packed;
  }
  if (is_light_save(packed)) {
    PyObject* view = reinterpret_cast<LightSave*>(packed)->full;
    return view == nullptr ? packed : view;
  }
  return packed;
}

// Functions of the module.

bool has_count(Py_ssize_t count, Py_ssize_t expected) {
  if (count != expected) {
    PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", expected, count);
  }
  return count == expected;
}

PyObject* note(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  return has_count(count, 3) && note_saved(arguments[0], arguments[1], arguments[2]) ? Py_NewRef(Py_None) : nullptr;
}

PyObject* noted_save(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  const Place place = has_count(count, 2) ? place_of(arguments[0], arguments[1]) : Place();
  if (!place.key) {
    return nullptr;
  }
  const Reference note(PyDict_GetItemWithError(place.notes.get(), place.key.get()));
  if (!note) {
    return PyErr_Occurred() == nullptr ? Py_NewRef(Py_None) : nullptr;
  }
  if (!PyTuple_CheckExact(note.get()) || PyTuple_GET_SIZE(note.get()) != 2) {
    PyErr_SetString(PyExc_TypeError, "expected a note of a save in the metadata of a node");
    return nullptr;
  }
  const Reference holder = Reference::stolen(PyObject_CallNoArgs(PyTuple_GET_ITEM(note.get(), 0)));
  if (!holder) {
    return nullptr;
  }
  PyObject* version = PyTuple_GET_ITEM(note.get(), 1);
  if (holder.get() == Py_None || version == Py_None) {
    return Py_NewRef(form_of(holder.get()));
  }
  return PyTuple_Pack(2, holder.get(), version);
}

PyObject* current_form(PyObject*, PyObject* packed) {
  return Py_NewRef(form_of(packed));
}

// What the object has under this name; None if it has nothing. Null with a Python error set.
Reference found_in(PyObject* object, PyObject* name) {
  Reference found = Reference::stolen(PyObject_GetAttr(object, name));
  if (!found && PyErr_ExceptionMatches(PyExc_AttributeError) != 0) {
    PyErr_Clear();
    return Reference(Py_None);
  }
  return found;
}

// (node, name of a raw slot, unpack hook): what our pack hook returned for it; None if it is empty, released, or packed
// by another hook.
PyObject* save_in_slot(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  const Reference raw = has_count(count, 3) ? found_in(arguments[0], arguments[1]) : Reference();
  if (!raw || raw.get() == Py_None) {
    return Py_XNewRef(raw.get());
  }
  const Reference data = Reference::stolen(PyObject_GetAttr(raw.get(), data_name));
  if (!data || data.get() == Py_None) {
    return Py_XNewRef(data.get());
  }
  const Reference hook = Reference::stolen(PyObject_GetAttr(raw.get(), hook_name));
  const int is_ours = hook ? PyObject_RichCompareBool(hook.get(), arguments[2], Py_EQ) : -1;
  if (is_ours < 0) {
    return nullptr;
  }
  return Py_NewRef(is_ours == 1 ? form_of(data.get()) : Py_None);
}

template <class Function>
PyCFunction as_method(Function* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef functions[] = {
    {"note_saved", as_method(&note), METH_FASTCALL, nullptr},
    {"noted_save", as_method(&noted_save), METH_FASTCALL, nullptr},
    {"current_form", current_form, METH_O, nullptr},
    {"save_in_slot", as_method(&save_in_slot), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

bool number_of(PyObject* boxed, std::int64_t& number) {
  number = boxed == nullptr ? -1 : PyLong_AsLongLong(boxed);
  return number != -1 || PyErr_Occurred() == nullptr;
}

bool sequence_number(PyObject* node, std::int64_t& number) {
  const Reference boxed = Reference::stolen(PyObject_CallMethodNoArgs(node, sequence_name));
  if (!boxed) {
    return false;
  }
  int overflow = 0;
  number = PyLong_AsLongLongAndOverflow(boxed.get(), &overflow);
  if (overflow > 0) {
    number = std::numeric_limits<std::int64_t>::max();
  }
  return number != -1 || PyErr_Occurred() == nullptr;
}

bool note_saved(PyObject* node, PyObject* output_nr, PyObject* packed) {
  PyObject *holder = packed, *version = Py_None;
  if (PyTuple_Check(packed)) {
    if (PyTuple_GET_SIZE(packed) != 2) {
      PyErr_SetString(PyExc_TypeError, "expected a tensor and its version");
      return false;
    }
    holder = PyTuple_GET_ITEM(packed, 0);
    version = PyTuple_GET_ITEM(packed, 1);
  }
  const Place place = place_of(node, output_nr);
  const Reference reference = place.key ? Reference::stolen(PyWeakref_NewRef(holder, nullptr)) : Reference();
  const Reference note = reference ? Reference::stolen(PyTuple_Pack(2, reference.get(), version)) : Reference();
  return note && PyDict_SetItem(place.notes.get(), place.key.get(), note.get()) == 0;
}

bool add_node_notes(PyObject* module) {
  metadata_name = PyUnicode_InternFromString("metadata");
  sequence_name = PyUnicode_InternFromString("_sequence_nr");
  mark = PyUnicode_InternFromString("vdnn");
  data_name = PyUnicode_InternFromString("data");
  hook_name = PyUnicode_InternFromString("unpack_hook");
  return metadata_name != nullptr && sequence_name != nullptr && mark != nullptr && data_name != nullptr &&
         hook_name != nullptr && PyModule_AddFunctions(module, functions) == 0;
}

}  // namespace vdnn::hooks
