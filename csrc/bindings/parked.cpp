// Frees what was destroyed without close(), soon after it was parked: the interpreter calls back on the main thread,
// between two instructions of Python, where no native lock is held. While the main thread is inside a long native call,
// free_parked() on any other thread does the same.
#include "device/parked.h"

#include <Python.h>

#include <atomic>
#include <exception>
#include <vector>

#include "bindings/bindings.h"
#include "device/cuda/cuda_device.h"
#include "memory/pinned_pool.h"
#include "transfer/leftovers.h"

namespace py = pybind11;

namespace vdnn {
namespace {

std::atomic<bool> is_due{false};    // something was parked, and not freed yet
std::atomic<bool> is_asked{false};  // the interpreter will call back

// Waits for copies that still run. Called with the GIL held, which the last references to Python objects need.
void free_parked() noexcept {
  if (!is_due.exchange(false)) return;
  std::vector<Keepalive> finished;
  const py::gil_scoped_release without_gil;
  try {
    finished = Leftovers::take_all();  // queues first: their blocks hold pools, and these hold devices
    PinnedPool::free_leftovers();
    CudaDevice::close_parked();
  } catch (const std::exception&) {
    return;  // out of memory: the next call, or the next object of the class, goes on
  }
  const py::gil_scoped_acquire gil;
  finished.clear();
}

int call_back(void*) {
  is_asked.store(false);
  free_parked();
  return 0;
}

void ask_for_call() noexcept {
  is_due.store(true);
  if (!Py_IsInitialized() || is_asked.exchange(true)) return;
  if (Py_AddPendingCall(&call_back, nullptr) != 0) is_asked.store(false);  // too many wait already
}

}  // namespace

void bind_parked(py::module_& module) {
  parked_notice.store(&ask_for_call, std::memory_order_release);
  module.def("free_parked", &free_parked);
}

}  // namespace vdnn
