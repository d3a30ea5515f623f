// Moves storages for the gate: copies them out, releases and reloads them at the points of a plan, without Python.
// Those that the plan recomputes it discards, and Python finds and follows their recipes.
//
// A hook that moves anything holds the packer's lock, as Python's hooks do, because calls of the queue release the GIL.
// Whatever it cannot do, or does not expect, it leaves to Python: it hands the storage over.
#pragma once

#include <Python.h>

#include <array>
#include <cstddef>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "hooks/light_storage.h"

namespace vdnn::hooks {

// What Python gives the mover, in the order of its arguments.
enum MoverPart {
  kAcquire,  // the packer's lock
  kRelease,
  kHandOver,       // makes a full managed storage of a light one
  kMakeSource,     // makes a full source of a light one
  kHeld,           // counts a storage that is released while others hold it, and refers to it weakly
  kMove,           // (lifetime, is_reload): issues a move of a storage that was handed over
  kDiscard,        // (tensor, save, position): the recipe of a storage that is to be discarded; None if Python does it
  kRestore,        // (save): recomputes what was discarded, if nothing is wrong
  kExemptions,     // says in `was_paused` if any thread was ever paused
  kParameters,     // the native addresses of parameters
  kMarked,         // the native addresses of tensors that are marked
  kMarkedModules,  // a set
  kLatest,         // a dict with the native addresses of storages that Python manages
  kOverwrites,     // a dict: does the node of this type write to what it unpacks?
  kCurrentNode,
  kIsGradEnabled,
  kTransformLevel,
  kNumModes,
  kIsTraced,
  kIsCapturing,  // or None
  kShape,        // torch's descriptors
  kStride,
  kOffset,
  kDevice,
  kNode,
  kBase,
  kData,
  kIsNeg,
  kAddress,
  kStorage,
  kAsStrided,
  kUseCount,
  kSetVersions,
  kFromWeak,  // the storage of a weak reference, or None
  kEmptyStrided,
  kVersionOf,
  kDetachOf,
  kRequiresGrad,
  kSequenceNr,  // autograd's, of this thread
  kKeywords,    // the names of the last arguments of kEmptyStrided
  kMoverParts,
};

// What is counted in native code until the gate closes.
struct Counts final {
  std::int64_t storages = 0;
  std::int64_t storage_bytes = 0;
  std::int64_t shared_saves = 0;
  std::int64_t uses = 0;
  std::int64_t demand_reloads = 0;
  std::int64_t prefetched_reloads = 0;
  std::int64_t reloaded_bytes = 0;
  std::int64_t freed_bytes = 0;
  std::int64_t used_in_place = 0;
  std::int64_t used_recomputed = 0;
  std::int64_t discarded = 0;
  std::int64_t discarded_bytes = 0;
  std::int64_t recomputes = 0;
};

// The transport of the step that runs.
struct Transfer final {
  std::shared_ptr<TransferQueue> queue;
  std::shared_ptr<Device> device;
  Stream stream;
  Reference python_stream;    // the same
  Reference current_stream;   // a function that names the stream of this thread; or None
  Reference expected_stream;  // what it returned when the step began
  Reference streams;          // a dict: the streams that hooks have run on
  Address alignment = 1;
  bool is_checked = false;
  bool notes_releases = false;
};

struct MoverState final {
  Transfer transfer;
  Counts counts;
  std::unordered_map<std::uintptr_t, LightStorage*> by_address;  // while they hold their storage
  std::vector<LightStorage*> by_lifetime;
  std::unordered_set<LightSource*> ownerless;                   // their copies are in flight
  std::vector<std::pair<LightStorage*, std::int64_t>> waiting;  // for their operation, with its sequence number
  std::vector<char> is_in_python;                               // by lifetime
  std::int64_t discarded = 0;                                   // light storages that are alive
};

struct Mover final {
  PyObject_HEAD std::array<PyObject*, kMoverParts> parts;
  MoverState* state;
  bool is_open;
};

struct Gate;

// What torch's descriptor says of an object: a new reference.
inline PyObject* get(PyObject* descriptor, PyObject* of) {
  return Py_TYPE(descriptor)->tp_descr_get(descriptor, of, reinterpret_cast<PyObject*>(Py_TYPE(of)));
}

// A packed form for a save that is as in the script; null without an error if Python has to handle it.
PyObject* move_save(Gate* gate, Mover* mover, const Event& event, std::size_t position, PyObject* tensor);
// The tensor of a use; null without an error if Python has to handle it.
PyObject* move_use(Gate* gate, Mover* mover, std::size_t position, LightSave* save);
// Issues the moves of this event that are the mover's. Returns false with a Python error set.
bool make_moves(Mover* mover, const Event& event, bool reloads);
// True if a move of this event is Python's.
[[nodiscard]] bool has_moves_for_python(const Mover* mover, const Event& event);

// True if copies wait for their operation.
inline bool has_waiting(const Mover* mover) {
  return !mover->state->waiting.empty();
}
// True if the code that unpacks is known to only read.
[[nodiscard]] bool only_reads(const Mover* mover);
// Issues the copies of this thread whose operation is over. Returns false with a Python error set.
bool submit_complete(const Gate* gate);

// Python continues with the storage. Returns false with a Python error set.
bool hand_over(LightStorage* storage);
bool hand_over_all(Mover* mover);
// Python has a full source of it from now on. Returns false with a Python error set.
bool hand_over_source(LightSource* source);
// Releases the sources whose owner streams wait for their copies. Returns false with a Python error set.
bool release_sources(Mover* mover);

[[nodiscard]] PyTypeObject* mover_type();
// Adds the type to the module. Returns false with a Python error set.
bool add_mover(PyObject* module);

}  // namespace vdnn::hooks
