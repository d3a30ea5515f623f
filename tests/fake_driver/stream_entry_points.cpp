// Entry points about streams and events, and what orders one against another.
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "entry_points.h"
#include "fake_driver.h"

namespace vdnn::driver {

using fake::call;
using fake::EventVersion;
using fake::FakeDriver;
using fake::FakeEvent;
using fake::Lock;
using fake::Needs;
using fake::StreamPointer;

namespace {

constexpr unsigned event_blocking_sync = 1;
constexpr unsigned known_event_flags = event_blocking_sync | event_disable_timing;

std::string issue_line(const char* verb, const StreamPointer& stream, const FakeEvent& event) {
  return verb + (" s" + std::to_string(stream->number)) + " e" + std::to_string(event.number) + "v" +
         std::to_string(event.versions);
}

}  // namespace

Result cuStreamCreate(StreamHandle* stream, unsigned flags) {
  return call(__func__, Needs::HealthyContext, [&](FakeDriver& state, Lock&) -> Result {
    if (stream == nullptr || (flags & ~stream_non_blocking) != 0) return invalid_value;
    *stream = state.streams.create((flags & stream_non_blocking) == 0);
    return success;
  });
}

Result cuStreamDestroy_v2(StreamHandle stream) {
  return call(__func__, Needs::Context, [&](FakeDriver& state, Lock&) -> Result {
    const bool known = state.streams.retire(stream);
    if (state.faults.sticky() != success) return state.faults.sticky();
    return known ? success : fake::invalid_handle;
  });
}

Result cuStreamSynchronize(StreamHandle stream) {
  return call(__func__, Needs::HealthyContext, [&](FakeDriver& state, Lock& lock) -> Result {
    const StreamPointer found = state.streams.find(stream);
    if (found == nullptr) return fake::invalid_handle;
    state.streams.drain(lock, found);
    return state.faults.sticky();
  });
}

Result cuStreamWaitEvent(StreamHandle stream, EventHandle event, unsigned flags) {
  return call(__func__, Needs::HealthyContext, [&](FakeDriver& state, Lock& lock) -> Result {
    const StreamPointer found = state.streams.find(stream);
    const FakeEvent* awaited = state.events.find(event);
    if (found == nullptr || awaited == nullptr) return fake::invalid_handle;
    if (flags != 0) return invalid_value;
    state.issues.add(issue_line("wait", found, *awaited));
    fake::Operation operation;
    operation.wait = awaited->latest;
    state.streams.issue(lock, found, std::move(operation));
    return success;
  });
}

Result cuEventCreate(EventHandle* event, unsigned flags) {
  return call(__func__, Needs::HealthyContext, [&](FakeDriver& state, Lock&) -> Result {
    if (event == nullptr || (flags & ~known_event_flags) != 0) return invalid_value;
    FakeEvent created;
    created.number = ++state.events_created;
    created.timed = (flags & event_disable_timing) == 0;
    *event = state.events.add(std::move(created));
    return success;
  });
}

Result cuEventDestroy_v2(EventHandle event) {
  return call(__func__, Needs::Context, [&](FakeDriver& state, Lock&) -> Result {
    const std::optional<FakeEvent> taken = state.events.take(event);
    if (state.faults.sticky() != success) return state.faults.sticky();
    return taken ? success : fake::invalid_handle;
  });
}

Result cuEventRecord(EventHandle event, StreamHandle stream) {
  return call(__func__, Needs::HealthyContext, [&](FakeDriver& state, Lock& lock) -> Result {
    const StreamPointer found = state.streams.find(stream);
    FakeEvent* recorded = state.events.find(event);
    if (found == nullptr || recorded == nullptr) return fake::invalid_handle;
    fake::Operation operation;
    operation.record = std::make_shared<EventVersion>();
    recorded->latest = operation.record;
    ++recorded->versions;
    state.issues.add(issue_line("record", found, *recorded));
    state.streams.issue(lock, found, std::move(operation));
    return success;
  });
}

Result cuEventQuery(EventHandle event) {
  return call(__func__, Needs::HealthyContext, [&](FakeDriver& state, Lock&) -> Result {
    const FakeEvent* queried = state.events.find(event);
    if (queried == nullptr) return fake::invalid_handle;
    return queried->latest == nullptr || queried->latest->happened ? success : not_ready;
  });
}

Result cuEventSynchronize(EventHandle event) {
  return call(__func__, Needs::HealthyContext, [&](FakeDriver& state, Lock& lock) -> Result {
    const FakeEvent* awaited = state.events.find(event);
    if (awaited == nullptr) return fake::invalid_handle;
    // A copy: the event may be recorded again, or destroyed, while this thread waits without the lock.
    const std::shared_ptr<EventVersion> version = awaited->latest;
    if (version != nullptr) state.streams.synchronize(lock, version);
    return state.faults.sticky();
  });
}

Result cuEventElapsedTime(float* milliseconds, EventHandle begin, EventHandle end) {
  return call(__func__, Needs::HealthyContext, [&](FakeDriver& state, Lock&) -> Result {
    if (milliseconds == nullptr) return invalid_value;
    const FakeEvent* from = state.events.find(begin);
    const FakeEvent* to = state.events.find(end);
    const auto measures = [](const FakeEvent* event) {
      return event != nullptr && event->timed && event->latest != nullptr;
    };
    if (!measures(from) || !measures(to)) return fake::invalid_handle;
    if (!from->latest->happened || !to->latest->happened) return not_ready;
    *milliseconds = std::chrono::duration<float, std::milli>(to->latest->stamp - from->latest->stamp).count();
    return success;
  });
}

}  // namespace vdnn::driver
