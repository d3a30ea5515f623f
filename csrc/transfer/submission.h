// Issues a batch of offloads to the copy stream: one ready event, one wait, the copies, one done event.
//
// All or a prefix of the batch reaches the device. If the device refuses a call after copies were issued, no event
// marks their end; settle() waits for them, so that the memory that they access can be released.
#pragma once

#include <cstddef>
#include <vector>

#include "device/device.h"
#include "transfer/host_copy.h"

namespace vdnn {

// An offload in flight: its handle, and the objects that must live until the owner stream waits for the copy.
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

  // Issues the batch and returns the event after which all its copies are complete. A batch has one producer stream.
  [[nodiscard]] Event put_on_stream(const std::vector<OutgoingCopy>& batch);
  // The event before the first copy; empty without timing.
  [[nodiscard]] const Event& began() const noexcept { return began_; }
  // The number of copies that the device accepted before it refused a call.
  [[nodiscard]] std::size_t copies_issued() const noexcept { return copies_issued_; }
  // Waits for the issued copies. Returns false if the device refuses that too.
  [[nodiscard]] bool settle() const noexcept;

 private:
  Device& device_;
  const Stream copy_stream_;
  const Timing timing_;
  Event began_;
  std::size_t copies_issued_ = 0;
};

}  // namespace vdnn
