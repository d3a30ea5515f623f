// Reloads in flight: from the moment a reload is issued until a stream waits for it.
//
// Holds what running copies access: the target's keepalive and the host copy. Not synchronized: the queue's lock guards
// it. References that are no longer needed are appended to a list, which the queue destroys where that is safe.
#pragma once

#include <memory>
#include <vector>

#include "device/device.h"
#include "transfer/drop_notice.h"
#include "transfer/host_copy.h"
#include "transfer/leftovers.h"

namespace vdnn {

class ReloadLane {
 public:
  ReloadLane(Device& device, Stream stream, Timing timing, DropCount drops)
      : device_(device), stream_(stream), timing_(timing), drops_(std::move(drops)) {}

  [[nodiscard]] Stream stream() const noexcept { return stream_; }
  [[nodiscard]] std::uint64_t in_flight_bytes() const noexcept { return in_flight_bytes_; }
  [[nodiscard]] bool empty() const noexcept { return reloads_.empty() && quarantine_.empty(); }

  // `ready` is the event after which the host copy is complete. If the device refuses, the lane keeps the memory that a
  // copy may still access until close(), and throws the device's error.
  [[nodiscard]] std::shared_ptr<Reload> issue(const std::shared_ptr<HostCopy>& copy, const Event& ready, Address target,
                                              Stream consumer, Keepalive target_keepalive);
  // Makes both `stream` and the consumer stream wait for the reload.
  void wait(const std::shared_ptr<Reload>& reload, Stream stream, std::vector<Keepalive>& finished);
  // Finishes the reloads whose handles were dropped.
  void finish_dropped(std::vector<Keepalive>& finished);
  // Appends all references to `finished`. Requires that no copy is running.
  void hand_back(std::vector<Keepalive>& finished);
  // Moves all references to `leftovers`, because copies may be running and the queue will not wait for them.
  void move_to(Leftovers& leftovers);

 private:
  struct InFlight {
    std::shared_ptr<Reload> reload;
    std::shared_ptr<HostCopy> copy;
    Stream consumer;
    Keepalive keepalive;
  };
  void finish(std::size_t index, std::vector<Keepalive>& finished);
  [[nodiscard]] bool settle() const noexcept;

  Device& device_;
  const Stream stream_;
  const Timing timing_;
  const DropCount drops_;
  std::vector<InFlight> reloads_;
  std::uint64_t in_flight_bytes_ = 0;
  std::vector<InFlight> quarantine_;  // for copies that may run without an event that marks their end
};

}  // namespace vdnn
