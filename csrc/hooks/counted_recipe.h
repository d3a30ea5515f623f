// A recipe whose recompute counts as one more use of each operand, until this is freed: a type for Python.
//
// Python makes one for each storage that it discards, and so does the gate.
#pragma once

#include <Python.h>

namespace vdnn::hooks {

// Adds the type to the module. Returns false with a Python error set.
bool add_counted_recipe(PyObject* module);

}  // namespace vdnn::hooks
