// Handles that say when the last of their users let go, so that the queue need not look at every copy in flight.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

namespace vdnn {

// Counts handles whose last user is gone. Shared with the handles, which may outlive their queue.
using DropCount = std::shared_ptr<std::atomic<std::uint64_t>>;

// The same object for users: when their last reference goes while the work is in flight, the queue's own is the only
// one left, and then the count grows. No lock is taken and nothing is called.
template <class Handle>
[[nodiscard]] std::shared_ptr<Handle> for_users(std::shared_ptr<Handle> kept, DropCount drops) {
  Handle* object = kept.get();
  return std::shared_ptr<Handle>(object, [kept = std::move(kept), drops = std::move(drops)](Handle*) mutable {
    const bool in_flight = kept->in_flight();
    kept.reset();  // before it is counted: who sees the count must see the handle gone
    if (in_flight) drops->fetch_add(1, std::memory_order_release);
  });
}

}  // namespace vdnn
