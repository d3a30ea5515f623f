// The arguments of norms that autograd's nodes do not save, read from the frame of the call.
//
// While torch packs what a norm saves, the innermost frame of Python is that of the function in torch.nn.functional
// that the program called, and its local variables are the arguments. They are noted with the number of the node that
// is being made, for each thread. Where another frame is the innermost, as that of a function with which the program
// has replaced one of torch's, nothing is noted, and that norm is not recomputed.
//
// Nodes of threads are numbered apart. So a call is that of a node only if the node has saved, as its input, a storage
// that was packed in the call.
//
// Python names the functions: vdnn/runtime/recompute/node_notes.py.
#pragma once

#include <Python.h>

#include <cstdint>

namespace vdnn::hooks {

// Called in a pack hook, with a tensor that the last node that was made on this thread saves: notes its call, if that
// is the call of a norm. `is_first`: the first of its saves that is noted. `in_python`: the innermost frame is the
// hook's. Returns false with a Python error set.
bool note_norm_save(std::int64_t node, PyObject* tensor, bool is_first, bool in_python);

// Adds watch_norm_calls() and fact_of_norm() to the module. Returns false with a Python error set.
bool add_norm_calls(PyObject* module);

}  // namespace vdnn::hooks
