// A search for a better plan on a thread of its own, while the training goes on with the plan that it has.
//
// The thread holds no Python object and takes no lock of Python's, so it never makes the training wait. It has a lower
// priority than the thread that starts it, and no signals.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "device/fork_guard.h"
#include "planning/plan_search.h"

namespace vdnn {

class BackgroundSearch final {
 public:
  // Starts the thread. Throws std::system_error if there can be none.
  explicit BackgroundSearch(std::shared_ptr<const PlanSearch> search);
  // Cancels the search and waits for the evaluation that is running.
  ~BackgroundSearch();
  BackgroundSearch(const BackgroundSearch&) = delete;
  BackgroundSearch& operator=(const BackgroundSearch&) = delete;

  // Ends the search before its next evaluation. Does not block.
  void cancel() noexcept { cancelled_ = true; }
  // True once the thread has ended its search. Does not block. In a forked child, where the thread is not, never.
  [[nodiscard]] bool is_done() const noexcept { return done_.load(std::memory_order_acquire); }
  // Waits until then, at most so long. True if it is done.
  bool wait_for(double seconds);
  // The plans that it found, the shortest step first; none if it was cancelled. Throws what ended the search. Requires
  // that it is done.
  [[nodiscard]] const std::vector<FoundPlan>& found() const;
  [[nodiscard]] const ForkGuard& fork_guard() const { return fork_guard_; }

 private:
  void run() noexcept;

  const std::shared_ptr<const PlanSearch> search_;
  const ForkGuard fork_guard_;
  std::atomic<bool> cancelled_{false};
  std::atomic<bool> done_{false};  // the two below are written before it is set, and not after
  std::vector<FoundPlan> found_;
  std::exception_ptr error_;
  std::mutex mutex_;
  std::condition_variable ended_;
  std::thread thread_;  // the last member: it uses all others
};

}  // namespace vdnn
