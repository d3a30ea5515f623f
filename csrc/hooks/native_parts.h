// The native objects behind those that Python passes, and the reverse. Bindings, so that hooks need no pybind11.
#pragma once

#include <Python.h>

#include <memory>

#include "transfer/transfer_queue.h"

namespace vdnn::hooks {

// Each returns false with a Python error set if the object is another one.
bool queue_of(PyObject* object, std::shared_ptr<TransferQueue>& queue);
bool device_of(PyObject* object, std::shared_ptr<Device>& device);
bool stream_of(PyObject* object, Stream& stream);

// New references; null with a Python error set.
[[nodiscard]] PyObject* as_python(const std::shared_ptr<HostCopy>& copy);
[[nodiscard]] PyObject* as_python(const std::shared_ptr<Reload>& reload);

}  // namespace vdnn::hooks
