// All of the fake driver's state, its one lock, and the gate that every entry point goes through.
//
// The state is made on first use and never freed: stream threads may still refer to it while the process ends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <mutex>
#include <new>
#include <string>
#include <utility>

#include "device/cuda/driver_api.h"
#include "fake_context.h"
#include "fake_event.h"
#include "fake_memory.h"
#include "fake_module.h"
#include "fake_stream.h"
#include "fault_injection.h"
#include "handle_table.h"
#include "result_codes.h"

namespace vdnn::fake {

// Lines in order. Keeps the first million, which bounds a long stress run; counts all.
class Log final {
 public:
  void add(std::string line) {
    if (lines_.size() < limit) lines_.push_back(std::move(line));
    ++count_;
  }
  void clear() { *this = Log(); }
  [[nodiscard]] std::uint64_t count() const noexcept { return count_; }
  // "" for a line that was not kept. Valid until clear(): a deque does not move what it holds.
  [[nodiscard]] const char* line(std::uint64_t index) const {
    return index < lines_.size() ? lines_[index].c_str() : "";
  }

 private:
  static constexpr std::size_t limit = 1000000;
  std::deque<std::string> lines_;
  std::uint64_t count_ = 0;
};

struct FakeDriver {
  std::mutex mutex;
  FaultPlan faults;
  ContextTable contexts;
  MemoryTable memory;
  ModuleTable modules;
  HandleTable<driver::EventHandle, FakeEvent> events{0x52000000};
  std::uint64_t events_created = 0;
  StreamEngine streams{mutex, faults};
  Log calls;   // names of entry points
  Log issues;  // what was put on streams
};

[[nodiscard]] FakeDriver& fake_driver();

// What must be so before an entry point acts.
enum class Needs {
  Nothing,         // works before cuInit
  Driver,          // after cuInit; answers even when the context is lost
  HealthyDriver,   // after cuInit, with no context lost
  Context,         // a current context, which may be lost: what gives things back
  HealthyContext,  // a current context that is not lost
};

// Counts the call and says what it must return without acting; success lets it act.
[[nodiscard]] driver::Result admit(FakeDriver& state, const char* name, Needs needs);

// One entry point: `body(state, lock)` runs with the lock held. No exception may cross the C boundary.
template <class Body>
[[nodiscard]] driver::Result call(const char* name, Needs needs, const Body& body) noexcept {
  try {
    FakeDriver& state = fake_driver();
    Lock lock(state.mutex);
    const driver::Result refused = admit(state, name, needs);
    return refused != driver::success ? refused : body(state, lock);
  } catch (const std::bad_alloc&) {
    return driver::out_of_memory;
  } catch (const std::exception&) {
    return operating_system;  // a stream's thread could not be started
  }
}

}  // namespace vdnn::fake
