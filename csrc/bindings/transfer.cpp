// Python bindings of the transfer queue. Keepalives are Python objects, destroyed only with the GIL held and without
// native locks.
#include <pybind11/stl.h>

#include <optional>
#include <utility>

#include "bindings/bindings.h"
#include "transfer/transfer_queue.h"

namespace py = pybind11;
using py::arg;

namespace vdnn {
namespace {

// The queue holds an opaque pointer. Dropping the last one acquires the GIL for the decref.
Keepalive keep_alive(py::object object) {
  if (object.is_none()) return nullptr;
  return Keepalive(object.release().ptr(), [](void* held) {
    if (!Py_IsInitialized()) return;  // the interpreter has exited, and the object no longer exists
    const py::gil_scoped_acquire gil;
    Py_DECREF(static_cast<PyObject*>(held));
  });
}

py::object object_of(const Keepalive& keepalive) {
  if (keepalive == nullptr) return py::none();
  return py::reinterpret_borrow<py::object>(static_cast<PyObject*>(keepalive.get()));
}

// Runs `call` without the GIL, then destroys the references that the queue no longer needs with the GIL held, even if
// `call` throws.
template <class Call>
auto on_queue(TransferQueue& queue, Call call) {
  struct Sweep {
    TransferQueue& queue;
    ~Sweep() { static_cast<void>(queue.take_finished()); }  // destroyed here
  };
  const Sweep sweep{queue};
  const py::gil_scoped_release without_gil;
  return call();
}

void bind_handles(py::module_& module) {
  py::enum_<CopyState>(module, "CopyState")
      .value("QUEUED", CopyState::Queued)
      .value("SUBMITTED", CopyState::Submitted)
      .value("FAILED", CopyState::Failed);
  py::class_<HostCopy, std::shared_ptr<HostCopy>>(module, "HostCopy")
      .def_property_readonly("bytes", &HostCopy::bytes)
      .def_property_readonly("block", &HostCopy::block);
  py::class_<Reload, std::shared_ptr<Reload>>(module, "Reload")
      .def_property_readonly("bytes", &Reload::bytes)
      .def_property_readonly("span",
                             [](const Reload& reload) { return py::make_tuple(reload.began(), reload.done()); });
  py::class_<QueueStats>(module, "QueueStats")
      .def_readonly("offloads", &QueueStats::offloads)
      .def_readonly("offloaded_bytes", &QueueStats::offloaded_bytes)
      .def_readonly("reloads", &QueueStats::reloads)
      .def_readonly("reloaded_bytes", &QueueStats::reloaded_bytes)
      .def_readonly("submissions", &QueueStats::submissions)
      .def_readonly("offload_in_flight_bytes", &QueueStats::offload_in_flight_bytes)
      .def_readonly("reload_in_flight_bytes", &QueueStats::reload_in_flight_bytes)
      .def_readonly("window_waits", &QueueStats::window_waits)
      .def_readonly("refused_offloads", &QueueStats::refused_offloads)
      .def_readonly("cancelled", &QueueStats::cancelled)
      .def_readonly("failed", &QueueStats::failed);
}

std::shared_ptr<HostCopy> offload(TransferQueue& queue, Address source, std::uint64_t bytes, Stream producer,
                                  std::optional<Stream> owner, py::object keepalive, Growth growth) {
  Keepalive kept = keep_alive(std::move(keepalive));
  return on_queue(
      queue, [&] { return queue.offload(source, bytes, producer, owner.value_or(producer), std::move(kept), growth); });
}

std::shared_ptr<Reload> reload(TransferQueue& queue, const std::shared_ptr<HostCopy>& copy, Address target,
                               Stream consumer, py::object keepalive) {
  Keepalive kept = keep_alive(std::move(keepalive));
  return on_queue(queue, [&] { return queue.reload(copy, target, consumer, std::move(kept)); });
}

py::tuple failure(TransferQueue& queue, const std::shared_ptr<HostCopy>& copy) {
  const auto [reason, source] = queue.failure(copy);
  return py::make_tuple(reason, object_of(source));
}

py::list take_released(TransferQueue& queue) {
  if (!queue.may_have_released()) return py::list();
  const std::vector<Keepalive> keepalives = on_queue(queue, [&] { return queue.take_released(); });
  py::list released;
  for (const Keepalive& keepalive : keepalives) released.append(object_of(keepalive));
  return released;
}

}  // namespace

void bind_transfer(py::module_& module) {
  bind_handles(module);
  const QueueOptions defaults;
  py::class_<TransferQueue, std::shared_ptr<TransferQueue>>(module, "TransferQueue")
      .def(py::init([](std::shared_ptr<Device> device, std::shared_ptr<PinnedPool> pool,
                       std::uint64_t offload_window_bytes, std::uint64_t small_copy_bytes, std::uint64_t batch_bytes,
                       bool timed) {
             const QueueOptions options{offload_window_bytes, small_copy_bytes, batch_bytes,
                                        timed ? Timing::On : Timing::Off};
             return std::shared_ptr<TransferQueue>(new TransferQueue(std::move(device), std::move(pool), options),
                                                   LeakInForkedChild());
           }),
           arg("device").none(false), arg("pool").none(false),
           arg("offload_window_bytes") = defaults.offload_window_bytes,
           arg("small_copy_bytes") = defaults.small_copy_bytes, arg("batch_bytes") = defaults.batch_bytes,
           arg("timed") = false)
      .def("offload", &offload, arg("source"), arg("bytes"), arg("producer"), arg("owner") = py::none(),
           arg("keepalive") = py::none(), arg("growth") = Growth::Now)
      .def(
          "release",
          [](TransferQueue& queue, const std::shared_ptr<HostCopy>& copy) {
            return on_queue(queue, [&] { return queue.release(copy); });
          },
          arg("copy").none(false))
      .def("reload", &reload, arg("copy").none(false), arg("target"), arg("consumer"), arg("keepalive") = py::none())
      .def(
          "wait",
          [](TransferQueue& queue, const std::shared_ptr<Reload>& reload, Stream stream) {
            on_queue(queue, [&] { queue.wait(reload, stream); });
          },
          arg("reload").none(false), arg("stream"))
      .def("flush", [](TransferQueue& queue) { on_queue(queue, [&] { queue.flush(); }); })
      .def("collect", [](TransferQueue& queue) { on_queue(queue, [&] { queue.collect(); }); })
      .def(
          "ready",
          [](TransferQueue& queue, const std::shared_ptr<HostCopy>& copy) {
            return on_queue(queue, [&] { return queue.ready(copy); });
          },
          arg("copy").none(false))
      .def(
          "span",
          [](TransferQueue& queue, const std::shared_ptr<HostCopy>& copy) {
            return on_queue(queue, [&] { return queue.span(copy); });
          },
          arg("copy").none(false))
      .def("set_offload_window", &TransferQueue::set_offload_window, arg("bytes"))
      .def("state", &TransferQueue::state, arg("copy").none(false))
      .def("failure", &failure, arg("copy").none(false))
      // Takes no lock and keeps the GIL: every hook asks.
      .def_property_readonly("may_have_released", &TransferQueue::may_have_released)
      .def("take_released", &take_released)
      .def_property_readonly("stats", &TransferQueue::stats)
      .def_property_readonly("offload_stream", &TransferQueue::offload_stream)
      .def_property_readonly("reload_stream", &TransferQueue::reload_stream)
      .def("close", [](TransferQueue& queue) { on_queue(queue, [&] { queue.close(); }); });
}

}  // namespace vdnn
