// Norm modules whose call can be read from their attributes: exact classes of torch, where nothing is patched and
// nothing sees or changes their arguments on the way to torch's operation.
//
// A norm's node does not save its eps, or whether it has a bias. Where a call of such a module begins and where it
// ends, its attributes are read; if they agree, they are noted on the node. Between the first reading and torch's
// operation only the module's own forward runs, and that is torch's. vdnn/runtime/recompute/norm_calls.py watches the
// calls of all other norms.
#pragma once

#include <Python.h>

#include <cstdint>

namespace vdnn::hooks {

[[nodiscard]] bool is_plain_norms(PyObject* object);

// No call runs on this thread.
void forget_norm();

// A call of `module` begins, and the next node will have the number `node`. Returns 1 if the module is such a norm, 0
// if not, -1 with a Python error set.
int begin_norm(PyObject* norms, PyObject* module, PyObject* arguments, std::int64_t node);

// True if that was the last call that began on this thread.
[[nodiscard]] bool is_norm_running(PyObject* module);

// That call ends, and the next node will have the number `node`. Returns false with a Python error set.
bool end_norm(PyObject* norms, PyObject* module, PyObject* output, std::int64_t node);

// Adds the type PlainNorms, norm_was_made() and maker_of_norm() to the module. Returns false with a Python error set.
bool add_plain_norms(PyObject* module);

}  // namespace vdnn::hooks
