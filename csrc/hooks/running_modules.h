// The calls of modules: what torch's global module hooks do, on all threads.
//
// It keeps the stack of the modules that run, and the storages of their parameters and buffers. A session that
// recomputes also notes facts at the boundaries of calls: settings of torch, arguments of norms; Python notes versions
// of leaves, and arguments of norms that are not plain. While the gate serves a settled step it notes them only around
// modules that a recipe needs them of.
#pragma once

#include <Python.h>

namespace vdnn::hooks {

// Adds the type RunningModules and the functions that ask for boundaries. Returns false with a Python error set.
bool add_running_modules(PyObject* module);

}  // namespace vdnn::hooks
