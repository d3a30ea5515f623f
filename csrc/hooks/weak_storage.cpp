#include "hooks/weak_storage.h"

// Python.h comes first
#include <structmember.h>

#include <cstddef>

#include "hooks/script.h"

namespace vdnn::hooks {
namespace {

PyTypeObject* weak_type = nullptr;
PyObject *make_name = nullptr, *free_name = nullptr;

struct WeakStorage final {
  PyObject_HEAD PyObject* cdata;  // what torch's StorageWeakRef calls so
  PyObject* free;                 // torch's function that frees it
};

WeakStorage* weak_of(PyObject* self) {
  return reinterpret_cast<WeakStorage*>(self);
}

PyObject* make(PyTypeObject* type, PyObject* arguments, PyObject* keywords) {
  if (PyTuple_GET_SIZE(arguments) != 1 || (keywords != nullptr && PyDict_GET_SIZE(keywords) != 0)) {
    PyErr_SetString(PyExc_TypeError, "expected a storage");
    return nullptr;
  }
  PyObject* storage = PyTuple_GET_ITEM(arguments, 0);
  WeakStorage* weak = weak_of(type->tp_alloc(type, 0));  // zeroed
  if (weak == nullptr) {
    return nullptr;
  }
  weak->free = PyObject_GetAttr(reinterpret_cast<PyObject*>(Py_TYPE(storage)), free_name);
  weak->cdata = weak->free == nullptr ? nullptr : PyObject_CallMethodNoArgs(storage, make_name);
  if (weak->cdata == nullptr) {
    Py_DECREF(weak);
    return nullptr;
  }
  return reinterpret_cast<PyObject*>(weak);
}

void dealloc(PyObject* self) {
  WeakStorage* weak = weak_of(self);
  if (weak->cdata != nullptr) {
    PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
    PyErr_Fetch(&type, &value, &trace);
    if (!Reference::stolen(PyObject_CallOneArg(weak->free, weak->cdata))) {
      PyErr_WriteUnraisable(nullptr);
    }
    PyErr_Restore(type, value, trace);
  }
  Py_XDECREF(weak->cdata);
  Py_XDECREF(weak->free);
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyMemberDef members[] = {
    {"cdata", T_OBJECT_EX, offsetof(WeakStorage, cdata), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};
PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(&make)},
    {Py_tp_dealloc, reinterpret_cast<void*>(&dealloc)},
    {Py_tp_members, members},
    {0, nullptr},
};
PyType_Spec spec = {"vdnn._C.WeakStorage", sizeof(WeakStorage), 0, Py_TPFLAGS_DEFAULT, slots};

}  // namespace

PyObject* weakly(PyObject* storage) {
  return PyObject_CallOneArg(reinterpret_cast<PyObject*>(weak_type), storage);
}

PyObject* number_of_weak(PyObject* weak) {
  return Py_TYPE(weak) == weak_type ? weak_of(weak)->cdata : nullptr;
}

bool add_weak_storage(PyObject* module) {
  make_name = PyUnicode_InternFromString("_weak_ref");
  free_name = PyUnicode_InternFromString("_free_weak_ref");
  if (weak_type == nullptr) {
    weak_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  }
  return make_name != nullptr && free_name != nullptr && weak_type != nullptr &&
         PyObject_SetAttrString(module, "WeakStorage", reinterpret_cast<PyObject*>(weak_type)) == 0;
}

}  // namespace vdnn::hooks
