// The script of a settled step: its saves and uses in order, with all that a hook can compare at once.
//
// Plain CPython objects and no torch headers: attributes of tensors are read through torch's own descriptors.
#pragma once

#include <Python.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace vdnn::hooks {

// A reference that is dropped with its holder. Only for code that holds the GIL.
class Reference final {
 public:
  Reference() = default;
  explicit Reference(PyObject* borrowed) : object_(borrowed) { Py_XINCREF(borrowed); }
  Reference(Reference&& other) noexcept : object_(other.release()) {}
  Reference& operator=(Reference&& other) noexcept {
    PyObject* before = object_;
    object_ = other.release();
    Py_XDECREF(before);
    return *this;
  }
  Reference(const Reference&) = delete;  // a copy would hide an increment
  Reference& operator=(const Reference&) = delete;
  ~Reference() { Py_XDECREF(object_); }

  static Reference stolen(PyObject* owned) {
    Reference made;
    made.object_ = owned;
    return made;
  }
  [[nodiscard]] PyObject* get() const { return object_; }
  [[nodiscard]] PyObject* release() {
    PyObject* given = object_;
    object_ = nullptr;
    return given;
  }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_ = nullptr;
};

// What happens at a position of the step.
enum class Kind : std::uint8_t {
  Exempt,   // a save that is no point: a parameter, a small tensor
  Kept,     // a save that the plan keeps
  Planned,  // a save that Python handles
  Use,      // a use of a kept save
  Fetch,    // a use that Python handles
};

// A release or a reload of the plan.
struct PlannedMove final {
  std::int32_t lifetime;  // -1: one that the script does not save, such as encoded bytes; Python moves it
  bool is_reload;
};

// What the gate needs in order to move or discard a save itself.
struct Moving final {
  bool is_first;      // of its lifetime
  bool is_discarded;  // its lifetime: it is recomputed, and not copied
  Reference size;     // a tuple, as strides
  Reference strides;
  Reference target_size;  // of a tensor with all bytes of the storage, into which they are reloaded
  Reference target_strides;
  Reference node_type;  // of its producer
  Reference dtype;
  Reference device;
  Reference empty;  // a tensor without bytes, with this dtype and device
  Reference event;  // the event as Python knows it
};

struct Event final {
  Kind kind;
  bool has_moves;    // the plan moves something at this point
  bool in_backward;  // the first save after a use: it belongs to the step only inside a backward
  bool is_leaf;
  bool is_read;                // this save is noted: a recipe reads it, or needs the settings of its node
  std::int32_t lifetime;       // -1: none, which the gate does not keep
  std::int64_t nbytes;         // of the tensor
  std::int64_t storage_bytes;  // of its lifetime
  std::uintptr_t module;       // the innermost one that runs, or its class; 0 outside of modules
  std::int64_t depth;          // of running modules
  Reference type;
  Reference dtype;
  std::vector<PlannedMove> moves;
  std::unique_ptr<Moving> moving;  // null: Python moves it
};

struct Script final {
  std::vector<Event> events;
  std::int32_t lifetimes = 0;
};

struct ScriptObject final {
  PyObject_HEAD Script script;
};

// The type of script objects. Python makes them from a sequence of tuples, with the fields above in their order.
[[nodiscard]] PyTypeObject* script_type();

// Adds the type to the module. Returns false with a Python error set.
bool add_script(PyObject* module);

}  // namespace vdnn::hooks
