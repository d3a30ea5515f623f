// Issues reloads, waits for them and releases them.
#include "transfer/reload_lane.h"

#include <utility>

namespace vdnn {

std::shared_ptr<Reload> ReloadLane::issue(const std::shared_ptr<HostCopy>& copy, const Event& ready, Address target,
                                          Stream consumer, Keepalive target_keepalive) {
  auto reload = std::make_shared<Reload>(copy->bytes());
  reloads_.reserve(reloads_.size() + 1);  // so that an issued copy is always recorded
  bool issued = false;
  try {
    // The previous owner of the target's memory may have work on the consumer stream that has not run yet.
    device_.wait(stream_, device_.record(consumer));
    device_.wait(stream_, ready);
    if (timing_ == Timing::On) reload->began_ = device_.record(stream_, timing_);
    device_.copy_async(target, copy->block()->address(), copy->bytes(), CopyDirection::HostToDevice, stream_);
    issued = true;
    reload->done_ = device_.record(stream_, timing_);
  } catch (const std::exception&) {
    if (issued && !settle()) quarantine_.push_back({nullptr, copy, consumer, std::move(target_keepalive)});
    throw;
  }
  copy->block()->note_use(reload->done_);
  in_flight_bytes_ += reload->bytes();
  reloads_.push_back({reload, copy, consumer, std::move(target_keepalive)});
  return for_users(std::move(reload), drops_);
}

bool ReloadLane::settle() const noexcept {
  try {
    device_.drain(stream_);
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

// The consumer stream owns the target's memory, so it must wait even if another stream uses the memory first.
void ReloadLane::finish(std::size_t index, std::vector<Keepalive>& finished) {
  InFlight& in_flight = reloads_[index];
  device_.wait(in_flight.consumer, in_flight.reload->done_);
  in_flight.reload->in_flight_.store(false, std::memory_order_relaxed);
  in_flight_bytes_ -= in_flight.reload->bytes();
  finished.push_back(std::move(in_flight.keepalive));
  reloads_.erase(reloads_.begin() + static_cast<std::ptrdiff_t>(index));
}

void ReloadLane::wait(const std::shared_ptr<Reload>& reload, Stream stream, std::vector<Keepalive>& finished) {
  for (std::size_t index = 0; index < reloads_.size(); ++index) {
    if (reloads_[index].reload != reload) continue;
    const bool own = reloads_[index].consumer == stream;
    finish(index, finished);
    if (own) return;
    break;
  }
  device_.wait(stream, reload->done_);
}

void ReloadLane::finish_dropped(std::vector<Keepalive>& finished) {
  for (std::size_t index = reloads_.size(); index-- > 0;) {
    if (reloads_[index].reload.use_count() == 1) finish(index, finished);
  }
}

void ReloadLane::hand_back(std::vector<Keepalive>& finished) {
  for (auto* held : {&reloads_, &quarantine_}) {
    for (InFlight& in_flight : *held) finished.push_back(std::move(in_flight.keepalive));
    held->clear();
  }
  in_flight_bytes_ = 0;
}

void ReloadLane::move_to(Leftovers& leftovers) {
  for (auto* held : {&reloads_, &quarantine_}) {
    for (InFlight& in_flight : *held) {
      leftovers.keepalives.push_back(std::move(in_flight.keepalive));
      leftovers.blocks.push_back(in_flight.copy->block());
    }
  }
}

}  // namespace vdnn
