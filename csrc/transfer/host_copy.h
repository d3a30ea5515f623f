// What a TransferQueue hands out: the copy of a storage off the device, and a copy on its way back.
//
// Both are shared with the queue while work is in flight, so dropping either at any moment is safe: the queue keeps
// what running copies touch, and the host block goes back behind its last use.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "device/device.h"
#include "memory/pinned_pool.h"

namespace vdnn {

// Whatever must live as long as a copy may touch its memory (a tensor, for Python). The queue never looks inside.
using Keepalive = std::shared_ptr<void>;

enum class CopyState {
  Queued,     // waits in a batch; the device has not been told
  Submitted,  // on the copy stream: ready() says when it is complete
  Failed,     // the device refused it; the source is still the only copy and is held here
};

class HostCopy {
 public:
  HostCopy(std::shared_ptr<PinnedBlock> block, std::uint64_t bytes) : block_(std::move(block)), bytes_(bytes) {}

  [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }
  [[nodiscard]] const std::shared_ptr<PinnedBlock>& block() const noexcept { return block_; }
  // Whether the queue still holds its source. A hint for whoever drops it: may be read at any moment.
  [[nodiscard]] bool in_flight() const noexcept { return in_flight_.load(std::memory_order_relaxed); }

 private:
  friend class TransferQueue;  // whose lock guards what follows
  std::shared_ptr<PinnedBlock> block_;
  std::uint64_t bytes_;
  std::atomic<bool> in_flight_{true};
  CopyState state_ = CopyState::Queued;
  Event began_;  // empty unless the queue times its copies
  Event ready_;
  std::string failure_;
  Keepalive kept_source_;  // only when Failed
};

class Reload {
 public:
  explicit Reload(std::uint64_t bytes) : bytes_(bytes) {}
  [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }
  // The copy runs between these two; the first is empty unless the queue times its copies.
  [[nodiscard]] const Event& began() const noexcept { return began_; }
  [[nodiscard]] const Event& done() const noexcept { return done_; }
  // Whether the queue still holds its target. A hint, as for HostCopy.
  [[nodiscard]] bool in_flight() const noexcept { return in_flight_.load(std::memory_order_relaxed); }

 private:
  friend class ReloadLane;
  std::uint64_t bytes_;
  std::atomic<bool> in_flight_{true};
  Event began_;
  Event done_;  // set before anybody else has the handle
};

}  // namespace vdnn
