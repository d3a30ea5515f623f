#include "hooks/usable_saves.h"

#include <array>
#include <cstddef>

#include "hooks/kept_save.h"
#include "hooks/light_storage.h"
#include "hooks/mover_state.h"

namespace vdnn::hooks {
namespace {

// What Python gives, in the order of the arguments of the type.
enum Part {
  kClasses,  // a tuple of classes of tensors whose memory is plain, but for the facts below
  kStrided,
  kVersion,  // torch's descriptors
  kLayout,
  kIsQuantized,
  kIsNested,
  kIsMeta,
  kIsZero,  // functions of a tensor
  kIsFunctional,
  kIsWrapped,
  kStorage,
  kOtherwise,  // (save, address): tells it of all other saves
  kParts,
};

struct UsableSaves final {
  PyObject_HEAD std::array<PyObject*, kParts> parts;
};

PyObject* address_name = nullptr;  // of a storage's native object, in the Python object

UsableSaves* usable_of(PyObject* self) {
  return reinterpret_cast<UsableSaves*>(self);
}

bool is_one_of(PyObject* classes, PyTypeObject* type) {
  for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(classes); ++index) {
    if (PyTuple_GET_ITEM(classes, index) == reinterpret_cast<PyObject*>(type)) {
      return true;
    }
  }
  return false;
}

// True if none of torch's functions says that the tensor's memory is not plain. False, too, if one raises.
bool has_plain_memory(const UsableSaves* usable, PyObject* tensor) {
  const auto& parts = usable->parts;
  const Reference layout = Reference::stolen(get(parts[kLayout], tensor));
  if (layout.get() != parts[kStrided]) {
    return false;
  }
  for (const Part part : {kIsQuantized, kIsNested, kIsMeta}) {
    if (!is_false(Reference::stolen(get(parts[part], tensor)))) {
      return false;
    }
  }
  for (const Part part : {kIsZero, kIsFunctional, kIsWrapped}) {
    if (!is_false(Reference::stolen(PyObject_CallOneArg(parts[part], tensor)))) {
      return false;
    }
  }
  return true;
}

// 1: yes, 0: no, -1 with a Python error set.
int is_elsewhere(PyObject* address, PyObject* avoided) {
  return PyObject_RichCompareBool(address, avoided, Py_NE);
}

// The same, of a save that stays on the device. The class of its tensor is plain.
int is_kept_usable(const UsableSaves* usable, PyObject* tensor, std::int64_t version, PyObject* avoided) {
  std::int64_t now = 0;
  if (!as_number(Reference::stolen(get(usable->parts[kVersion], tensor)), now)) {
    return -1;
  }
  if (now != version || !has_plain_memory(usable, tensor)) {
    return PyErr_Occurred() == nullptr ? 0 : -1;
  }
  const Reference storage = Reference::stolen(PyObject_CallOneArg(usable->parts[kStorage], tensor));
  const Reference address = storage ? Reference::stolen(PyObject_GetAttr(storage.get(), address_name)) : Reference();
  return address ? is_elsewhere(address.get(), avoided) : -1;
}

// The same, of a save that the gate moves.
int is_light_usable(const LightSave* save, PyObject* avoided) {
  const LightStorage* storage = save->storage;
  if (storage->is_handed_over || storage->source == nullptr ||
      version_of(storage->mover, storage->witness.get()) != storage->version) {
    return 0;
  }
  return is_elsewhere(storage->source->address, avoided);
}

int is_usable(const UsableSaves* usable, PyObject* packed, PyObject* avoided) {
  if (is_light_save(packed)) {
    return is_light_usable(reinterpret_cast<LightSave*>(packed), avoided);
  }
  PyObject* tensor = nullptr;
  std::int64_t version = 0;
  if (is_kept_save(packed)) {
    tensor = reinterpret_cast<KeptSave*>(packed)->tensor;
    version = reinterpret_cast<KeptSave*>(packed)->version;
  } else if (PyTuple_CheckExact(packed) && PyTuple_GET_SIZE(packed) == 2 &&
             PyLong_CheckExact(PyTuple_GET_ITEM(packed, 1))) {
    tensor = PyTuple_GET_ITEM(packed, 0);
    version = PyLong_AsLongLong(PyTuple_GET_ITEM(packed, 1));
    if (version == -1 && PyErr_Occurred() != nullptr) {
      return -1;
    }
  }
  if (tensor != nullptr && is_one_of(usable->parts[kClasses], Py_TYPE(tensor))) {
    const Reference held(packed);  // torch's functions may run any code
    return is_kept_usable(usable, tensor, version, avoided);
  }
  const Reference answer =
      Reference::stolen(PyObject_CallFunctionObjArgs(usable->parts[kOtherwise], packed, avoided, nullptr));
  return answer ? PyObject_IsTrue(answer.get()) : -1;
}

// (save, the native address of the storage that is to be recomputed)
PyObject* test(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 2) {
    PyErr_Format(PyExc_TypeError, "expected a save and an address, got %zd arguments", count);
    return nullptr;
  }
  const int answer = is_usable(usable_of(self), arguments[0], arguments[1]);
  return answer < 0 ? nullptr : PyBool_FromLong(answer);
}

PyObject* make(PyTypeObject* type, PyObject* arguments, PyObject* keywords) {
  if (PyTuple_GET_SIZE(arguments) != kParts || (keywords != nullptr && PyDict_GET_SIZE(keywords) != 0) ||
      !PyTuple_Check(PyTuple_GET_ITEM(arguments, kClasses))) {
    PyErr_Format(PyExc_TypeError, "expected the %d parts of a test of saves", static_cast<int>(kParts));
    return nullptr;
  }
  for (const Part part : {kVersion, kLayout, kIsQuantized, kIsNested, kIsMeta}) {
    if (Py_TYPE(PyTuple_GET_ITEM(arguments, part))->tp_descr_get == nullptr) {
      PyErr_SetString(PyExc_TypeError, "expected torch's descriptors among the parts of a test of saves");
      return nullptr;
    }
  }
  UsableSaves* made = usable_of(type->tp_alloc(type, 0));  // zeroed
  if (made == nullptr) {
    return nullptr;
  }
  for (int part = 0; part < kParts; ++part) {
    made->parts[static_cast<std::size_t>(part)] = Py_NewRef(PyTuple_GET_ITEM(arguments, part));
  }
  return reinterpret_cast<PyObject*>(made);
}

// It is in no cycle that could become garbage: what it has is torch's, or a module's.
void dealloc(PyObject* self) {
  for (PyObject* part : usable_of(self)->parts) {
    Py_XDECREF(part);
  }
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyMethodDef methods[] = {
    {"test", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&test)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(&make)},
    {Py_tp_dealloc, reinterpret_cast<void*>(&dealloc)},
    {Py_tp_methods, methods},
    {0, nullptr},
};
PyType_Spec spec = {"vdnn._C.UsableSaves", sizeof(UsableSaves), 0, Py_TPFLAGS_DEFAULT, slots};

}  // namespace

bool add_usable_saves(PyObject* module) {
  address_name = PyUnicode_InternFromString("_cdata");
  if (address_name == nullptr) {
    return false;
  }
  const Reference type = Reference::stolen(PyType_FromSpec(&spec));
  return type && PyObject_SetAttrString(module, "UsableSaves", type.get()) == 0;
}

}  // namespace vdnn::hooks
