// The test's side of the fake driver: each knob takes the driver's lock and turns one thing.
#include "fake_control.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <string_view>

#include "fake_driver.h"

namespace {

using vdnn::fake::fake_driver;
using vdnn::fake::FakeDriver;
using vdnn::fake::Lock;

#define VDNN_FAKE_NAME(symbol, parameters) #symbol,
constexpr std::string_view entry_points[] = {VDNN_DRIVER_CALLS(VDNN_FAKE_NAME)};
#undef VDNN_FAKE_NAME

bool is_entry_point(std::string_view name) {
  return std::any_of(std::begin(entry_points), std::end(entry_points),
                     [&](std::string_view symbol) { return symbol == name || symbol == std::string(name) + "_v2"; });
}

std::int64_t live(const FakeDriver& state, std::string_view kind) {
  const auto count = [](std::uint64_t value) { return static_cast<std::int64_t>(value); };
  if (kind == "context") return count(state.contexts.retained());
  if (kind == "stream") return count(state.streams.live());
  if (kind == "event") return count(state.events.size());
  if (kind == "module") return count(state.modules.live());
  if (kind == "device_bytes") return count(state.memory.device().total_bytes());
  if (kind == "host_bytes") return count(state.memory.host().total_bytes());
  if (kind == "pinned_ranges") return count(state.memory.host().size());
  return -1;
}

}  // namespace

void fake_set_delays(std::uint64_t seed, std::uint64_t max_microseconds) {
  const Lock lock(fake_driver().mutex);
  fake_driver().streams.delay(seed, std::chrono::microseconds(max_microseconds));
}

void fake_hold_streams(int held) {
  const Lock lock(fake_driver().mutex);
  fake_driver().streams.hold(held != 0);
}

void fake_fail_nth(std::uint64_t nth, int code) {
  const Lock lock(fake_driver().mutex);
  fake_driver().faults.refuse_call("", nth, code);
}

int fake_fail_call(const char* name, std::uint64_t nth, int code) {
  if (!is_entry_point(name)) return 0;
  const Lock lock(fake_driver().mutex);
  fake_driver().faults.refuse_call(name, nth, code);
  return 1;
}

void fake_fail_async(std::uint64_t nth, int code) {
  const Lock lock(fake_driver().mutex);
  fake_driver().faults.fail_work(nth, code);
}

std::uint64_t fake_faults_pending() {
  const Lock lock(fake_driver().mutex);
  return fake_driver().faults.pending();
}

void fake_set_device_count(int count) {
  const Lock lock(fake_driver().mutex);
  fake_driver().contexts.set_device_count(count);
}

void fake_set_device_capacity(std::uint64_t bytes) {
  const Lock lock(fake_driver().mutex);
  fake_driver().memory.set_device_capacity(bytes);
}

void fake_set_host_capacity(std::uint64_t bytes) {
  const Lock lock(fake_driver().mutex);
  fake_driver().memory.set_host_capacity(bytes);
}

void fake_reset() {
  FakeDriver& state = fake_driver();
  const Lock lock(state.mutex);
  state.faults.clear();
  state.contexts.set_device_count(1);
  state.memory.reset_capacities();
  state.streams.reset();
  if (state.events.size() == 0) state.events_created = 0;
  state.calls.clear();
  state.issues.clear();
}

std::int64_t fake_live(const char* kind) {
  const Lock lock(fake_driver().mutex);
  return live(fake_driver(), kind);
}

std::uint64_t fake_blocking_streams() {
  const Lock lock(fake_driver().mutex);
  return fake_driver().streams.blocking_created();
}

std::uint64_t fake_calls() {
  const Lock lock(fake_driver().mutex);
  return fake_driver().calls.count();
}

const char* fake_call_name(std::uint64_t index) {
  const Lock lock(fake_driver().mutex);
  return fake_driver().calls.line(index);
}

std::uint64_t fake_issue_count() {
  const Lock lock(fake_driver().mutex);
  return fake_driver().issues.count();
}

const char* fake_issue(std::uint64_t index) {
  const Lock lock(fake_driver().mutex);
  return fake_driver().issues.line(index);
}
