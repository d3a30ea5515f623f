// The table through which the deferred accelerator issues torch's operations to the streams of a simulated device.
#include "bindings/sim_table.h"

#include <memory>
#include <utility>

#include "bindings/bindings.h"
#include "device/check/ordering_checker.h"
#include "device/errors.h"
#include "device/sim/sim_device.h"

namespace py = pybind11;

namespace vdnn {
namespace {

// The device that the user constructed, the checker if it is one, and the simulated device in it.
struct Owner {
  std::shared_ptr<Device> device;
  OrderingChecker* checker;
  SimDevice* sim;
  std::uint32_t device_id;
  VdnnSimTable table;
};

Owner& owner(void* device) {
  return *static_cast<Owner*>(device);
}

Stream stream_of(void* device, std::uint32_t index) {
  return Stream{owner(device).device_id, index};
}

// A task that is destroyed with the function that holds it, even if it never ran.
struct Task {
  Task(void (*run)(void*), void (*destroy)(void*), void* task) : run(run), destroy(destroy), task(task) {}
  Task(const Task&) = delete;  // destroy() must be called once
  Task& operator=(const Task&) = delete;
  ~Task() { destroy(task); }
  void (*run)(void*);
  void (*destroy)(void*);
  void* task;
};

void enqueue(void* device, std::uint32_t stream, void (*run)(void*), void (*destroy)(void*), void* task) {
  auto held = std::make_shared<Task>(run, destroy, task);
  owner(device).sim->enqueue(stream_of(device, stream), [held] { held->run(held->task); });
}

void* record(void* device, std::uint32_t stream) {
  return new Event(owner(device).device->record(stream_of(device, stream), Timing::Off));
}

void wait(void* device, std::uint32_t stream, void* event) {
  owner(device).device->wait(stream_of(device, stream), *static_cast<Event*>(event));
}

bool query(void* device, void* event) {
  return owner(device).device->query(*static_cast<Event*>(event));
}

void synchronize(void* device, void* event) {
  owner(device).device->synchronize(*static_cast<Event*>(event));
}

void drop_event(void* event) {
  delete static_cast<Event*>(event);
}

void drain(void* device, std::uint32_t stream) {
  owner(device).device->drain(stream_of(device, stream));
}

void note(void* device, std::uintptr_t address, std::uint64_t bytes, int access, std::uint32_t stream,
          const char* label) {
  owner(device).device->note_access({address, bytes}, static_cast<Access>(access), stream_of(device, stream), label);
}

std::uintptr_t allocate(void* device, std::uint64_t bytes) {
  return owner(device).device->allocate_device(bytes);
}

void set_origin(void* device, const char* origin) {
  if (owner(device).checker != nullptr) owner(device).checker->set_origin(origin);
}

py::capsule table_of(const std::shared_ptr<Device>& device) {
  const auto checker = std::dynamic_pointer_cast<OrderingChecker>(device);
  auto* sim = dynamic_cast<SimDevice*>(checker == nullptr ? device.get() : checker->inner().get());
  if (sim == nullptr) throw InvalidArgument("device", "a SimDevice, or a checker of one", device->info().name);
  auto* made = new Owner{device, checker.get(), sim, sim->id(), {}};
  made->table = {vdnn_sim_table_version, made,        &enqueue, &record, &wait,     &query,
                 &synchronize,           &drop_event, &drain,   &note,   &allocate, &set_origin};
  return py::capsule(&made->table, vdnn_sim_table_name, [](PyObject* capsule) {
    auto* table = static_cast<VdnnSimTable*>(PyCapsule_GetPointer(capsule, vdnn_sim_table_name));
    delete static_cast<Owner*>(table->device);
  });
}

}  // namespace

void bind_sim_table(py::module_& module) {
  module.def("sim_table", &table_of, py::arg("device").none(false));
}

}  // namespace vdnn
