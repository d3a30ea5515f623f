// Keeps the saves of a step without a plan: nothing of it moves until a budget makes it.
//
// A save becomes a KeptSave, as in a settled step, without a script that says what comes next. Python counts each save
// and each use, and takes over any storage that it has to manage: one that a guard evicts, or one that is saved again
// in a way that is not plain. All that is not a plain tensor with all bytes of its storage is Python's from its save
// on.
#pragma once

#include <Python.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "hooks/kept_save.h"
#include "hooks/script.h"

namespace vdnn::hooks {

struct Gate;

// What Python gives, in the order of its arguments.
enum UnplannedPart {
  kSaved,        // (save, tensor, storage, nbytes, is new): counts a save; False if Python has to handle it
  kUsed,         // (save): counts a use
  kTensorClass,  // torch.Tensor
  kLayout,       // torch's descriptors
  kIsQuantized,
  kIsNested,
  kIsZero,
  kStrided,
  kWeakHandle,  // of a storage: while it exists, no other storage has its address
  kFreeHandle,
  kAlone,  // a tensor whose storage nobody else holds
  kUnplannedParts,
};

// A storage of which this keeps saves.
struct KeptStorage final {
  std::int32_t lifetime;
  std::int64_t version;
  Reference address;  // of its native object
  Reference handle;   // a weak one
  Reference dtype;
};

struct UnplannedState final {
  std::vector<KeptStorage> storages;                           // by lifetime, as far as they are kept here
  std::unordered_map<std::uintptr_t, std::size_t> by_address;  // places in `storages`
  std::vector<std::size_t> held;                               // that others may hold
  Reference step;                                              // the step as Python knows it
  Reference device;
  std::int64_t least_bytes = 0;  // smaller storages are Python's
  // What holds a storage of which a tensor is kept, besides that tensor. Negative: not known yet.
  std::int64_t others_native = -1;
  std::int64_t others_python = -1;
};

struct UnplannedSaves final {
  PyObject_HEAD std::array<PyObject*, kUnplannedParts> parts;
  UnplannedState* state;
  Gate* gate;            // which owns this; null before and after
  unsigned long thread;  // which saves
  bool is_open;
};

// The packed form of a save; null without an error if Python has to handle it.
PyObject* keep_unplanned(Gate* gate, PyObject* tensor);
// The tensor of a use of a save of the step that runs; null without an error if Python has to handle it.
PyObject* use_unplanned(Gate* gate, KeptSave* save);

[[nodiscard]] PyTypeObject* unplanned_saves_type();
// Adds the type to the module. Returns false with a Python error set.
bool add_unplanned_saves(PyObject* module);

}  // namespace vdnn::hooks
