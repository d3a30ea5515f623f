// Detects that this process is a forked child of the process that created an object.
//
// Threads and driver contexts do not survive fork(), so a child must not use a device created by its parent (DataLoader
// workers inherit every object): calls throw there, and destructors free nothing.
//
// [Note: Leaked in a forked child] An object with threads, locks or condition variables is leaked in a forked child,
// not destroyed. A thread of the parent can be neither joined nor detached there, because a thread that the child
// started may have the same id. The destructor of a condition variable blocks forever if a thread waited on it at the
// fork, and data guarded by a lock may be half modified.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

namespace vdnn {

class ForkGuard {
 public:
  ForkGuard() noexcept;
  [[nodiscard]] bool in_forked_child() const noexcept;
  // Throws Closed in a forked child. Call it before taking any lock: a thread that does not exist in the child may have
  // held the lock.
  void refuse_in_child(std::string_view what) const;

 private:
  std::uint64_t generation_;
};

// Deleter for shared objects that have a fork_guard(): destroys the object, but leaks it in a forked child.
struct LeakInForkedChild {
  template <class Guarded>
  void operator()(Guarded* object) const noexcept {
    if (!object->fork_guard().in_forked_child()) std::default_delete<Guarded>()(object);
  }
};

}  // namespace vdnn
