// Counts forks with pthread_atfork. Reading the count costs one load, whereas getpid() is a system call.
#include "device/fork_guard.h"

#include <pthread.h>

#include <atomic>

#include "device/errors.h"

namespace vdnn {
namespace {

std::atomic<std::uint64_t> forks_survived{0};

void count_fork() {
  forks_survived.fetch_add(1, std::memory_order_relaxed);
}

std::uint64_t current_generation() noexcept {
  static const int registered = pthread_atfork(nullptr, nullptr, count_fork);
  static_cast<void>(registered);
  return forks_survived.load(std::memory_order_relaxed);
}

}  // namespace

ForkGuard::ForkGuard() noexcept : generation_(current_generation()) {}

bool ForkGuard::in_forked_child() const noexcept {
  return forks_survived.load(std::memory_order_relaxed) != generation_;
}

void ForkGuard::refuse_in_child(std::string_view what) const {
  if (in_forked_child()) throw Closed(what, "this is a forked child process");
}

}  // namespace vdnn
