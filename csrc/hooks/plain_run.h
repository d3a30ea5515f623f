// Runs a function of Python while torch's modes are off: no graph, no autocast, no function modes.
#pragma once

#include <Python.h>

namespace vdnn::hooks {

// Adds the type PlainRun to the module. Returns false with a Python error set.
bool add_plain_run(PyObject* module);

}  // namespace vdnn::hooks
