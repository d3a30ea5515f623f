// Putting a batch of offloads on the copy stream: one ready event, one wait, the copies, one done event.
//
// All or a prefix of the batch reaches the device. When a call is refused after copies were issued there is no event
// to tell when they end: settle() waits for them, so that what they touch can be let go.
#pragma once

#include <cstddef>
#include <vector>

#include "device/device.h"
#include "transfer/host_copy.h"

namespace vdnn {

// An offload on its way: its handle, and what must live until its owner stream has waited for it.
struct OutgoingCopy {
  std::shared_ptr<HostCopy> copy;
  Address source = 0;
  Stream producer;
  Stream owner;
  Keepalive keepalive;
};

class Submission {
 public:
  Submission(Device& device, Stream copy_stream, Timing timing)
      : device_(device), copy_stream_(copy_stream), timing_(timing) {}

  // The event after which all copies of the batch are complete. The batch has one producer stream.
  [[nodiscard]] Event put_on_stream(const std::vector<OutgoingCopy>& batch);
  // Before its first copy; empty without timing.
  [[nodiscard]] const Event& began() const noexcept { return began_; }
  // How many of the batch the device took before it refused something.
  [[nodiscard]] std::size_t copies_issued() const noexcept { return copies_issued_; }
  // Waits for them; false if even that is refused.
  [[nodiscard]] bool settle() const noexcept;

 private:
  Device& device_;
  const Stream copy_stream_;
  const Timing timing_;
  Event began_;
  std::size_t copies_issued_ = 0;
};

}  // namespace vdnn
