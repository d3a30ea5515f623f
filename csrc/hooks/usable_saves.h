// Tells whether a recipe can read a save: it is not stale, and not in the storage that is to be recomputed. A type for
// Python, which asks for each operand in each step.
#pragma once

#include <Python.h>

namespace vdnn::hooks {

// Adds the type to the module. Returns false with a Python error set.
bool add_usable_saves(PyObject* module);

}  // namespace vdnn::hooks
