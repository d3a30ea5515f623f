// The handles that a TransferQueue returns: the host copy of an offloaded storage, and a reload.
//
// The queue shares both while work is in flight, so they may be dropped at any moment: the queue keeps the memory that
// running copies access, and the host block returns to the pool with the event of its last use.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "device/device.h"
#include "memory/pinned_pool.h"

namespace vdnn {

// An object that must live as long as a copy may access its memory (for Python, a tensor). Opaque to the queue.
using Keepalive = std::shared_ptr<void>;

enum class CopyState {
  Queued,     // waits in a batch and is not submitted yet
  Submitted,  // on the copy stream: ready() is the event after which it is complete
  Failed,     // the device refused it; the source is the only copy, and the handle keeps it
};

class HostCopy {
 public:
  HostCopy(std::shared_ptr<PinnedBlock> block, std::uint64_t bytes) : block_(std::move(block)), bytes_(bytes) {}

  [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }
  [[nodiscard]] const std::shared_ptr<PinnedBlock>& block() const noexcept { return block_; }
  // True while the queue holds the source. A hint for the code that drops the handle; may be read at any moment.
  [[nodiscard]] bool in_flight() const noexcept { return in_flight_.load(std::memory_order_relaxed); }

 private:
  friend class TransferQueue;  // its lock guards the members below
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
  // The events before and after the copy; the first is empty unless the queue times its copies.
  [[nodiscard]] const Event& began() const noexcept { return began_; }
  [[nodiscard]] const Event& done() const noexcept { return done_; }
  // True while the queue holds the target. A hint, as for HostCopy.
  [[nodiscard]] bool in_flight() const noexcept { return in_flight_.load(std::memory_order_relaxed); }

 private:
  friend class ReloadLane;
  std::uint64_t bytes_;
  std::atomic<bool> in_flight_{true};
  Event began_;
  Event done_;  // set before users get the handle
};

}  // namespace vdnn
