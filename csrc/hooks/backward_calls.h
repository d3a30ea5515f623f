// Takes a session's hooks off the thread while a backward runs that saves nothing.
//
// Autograd sets the thread's state anew around each node of a backward, and copies the saved-tensor hooks with it. Each
// copy takes the GIL, so hooks cost about as much there as a node of a small tensor, whatever they do. A graph that is
// already made does not need them: it holds its own.
//
// A backward may save all the same: a reentrant checkpoint's does, and that of a second derivative. So the hooks stay
// in a gate's first backward, and in all others if that one saved anything. While they are away, a thread that makes a
// node is noticed, and they stay in the next backward, to see if it saves.
//
// A backward that names its inputs goes through Python (backward_inputs.py); all others do not.
#pragma once

#include <Python.h>

#include <cstddef>

namespace vdnn::hooks {

struct Gate;

// What a gate knows of backwards.
struct BackwardSaves final {
  enum class Known : char { NotYet, None, Some };

  std::size_t packed;  // calls of the pack hook, on all threads
  int away;            // threads that run a backward without the hooks
  Known known;
  char made_nodes;  // a thread of the device did in such a backward
};

// Called in each use while the hooks are away from a thread.
void look_for_nodes(Gate* gate);

// Adds the type BackwardCalls and drop_hooks_away() to the module. Returns false with a Python error set.
bool add_backward_calls(PyObject* module);

}  // namespace vdnn::hooks
