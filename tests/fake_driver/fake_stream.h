// Streams as host threads, and the legacy default stream as whichever thread calls.
//
// Each created stream runs its operations in order on a thread of its own. When they run is free within the rules:
// random delays, or "hold", where a stream runs an operation only once somebody blocks on it (the latest legal
// schedule). Everything here is guarded by the driver's lock; operations themselves run without it.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <vector>

#include "device/cuda/driver_api.h"
#include "fake_event.h"
#include "fault_injection.h"
#include "handle_table.h"

namespace vdnn::fake {

using Lock = std::unique_lock<std::mutex>;

struct Operation {
  std::function<void()> work;            // copy, kernel or memset; empty for a record or a wait
  std::shared_ptr<EventVersion> record;  // what happens when this is reached
  std::shared_ptr<EventVersion> wait;    // what must have happened first
  std::uint64_t position = 0;            // along its stream, from 1
  std::uint64_t after_legacy = 0;        // how far the legacy stream must have come first
};

struct FakeStream {
  std::uint64_t number = 0;  // in order of creation; 0 is the legacy stream
  bool blocking = false;     // synchronises with the legacy stream
  bool retired = false;      // destroyed: the thread ends when the queue is empty
  std::deque<Operation> queue;
  std::uint64_t issued = 0;
  std::uint64_t finished = 0;
  std::uint64_t demanded = 0;  // how far somebody blocks on it: runs even while held
  std::mt19937_64 random;
};
using StreamPointer = std::shared_ptr<FakeStream>;

class StreamEngine final {
 public:
  StreamEngine(std::mutex& mutex, FaultPlan& faults);
  // Its threads refer to it for as long as the process lives.
  StreamEngine(const StreamEngine&) = delete;
  StreamEngine& operator=(const StreamEngine&) = delete;

  [[nodiscard]] driver::StreamHandle create(bool blocking);
  // The legacy stream for a null handle; nullptr if there is no such stream.
  [[nodiscard]] StreamPointer find(driver::StreamHandle handle);
  // Forgets the handle and returns at once, as CUDA does; what is queued still runs, even while held.
  bool retire(driver::StreamHandle handle);

  // Puts an operation on a stream. On the legacy stream it has run when this returns.
  void issue(Lock& lock, const StreamPointer& stream, Operation operation);
  // Block the calling thread, without the lock, until all issued so far (or the version) has run.
  void drain(Lock& lock, const StreamPointer& stream);
  void drain_all(Lock& lock);
  void synchronize(Lock& lock, const std::shared_ptr<EventVersion>& version);

  void hold(bool held);
  // Every operation is preceded by a random pause of up to this. The same seed draws the same pauses.
  void delay(std::uint64_t seed, std::chrono::microseconds longest);
  // Back to no delays, not held, and counting from one again if no stream is alive.
  void reset();

  [[nodiscard]] std::size_t live() const noexcept { return handles_.size(); }
  [[nodiscard]] std::uint64_t blocking_created() const noexcept { return blocking_created_; }

 private:
  struct Target {
    StreamPointer stream;
    std::uint64_t position = 0;
  };

  void run(const StreamPointer& stream);
  [[nodiscard]] bool ready(const FakeStream& stream) const;
  void issue_inline(Lock& lock, Operation operation);
  void execute(Lock& lock, FakeStream& stream, Operation& operation);
  void demand(const StreamPointer& stream, std::uint64_t position);
  void wait_until(Lock& lock, const std::vector<Target>& targets);
  [[nodiscard]] std::chrono::microseconds draw_pause(FakeStream& stream) const;
  void seed(FakeStream& stream) const;

  std::mutex& mutex_;
  FaultPlan& faults_;
  std::condition_variable changed_;  // an operation was issued, demanded or has run, or the knobs moved
  StreamPointer legacy_;
  HandleTable<driver::StreamHandle, StreamPointer> handles_;
  std::vector<StreamPointer> running_;  // those with a thread: the live ones and the retired ones still draining
  std::uint64_t created_ = 0;
  std::uint64_t blocking_created_ = 0;
  bool held_ = false;
  std::uint64_t seed_ = 0;
  std::chrono::microseconds longest_pause_{0};
};

}  // namespace vdnn::fake
