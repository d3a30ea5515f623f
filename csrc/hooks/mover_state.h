// What the parts of the mover share: calls of the queue and of torch, and the packer's lock.
#pragma once

#include <Python.h>

#include <exception>
#include <utility>
#include <vector>

#include "hooks/mover.h"

namespace vdnn::hooks {

// Holds the packer's lock. Without it, if a Python error is set: an interrupt while it waited.
class Locked final {
 public:
  explicit Locked(Mover* mover) : mover_(mover) {
    Py_INCREF(mover_);
    is_held_ = static_cast<bool>(Reference::stolen(PyObject_CallNoArgs(mover_->parts[kAcquire])));
  }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;
  ~Locked() {
    if (is_held_) {
      PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
      PyErr_Fetch(&type, &value, &trace);
      Py_XDECREF(PyObject_CallNoArgs(mover_->parts[kRelease]));
      PyErr_Restore(type, value, trace);
    }
    Py_DECREF(mover_);
  }
  explicit operator bool() const { return is_held_; }

 private:
  Mover* mover_;
  bool is_held_ = false;
};

// Runs a call of the queue without the GIL. False if it threw: then Python calls the same, and raises the error.
template <class Call>
bool on_queue(TransferQueue& queue, Call call) {
  bool is_done = true;
  PyThreadState* state = PyEval_SaveThread();
  try {
    call();
  } catch (const std::exception&) {
    is_done = false;
  }
  PyEval_RestoreThread(state);
  const std::vector<Keepalive> finished = queue.take_finished();  // destroyed with the GIL, outside of the queue
  return is_done;
}

// The queue may drop it on any thread.
inline Keepalive keep_alive(PyObject* object) {
  Py_INCREF(object);
  return Keepalive(object, [](void* held) {
    if (!Py_IsInitialized()) {
      return;  // the interpreter has exited, and the object no longer exists
    }
    const PyGILState_STATE state = PyGILState_Ensure();
    Py_DECREF(static_cast<PyObject*>(held));
    PyGILState_Release(state);
  });
}

// Returns false with a Python error set.
inline bool as_number(const Reference& object, std::int64_t& number) {
  number = object ? PyLong_AsLongLong(object.get()) : -1;
  return number != -1 || PyErr_Occurred() == nullptr;
}

// Python meets the same error, and raises it. False, and the error stays, if it is an interrupt.
inline bool clear_error() {
  if (PyErr_Occurred() != nullptr && PyErr_ExceptionMatches(PyExc_Exception) == 0) {
    return false;
  }
  PyErr_Clear();
  return true;
}

inline bool is_false(const Reference& object) {
  return object.get() == Py_False;
}

// The version of a tensor; -1 if it cannot be read.
[[nodiscard]] std::int64_t version_of(const Mover* mover, PyObject* tensor);
// A tensor that shares the version counter of `tensor` and has the data of `data`. Null with a Python error set.
[[nodiscard]] Reference with_data(const Mover* mover, PyObject* tensor, PyObject* data);
// True if hooks may manage anything here: no transform, tracer or capture is active.
[[nodiscard]] bool is_untraced(const Mover* mover);
// True if the two tensors, which have this version, share one version counter.
[[nodiscard]] bool has_same_counter(const Mover* mover, PyObject* witness, PyObject* tensor, std::int64_t version);
// True if hooks may move anything here: no transform, tracer or capture is active, and the stream is the expected one.
[[nodiscard]] bool may_move_here(const Mover* mover);
// Tell a device that checks the order of accesses. False if it refuses.
[[nodiscard]] bool note_producer(const LightStorage* storage);
[[nodiscard]] bool note_reload(const LightStorage* storage);
// The same for a recompute, with a Python error set.
[[nodiscard]] bool note_recompute(const LightStorage* storage, PyObject* made);
// The storage that was released, if others hold it: its bytes are still on the device. None if nobody does; null if
// that cannot be told.
[[nodiscard]] Reference held_storage(const LightStorage* storage);
// True if others hold it.
[[nodiscard]] bool is_held(const LightStorage* storage);
// True if it was discarded, and neither a recompute nor another holder has its bytes.
[[nodiscard]] bool is_missing(const LightStorage* storage);
// `made` has the bytes that were discarded. Returns false with a Python error set.
[[nodiscard]] bool recomputed(LightStorage* storage, PyObject* made);
// Releases the storage of this first save without a copy. False, perhaps with a Python error set, if Python has to.
[[nodiscard]] bool discard(LightSave* save, PyObject* tensor, std::size_t position);
// Issues the copy to the host. False, perhaps with a Python error set, if Python has to do it.
[[nodiscard]] bool offload(LightStorage* storage);
// Lets the copy wait for the running operation. False, perhaps with a Python error set, if Python has to do it.
[[nodiscard]] bool wait_for_operation(LightStorage* storage);
// Issues a reload. False, perhaps with a Python error set, if Python has to do it.
[[nodiscard]] bool issue_reload(LightStorage* storage);

}  // namespace vdnn::hooks
