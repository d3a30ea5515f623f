// Notes on autograd's nodes which of their outputs are saved.
//
// A node's `metadata` lives as long as the node itself, whatever happens to its Python wrapper. It must not own
// anything that is saved: a save is noted by a weak reference. vdnn/runtime/recompute/node_notes.py has the other
// notes.
#pragma once

#include <Python.h>

namespace vdnn::hooks {

// Notes that `packed` holds this output of `node`. The note ends when `packed` is freed. Returns false with a Python
// error set.
bool note_saved(PyObject* node, PyObject* output_nr, PyObject* packed);

// Adds note_saved(), noted_save(), current_form() and save_in_slot() to the module. Returns false with a Python error
// set.
bool add_node_notes(PyObject* module);

}  // namespace vdnn::hooks
