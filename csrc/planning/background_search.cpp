// The thread's life. See [Note: Leaked in a forked child] in fork_guard.h for what a forked child does not do.
#include "planning/background_search.h"

#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>

#include <chrono>
#include <utility>

#include "device/errors.h"

namespace vdnn {

namespace {

constexpr int niceness =
    5;  // the training goes first; much less, and a cancelled search would end late on a busy machine

// Thrown between two evaluations; it never leaves this file.
struct Cancelled final : std::exception {};

// Signals belong to the threads of the program.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_{};
};

}  // namespace

BackgroundSearch::BackgroundSearch(std::shared_ptr<const PlanSearch> search) : search_(std::move(search)) {
  const SignalsBlocked blocked;  // a thread begins with the mask of the one that starts it
  thread_ = std::thread([this] { run(); });
  pthread_setname_np(thread_.native_handle(), "vdnn search");
}

BackgroundSearch::~BackgroundSearch() {
  cancel();
  if (thread_.joinable()) thread_.join();
}

void BackgroundSearch::run() noexcept {
  setpriority(PRIO_PROCESS, 0, niceness);  // of this thread alone, on Linux
  try {
    found_ = search_->all([this] {
      if (cancelled_.load(std::memory_order_relaxed)) throw Cancelled();
    });
  } catch (const Cancelled&) {
    found_.clear();
  } catch (...) {
    error_ = std::current_exception();
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    done_.store(true, std::memory_order_release);
  }
  ended_.notify_all();
}

bool BackgroundSearch::wait_for(double seconds) {
  fork_guard_.refuse_in_child("background search");
  std::unique_lock<std::mutex> lock(mutex_);
  return ended_.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return is_done(); });
}

const std::vector<FoundPlan>& BackgroundSearch::found() const {
  if (!is_done()) throw InvalidArgument("search", "one that is done", "one that goes on");
  if (error_ != nullptr) std::rethrow_exception(error_);
  return found_;
}

}  // namespace vdnn
