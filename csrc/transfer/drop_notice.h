// Handles that count when their last user drops them, so that the queue need not check every copy in flight.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

namespace vdnn {

// Counts handles that their last user has dropped. Shared with the handles, which may outlive their queue.
using DropCount = std::shared_ptr<std::atomic<std::uint64_t>>;

// Returns a handle to the same object for users. When the users drop their last reference while the work is in flight,
// the queue holds the only reference left, and the count increases. This takes no lock and makes no calls.
template <class Handle>
[[nodiscard]] std::shared_ptr<Handle> for_users(std::shared_ptr<Handle> kept, DropCount drops) {
  Handle* object = kept.get();
  return std::shared_ptr<Handle>(object, [kept = std::move(kept), drops = std::move(drops)](Handle*) mutable {
    const bool in_flight = kept->in_flight();
    kept.reset();  // before the count: a thread that sees the count must also see that the reference is gone
    if (in_flight) drops->fetch_add(1, std::memory_order_release);
  });
}

}  // namespace vdnn
