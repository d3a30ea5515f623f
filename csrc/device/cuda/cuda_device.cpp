// CudaDevice: implements each Device call with driver calls and checks. device.h documents the calls.
#include "device/cuda/cuda_device.h"

#include <mutex>
#include <shared_mutex>
#include <utility>

#include "codec/codec.h"
#include "device/cuda/cuda_context.h"
#include "device/cuda/cuda_events.h"
#include "device/cuda/cuda_kernels.h"
#include "device/cuda/cuda_streams.h"
#include "device/errors.h"
#include "device/fork_guard.h"
#include "device/owned_memory.h"
#include "device/parked.h"

namespace vdnn {
namespace {

using Capture = CudaContext::Capture;
using Purpose = CudaContext::Purpose;

}  // namespace

struct CudaDevice::State {
  State(int ordinal, const DriverLibrary& driver) : context(driver, ordinal) {}

  const std::uint32_t id = next_device_id();
  const ForkGuard fork_guard;
  CudaContext context;
  const std::shared_ptr<CudaEvents> events = std::make_shared<CudaEvents>();

  // Calls hold `life` shared and close() holds it exclusively, so nothing is destroyed under a running call.
  mutable std::shared_mutex life;
  bool closing = false;      // no work runs on its streams and calls are refused; guarded by life
  bool closed = false;       // everything has been freed as well; guarded by life
  mutable std::mutex mutex;  // guards the members below
  CudaStreams streams;
  PinnedMappings pinned;
  DeviceAllocations allocations;
  CudaKernels kernels;
  State* next_returned = nullptr;

  [[nodiscard]] std::shared_lock<std::shared_mutex> enter() const {
    fork_guard.refuse_in_child("device " + context.info().name);
    std::shared_lock<std::shared_mutex> lock(life);
    if (closing) throw Closed("device " + context.info().name, "close() was called");
    return lock;
  }
  [[nodiscard]] CudaStreams::Entry& entry(Stream stream) {
    if (stream.device_id != id || !streams.has(stream.index)) throw DeviceMismatch("stream", context.info().name);
    return streams.at(stream.index);
  }
  [[nodiscard]] driver::StreamHandle handle(Stream stream) {
    const std::lock_guard<std::mutex> lock(mutex);
    return entry(stream).handle;
  }
  void require_mine(const Event& event) const {
    if (event.record().stream.device_id != id) throw DeviceMismatch("event", context.info().name);
  }
  void close_all();
};

CudaDevice::CudaDevice(int ordinal, const std::string& library) {
  close_parked();
  state_ = std::make_unique<State>(ordinal, DriverLibrary::load(library));
}

CudaDevice::~CudaDevice() {
  if (state_->fork_guard.in_forked_child()) {
    [[maybe_unused]] const State* leaked = state_.release();  // see [Note: Leaked in a forked child]
  } else if (!state_->closed) {
    park(std::move(state_));
  }
}

void CudaDevice::close_parked() {
  for (State* state = parked<State>().take_all(); state != nullptr;) {
    State* next = state->next_returned;
    std::unique_ptr<State> owned(state);
    if (owned->fork_guard.in_forked_child()) {
      [[maybe_unused]] const State* leaked = owned.release();
      state = next;
      continue;
    }
    try {
      owned->close_all();
    } catch (const Error&) {
      owned->pinned.abandon_all();  // still registered with the driver, so the pages must stay mapped
    }
    state = next;
  }
}

const DeviceInfo& CudaDevice::info() const {
  return state_->context.info();
}

Stream CudaDevice::create_stream(std::string_view name) {
  const auto alive = state_->enter();
  const CudaContext::Scope scope(state_->context, Capture::Relax);
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return {state_->id, state_->streams.create(state_->context, name)};
}

Stream CudaDevice::adopt_stream(std::uintptr_t native_handle) {
  const auto alive = state_->enter();
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return {state_->id, state_->streams.adopt(native_handle)};
}

std::string CudaDevice::stream_name(Stream stream) const {
  const auto alive = state_->enter();
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->entry(stream).name;
}

Event CudaDevice::record(Stream stream, Timing timing) {
  const auto alive = state_->enter();
  const CudaContext::Scope scope(state_->context);
  // Held during the driver call: positions must increase in the order in which the driver receives the records.
  const std::lock_guard<std::mutex> lock(state_->mutex);
  CudaStreams::Entry& entry = state_->entry(stream);
  return state_->events->record(state_->context, entry.handle, stream, ++entry.position, timing);
}

void CudaDevice::wait(Stream stream, const Event& event) {
  const auto alive = state_->enter();
  const driver::StreamHandle handle = state_->handle(stream);
  if (event.empty()) return;
  state_->require_mine(event);
  const CudaContext::Scope scope(state_->context);
  state_->context.check(state_->context.driver().cuStreamWaitEvent(handle, CudaEvents::handle_of(event), 0),
                        "cuStreamWaitEvent");
}

bool CudaDevice::query(const Event& event) {
  const auto alive = state_->enter();
  if (event.empty()) return true;
  state_->require_mine(event);
  const CudaContext::Scope scope(state_->context, Capture::Relax);
  const driver::Result result = state_->context.driver().cuEventQuery(CudaEvents::handle_of(event));
  if (result == driver::not_ready) return false;
  state_->context.check(result, "cuEventQuery");
  return true;
}

void CudaDevice::synchronize(const Event& event) {
  const auto alive = state_->enter();
  if (event.empty()) return;
  state_->require_mine(event);
  const CudaContext::Scope scope(state_->context, Capture::Relax);
  state_->context.check(state_->context.driver().cuEventSynchronize(CudaEvents::handle_of(event)),
                        "cuEventSynchronize");
}

void CudaDevice::drain(Stream stream) {
  const auto alive = state_->enter();
  const driver::StreamHandle handle = state_->handle(stream);
  const CudaContext::Scope scope(state_->context, Capture::Relax);
  state_->context.check(state_->context.driver().cuStreamSynchronize(handle), "cuStreamSynchronize");
}

std::int64_t CudaDevice::elapsed_ns(const Event& begin, const Event& end) {
  for (const Event* event : {&begin, &end}) {
    if (event->empty() || !event->record().timed) {
      throw InvalidArgument("event", "an event recorded with timing", event->empty() ? "an empty event" : "no timing");
    }
    synchronize(*event);
  }
  const auto alive = state_->enter();
  const CudaContext::Scope scope(state_->context, Capture::Relax);
  float milliseconds = 0;
  state_->context.check(state_->context.driver().cuEventElapsedTime(&milliseconds, CudaEvents::handle_of(begin),
                                                                    CudaEvents::handle_of(end)),
                        "cuEventElapsedTime");
  return static_cast<std::int64_t>(static_cast<double>(milliseconds) * 1e6);
}

void CudaDevice::copy_async(Address target, Address source, std::uint64_t bytes, CopyDirection direction,
                            Stream stream) {
  const auto alive = state_->enter();
  const driver::StreamHandle handle = state_->handle(stream);
  require_copy_arguments(target, source, bytes);
  if (bytes == 0) return;
  const bool to_host = direction == CopyDirection::DeviceToHost;
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->pinned.require_inside({to_host ? target : source, bytes});
  }
  const CudaContext::Scope scope(state_->context);
  const DriverLibrary& driver = state_->context.driver();
  if (to_host) {
    state_->context.check(driver.cuMemcpyDtoHAsync_v2(reinterpret_cast<void*>(target), source, bytes, handle),
                          "cuMemcpyDtoHAsync_v2", bytes);
  } else {
    state_->context.check(driver.cuMemcpyHtoDAsync_v2(target, reinterpret_cast<const void*>(source), bytes, handle),
                          "cuMemcpyHtoDAsync_v2", bytes);
  }
}

void CudaDevice::launch(const KernelCall& call, Stream stream) {
  const auto alive = state_->enter();
  const driver::StreamHandle handle = state_->handle(stream);
  check(call);
  const CudaContext::Scope scope(state_->context, Capture::Relax);
  std::unique_lock<std::mutex> lock(state_->mutex);
  const driver::Function function = state_->kernels.function(state_->context, call.kernel);
  lock.unlock();
  CudaKernels::launch(state_->context, function, call, handle);
}

Address CudaDevice::allocate_pinned(std::uint64_t bytes) {
  const auto alive = state_->enter();
  require_allocation_bytes(bytes);
  const CudaContext::Scope scope(state_->context, Capture::Relax);
  HostMapping mapping = HostMapping::map(bytes, info().numa_node);
  const ByteRange range = mapping.range();
  state_->context.check(state_->context.driver().cuMemHostRegister_v2(reinterpret_cast<void*>(range.address),
                                                                      range.bytes, driver::host_register_portable),
                        "cuMemHostRegister_v2", range.bytes);
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->pinned.add(std::move(mapping));
  return range.address;
}

void CudaDevice::free_pinned(Address address) {
  const auto alive = state_->enter();
  std::unique_lock<std::mutex> lock(state_->mutex);
  const ByteRange range = state_->pinned.at(address);
  lock.unlock();  // the driver waits for the device here, while other threads need their streams
  const CudaContext::Scope scope(state_->context, Capture::Relax);
  state_->context.check(state_->context.driver().cuMemHostUnregister(reinterpret_cast<void*>(address)),
                        "cuMemHostUnregister", range.bytes);
  lock.lock();
  state_->pinned.remove(address);
}

Address CudaDevice::allocate_device(std::uint64_t bytes) {
  const auto alive = state_->enter();
  require_allocation_bytes(bytes);
  const CudaContext::Scope scope(state_->context, Capture::Relax);
  driver::DevicePointer address = 0;
  state_->context.check(state_->context.driver().cuMemAlloc_v2(&address, bytes), "cuMemAlloc_v2", bytes);
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->allocations.add(address, bytes);
  return address;
}

void CudaDevice::free_device(Address address) {
  const auto alive = state_->enter();
  std::unique_lock<std::mutex> lock(state_->mutex);
  state_->allocations.require(address);
  lock.unlock();
  const CudaContext::Scope scope(state_->context, Capture::Relax);
  state_->context.check(state_->context.driver().cuMemFree_v2(address), "cuMemFree_v2");
  lock.lock();
  state_->allocations.remove(address);
}

void CudaDevice::note_access(ByteRange, Access, Stream stream, std::string_view) {
  const auto alive = state_->enter();
  static_cast<void>(state_->handle(stream));  // refuse a wrong stream as the other devices do
}

void CudaDevice::State::close_all() {
  const DriverLibrary& driver = context.driver();
  const bool was_lost = context.lost();
  {
    const CudaContext::Scope scope(context, Capture::Relax, Purpose::Close);
    // If the driver refuses this, copies may still run: the device stays open, and the memory that they access must not
    // be reused. After this call no work runs.
    streams.synchronize_owned(context);
    closing = true;
    kernels.unload(context);
    events->destroy_all(context);
    streams.destroy_all(context);
    for (const Address address : pinned.addresses()) {
      context.check_released(driver.cuMemHostUnregister(reinterpret_cast<void*>(address)), "cuMemHostUnregister",
                             pinned.at(address).bytes);
      pinned.remove(address);
    }
    for (const Address address : allocations.addresses()) {
      context.check_released(driver.cuMemFree_v2(address), "cuMemFree_v2");
      allocations.remove(address);
    }
  }
  context.release();
  closed = true;
  context.throw_deferred();
  if (!was_lost) context.throw_if_lost();  // the loss has not been reported yet
}

void CudaDevice::close() {
  if (state_->fork_guard.in_forked_child()) return;
  const std::unique_lock<std::shared_mutex> alone(state_->life);
  if (state_->closed) return;
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->close_all();
}

bool CudaDevice::closed() const {
  if (state_->fork_guard.in_forked_child()) return true;
  const std::shared_lock<std::shared_mutex> lock(state_->life);
  return state_->closing;
}

}  // namespace vdnn
