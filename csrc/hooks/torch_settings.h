// Reads torch's settings, and remembers under which settings operations ran.
//
// A program may change settings around a single operation, and a recipe may reach back over many. So the settings are
// read at saves and around modules, and noted with autograd's sequence number, for each thread. A save belongs to the
// node that was created last. The settings of a node without a save are known if the readings before and after it
// agree, and if they were read at the boundaries of module calls next to it (boundaries.h). The boundaries are not
// needed for an operation whose numbers are rounded once: no setting but that of denormals changes its result, and
// Python reads the settings at each change of that one.
//
// Python names the functions that read single settings: vdnn/runtime/recompute/backend_flags.py.
#pragma once

#include <Python.h>

namespace vdnn::hooks {

[[nodiscard]] bool is_torch_settings(PyObject* object);

// Reads the settings in the native hook at a save of this tensor, whose node is the last that was created on this
// thread, and the call of a norm (norm_calls.h). Returns false with a Python error set.
bool observe_at_save(PyObject* settings, PyObject* tensor);

// Reads the settings at another place. Returns false with a Python error set.
bool observe_settings(PyObject* settings);

// Adds the type TorchSettings and flushes_denormals() to the module. Returns false with a Python error set.
bool add_torch_settings(PyObject* module);

}  // namespace vdnn::hooks
