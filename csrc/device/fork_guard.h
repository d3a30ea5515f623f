// Tells whether this process is a forked child of the one that made an object.
//
// Threads and driver contexts do not survive fork(), so a device made by the parent must not be used in a child
// (DataLoader workers inherit everything): its calls are refused there and its destructors let go of nothing.
//
// [Note: Leaked in a forked child] Whatever has threads, locks or condition variables is leaked there, not destroyed.
// A thread of the parent can be neither joined nor detached: its id may by now be that of a thread that the child
// started. A condition variable that the thread waited on at the fork blocks its destructor for ever, and what a lock
// guards may have been left half changed.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

namespace vdnn {

class ForkGuard {
 public:
  ForkGuard() noexcept;
  [[nodiscard]] bool in_forked_child() const noexcept;
  // Throws Closed there. Comes before any lock: a thread that does not exist in the child may have held it.
  void refuse_in_child(std::string_view what) const;

 private:
  std::uint64_t generation_;
};

// For shared objects with a ForkGuard of their own, as fork_guard(): destroys one, but leaks it in a forked child.
struct LeakInForkedChild {
  template <class Guarded>
  void operator()(Guarded* object) const noexcept {
    if (!object->fork_guard().in_forked_child()) std::default_delete<Guarded>()(object);
  }
};

}  // namespace vdnn
