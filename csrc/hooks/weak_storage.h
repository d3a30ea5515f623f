// A weak reference to a storage of torch, which keeps its native object's address from being used again. The same as
// torch's StorageWeakRef, which is a class of Python and takes ten times as long: a type for Python.
#pragma once

#include <Python.h>

namespace vdnn::hooks {

// A reference to this storage. Null with a Python error set.
[[nodiscard]] PyObject* weakly(PyObject* storage);

// The number by which torch knows the storage that a WeakStorage refers to, borrowed. Null, without an error, if it is
// another object.
[[nodiscard]] PyObject* number_of_weak(PyObject* weak);

// Adds the type to the module. Returns false with a Python error set.
bool add_weak_storage(PyObject* module);

}  // namespace vdnn::hooks
