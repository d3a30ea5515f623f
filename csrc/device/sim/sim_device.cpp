// SimDevice: turns each Device call into work for SimStreams and time for VirtualClock.
#include "device/sim/sim_device.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <shared_mutex>
#include <vector>

#include "codec/codec.h"
#include "device/errors.h"
#include "device/fork_guard.h"
#include "device/owned_memory.h"

namespace vdnn {
namespace {

constexpr int poison_byte = 0xFF;

struct SimEventRecord final : EventRecord {
  std::int64_t time_ns = 0;
};

std::int64_t time_of(const Event& event) {
  return static_cast<const SimEventRecord&>(event.record()).time_ns;
}

void* pointer(Address address) {
  return reinterpret_cast<void*>(address);
}

}  // namespace

struct SimDevice::State {
  explicit State(const SimOptions& options)
      : options(options), streams(std::make_unique<SimStreams>(options.schedule, options.seed)), clock(options.link) {
    info.kind = "sim";
    info.name = options.name;
    info.total_bytes = options.total_bytes;
  }

  const SimOptions options;
  const std::uint32_t id = next_device_id();
  const ForkGuard fork_guard;
  DeviceInfo info;
  // Calls hold `life` shared and close() holds it exclusively, so the workers do not end under a running call.
  mutable std::shared_mutex life;
  bool closed = false;  // guarded by life
  std::unique_ptr<SimStreams> streams;
  mutable std::mutex mutex;  // guards the members below
  VirtualClock clock;
  std::vector<std::string> names;
  std::map<std::uintptr_t, std::uint32_t> adopted;
  PinnedMappings pinned;
  DeviceAllocations allocations;
  std::map<Address, HostMapping> reserved;  // stands for device memory if moves_bytes is off

  [[nodiscard]] std::shared_lock<std::shared_mutex> enter() const {
    fork_guard.refuse_in_child("device " + info.name);
    std::shared_lock<std::shared_mutex> lock(life);
    if (closed) throw Closed("device " + info.name, "close() was called");
    return lock;
  }
  void require_mine(Stream stream) const {
    if (stream.device_id != id) throw DeviceMismatch("stream", info.name);
  }
  void require_mine(const Event& event) const {
    if (event.record().stream.device_id != id) throw DeviceMismatch("event", info.name);
  }
  // With moves_bytes off there is no work: streams stay empty, and every event has happened.
  void submit(Stream stream, std::function<void()> work) {
    if (options.moves_bytes) streams->submit(stream.index, std::move(work));
  }
  std::uint32_t add_stream(std::string name, bool worker) {
    names.push_back(std::move(name));
    clock.add_stream();
    return worker && options.moves_bytes ? streams->add_worker() : streams->add_adopted();
  }
  void free_everything();
};

SimDevice::SimDevice(const SimOptions& options) : state_(std::make_unique<State>(options)) {}

SimDevice::~SimDevice() {
  if (state_->fork_guard.in_forked_child()) {
    [[maybe_unused]] const State* leaked = state_.release();  // see [Note: Leaked in a forked child]
    return;
  }
  state_->streams.reset();
  if (!state_->closed) state_->free_everything();
}

const DeviceInfo& SimDevice::info() const {
  return state_->info;
}

Stream SimDevice::create_stream(std::string_view name) {
  const auto alive = state_->enter();
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return {state_->id, state_->add_stream(std::string(name), true)};
}

Stream SimDevice::adopt_stream(std::uintptr_t native_handle) {
  const auto alive = state_->enter();
  const std::lock_guard<std::mutex> lock(state_->mutex);
  auto found = state_->adopted.find(native_handle);
  if (found == state_->adopted.end()) {
    const std::string name = native_handle == 0 ? "compute" : "compute-" + std::to_string(native_handle);
    found = state_->adopted.emplace(native_handle, state_->add_stream(name, false)).first;
  }
  return {state_->id, found->second};
}

std::string SimDevice::stream_name(Stream stream) const {
  const auto alive = state_->enter();
  state_->require_mine(stream);
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->names[stream.index];
}

Event SimDevice::record(Stream stream, Timing timing) {
  const auto alive = state_->enter();
  state_->require_mine(stream);
  auto record = std::make_shared<SimEventRecord>();
  record->stream = stream;
  record->timed = timing == Timing::On;
  record->position = state_->streams->position(stream.index);
  const std::lock_guard<std::mutex> lock(state_->mutex);
  record->time_ns = state_->clock.now_ns(stream.index);
  return Event(std::move(record));
}

void SimDevice::wait(Stream stream, const Event& event) {
  const auto alive = state_->enter();
  state_->require_mine(stream);
  if (event.empty()) return;
  state_->require_mine(event);
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->clock.wait_until(stream.index, time_of(event));
  }
  state_->streams->wait(stream.index, event.record().stream.index, event.record().position);
}

bool SimDevice::query(const Event& event) {
  const auto alive = state_->enter();
  if (event.empty()) return true;
  state_->require_mine(event);
  if (!state_->options.moves_bytes) {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    return time_of(event) <= state_->clock.host_ns();
  }
  return state_->streams->done(event.record().stream.index, event.record().position);
}

void SimDevice::synchronize(const Event& event) {
  const auto alive = state_->enter();
  if (event.empty()) return;
  state_->require_mine(event);
  state_->streams->synchronize(event.record().stream.index, event.record().position);
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->clock.host_waits_until(time_of(event));
}

void SimDevice::drain(Stream stream) {
  synchronize(record(stream, Timing::Off));
}

std::int64_t SimDevice::event_ns(const Event& event) const {
  if (event.empty()) throw InvalidArgument("event", "a recorded event", "an empty event");
  state_->require_mine(event.record().stream);
  return time_of(event);
}

std::int64_t SimDevice::elapsed_ns(const Event& begin, const Event& end) {
  for (const Event* event : {&begin, &end}) {
    if (event->empty() || !event->record().timed) {
      throw InvalidArgument("event", "an event recorded with timing", event->empty() ? "an empty event" : "no timing");
    }
    synchronize(*event);
  }
  return time_of(end) - time_of(begin);
}

void SimDevice::copy_async(Address target, Address source, std::uint64_t bytes, CopyDirection direction,
                           Stream stream) {
  const auto alive = state_->enter();
  state_->require_mine(stream);
  require_copy_arguments(target, source, bytes);
  if (bytes == 0) return;
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->pinned.require_inside({direction == CopyDirection::DeviceToHost ? target : source, bytes});
    state_->clock.copy(stream.index, bytes, direction);
  }
  state_->submit(stream, [=] { std::memcpy(pointer(target), pointer(source), bytes); });
}

void SimDevice::launch(const KernelCall& call, Stream stream) {
  const auto alive = state_->enter();
  state_->require_mine(stream);
  check(call);
  state_->submit(stream, [call] { run_on_cpu(call); });
}

void SimDevice::enqueue(Stream stream, std::function<void()> work) {
  const auto alive = state_->enter();
  state_->require_mine(stream);
  state_->submit(stream, std::move(work));
}

void SimDevice::set_eager(Stream stream, bool eager) {
  const auto alive = state_->enter();
  state_->require_mine(stream);
  if (state_->options.moves_bytes) state_->streams->set_eager(stream.index, eager);
}

std::vector<Stream> SimDevice::runnable() const {
  const auto alive = state_->enter();
  std::vector<Stream> found;
  for (const std::uint32_t index : state_->streams->runnable()) found.push_back({state_->id, index});
  return found;
}

void SimDevice::run_one(Stream stream) {
  const auto alive = state_->enter();
  state_->require_mine(stream);
  state_->streams->run_one(stream.index);
}

std::uint32_t SimDevice::id() const noexcept {
  return state_->id;
}

Address SimDevice::allocate_pinned(std::uint64_t bytes) {
  const auto alive = state_->enter();
  require_allocation_bytes(bytes);
  HostMapping mapping = HostMapping::map(bytes, state_->info.numa_node, !state_->options.moves_bytes);
  const Address address = mapping.range().address;
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->pinned.add(std::move(mapping));
  return address;
}

void SimDevice::free_pinned(Address address) {
  const auto alive = state_->enter();
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    static_cast<void>(state_->pinned.at(address));
  }
  // Like a driver, wait for running copies before freeing pages.
  state_->streams->drain_all();
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->pinned.remove(address);
}

Address SimDevice::allocate_device(std::uint64_t bytes) {
  const auto alive = state_->enter();
  require_allocation_bytes(bytes);
  const std::lock_guard<std::mutex> lock(state_->mutex);
  if (!state_->options.moves_bytes) {
    HostMapping mapping = HostMapping::map(bytes, -1, true);
    const Address address = mapping.range().address;
    state_->reserved.emplace(address, std::move(mapping));
    state_->allocations.add(address, bytes);
    return address;
  }
  const auto address = reinterpret_cast<Address>(std::malloc(bytes));
  if (address == 0) throw PinnedMemoryFull(bytes, 0, 0, "malloc for simulated device memory");
  state_->allocations.add(address, bytes);
  return address;
}

void SimDevice::free_device(Address address) {
  const auto alive = state_->enter();
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->allocations.require(address);
  }
  state_->streams->drain_all();
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->allocations.remove(address);
  if (state_->reserved.erase(address) == 0) std::free(pointer(address));
}

void SimDevice::note_access(ByteRange range, Access access, Stream stream, std::string_view) {
  const auto alive = state_->enter();
  state_->require_mine(stream);
  if (range.bytes == 0) return;
  require_copy_arguments(range.address, range.address, range.bytes);
  if (access != Access::Release || !state_->options.poison) return;
  state_->submit(stream, [range] { std::memset(pointer(range.address), poison_byte, range.bytes); });
}

void SimDevice::State::free_everything() {
  for (const Address address : pinned.addresses()) pinned.remove(address);
  for (const Address address : allocations.addresses()) {
    allocations.remove(address);
    if (reserved.erase(address) == 0) std::free(pointer(address));
  }
}

void SimDevice::close() {
  if (state_->fork_guard.in_forked_child()) return;
  const std::unique_lock<std::shared_mutex> alone(state_->life);
  if (state_->closed) return;
  state_->streams->drain_all();
  state_->closed = true;
  state_->streams.reset();
  state_->free_everything();
}

bool SimDevice::closed() const {
  if (state_->fork_guard.in_forked_child()) return true;
  const std::shared_lock<std::shared_mutex> lock(state_->life);
  return state_->closed;
}

void SimDevice::advance(Stream stream, std::int64_t duration_ns) {
  const auto alive = state_->enter();
  state_->require_mine(stream);
  if (duration_ns < 0) throw InvalidArgument("duration_ns", "0 or more", std::to_string(duration_ns));
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->clock.advance(stream.index, duration_ns);
}

std::int64_t SimDevice::now_ns(Stream stream) const {
  const auto alive = state_->enter();
  state_->require_mine(stream);
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->clock.now_ns(stream.index);
}

std::int64_t SimDevice::stall_ns(Stream stream) const {
  const auto alive = state_->enter();
  state_->require_mine(stream);
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->clock.stall_ns(stream.index);
}

}  // namespace vdnn
