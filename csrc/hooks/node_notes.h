// Notes on autograd's nodes: which of their outputs are saved, and facts of the calls that made them.
//
// A node's `metadata` lives as long as the node itself, whatever happens to its Python wrapper. It must not own
// anything that is saved: a save is noted by a weak reference, a fact is a plain number.
// vdnn/runtime/recompute/node_notes.py says which facts there are.
#pragma once

#include <Python.h>

#include <cstdint>

namespace vdnn::hooks {

// Converts a number of Python, which may be null with an error set. Returns false with a Python error set.
bool number_of(PyObject* boxed, std::int64_t& number);

// Reads the sequence number of a node: the largest of all for a leaf's, which belongs to no call. Returns false with a
// Python error set.
bool sequence_number(PyObject* node, std::int64_t& number);

// Notes that `packed` holds this output of `node`. The note ends when `packed` is freed. Returns false with a Python
// error set.
bool note_saved(PyObject* node, PyObject* output_nr, PyObject* packed);

// Notes a fact of the call that made `node`. Returns false with a Python error set.
bool note_fact(PyObject* node, PyObject* name, PyObject* value);

// Adds note_saved(), noted_save(), note_fact(), current_form() and save_in_slot() to the module. Returns false with a
// Python error set.
bool add_node_notes(PyObject* module);

}  // namespace vdnn::hooks
