// The state of a gate, which its hooks change and Python opens and closes.
#pragma once

#include <Python.h>

#include <array>
#include <cstddef>

#include "hooks/backward_calls.h"
#include "hooks/host_times.h"
#include "hooks/kept_save.h"
#include "hooks/mover.h"
#include "hooks/script.h"
#include "hooks/unplanned_saves.h"

namespace vdnn::hooks {

// What Python gives the gate, in the order of its arguments.
enum Part {
  kPack,  // the hooks of a step that is not settled
  kUnpack,
  kPlannedSave,  // (tensor, position): a save that Python handles in a settled step
  kPlannedUse,   // (packed, position): a use that Python handles
  kMoved,        // (position): the plan moves something after a hook that the gate served
  kDiscarded,    // a set: what Python discarded and a recompute will make
  kVersion,      // torch's descriptors
  kIsLeaf,
  kNbytes,
  kDtype,
  kDetach,
  kGraphTask,  // -1 outside of a backward
  kSettings,   // see torch_settings.h
  kGradFn,     // torch's descriptors
  kOutputNr,
  kMover,
  kUnplanned,  // keeps the saves of steps without a plan
  kParts,
};

struct Gate final {
  PyObject_HEAD std::array<PyObject*, kParts> parts;
  PyObject* lesson;        // which notes each hook of a step that is learned; or null
  PyObject* stack;         // the running modules of the thread that saves; null: the step does not follow them
  ScriptObject* followed;  // null: closed
  Ledger* ledger;
  Mover* mover;  // of its parts, as the next
  UnplannedSaves* unplanned;
  std::size_t position;
  Py_ssize_t noted_depth;  // so many modules have run since before the gate opened: see running_modules.cpp
  unsigned long save_thread;
  unsigned long use_thread;  // 0: not known yet
  BackwardSaves backward_saves;
  HostTimes host;
  char calls_python;  // the next point is one for Python
};

inline Gate* gate_of(PyObject* self) {
  return reinterpret_cast<Gate*>(self);
}

// The type of gates.
[[nodiscard]] PyTypeObject* gate_type();

// Tells Python of a point that the gate served. Returns false with a Python error set.
bool moved(const Gate* gate, std::size_t position);

// The hooks: tp_methods of the gate.
PyObject* pack(PyObject* self, PyObject* tensor);
PyObject* unpack(PyObject* self, PyObject* packed);

}  // namespace vdnn::hooks
