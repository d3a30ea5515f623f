// The gate: the pack and unpack hooks of a session that follows plans.
//
// In a settled step it compares each save and use with the script of that step and serves what the plan keeps, without
// Python. It calls Python where the plan acts, where the step differs from its script, and in all other steps.
//
// Only the GIL protects it. detach() releases the GIL, so a hook changes the position before it calls that, and nothing
// after it.
#pragma once

#include <Python.h>

namespace vdnn::hooks {

// Adds the types Gate and Script to the module. Returns false with a Python error set.
bool add_gate(PyObject* module);

}  // namespace vdnn::hooks
