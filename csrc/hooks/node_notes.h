// Notes on autograd's nodes: which of their outputs are saved.
//
// A node's `metadata` lives as long as the node itself, whatever happens to its Python wrapper. It must not own
// anything that is saved: a save is noted by a weak reference.
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

// Adds note_saved(), noted_save(), current_form() and save_in_slot() to the module. Returns false with a
// Python error set.
bool add_node_notes(PyObject* module);

}  // namespace vdnn::hooks
