// Submission, windows, release and recovery of the TransferQueue.
#include "transfer/transfer_queue.h"

#include <algorithm>
#include <iterator>

#include "device/errors.h"
#include "device/owned_memory.h"
#include "device/parked.h"

namespace vdnn {

namespace {

template <class Part>
std::shared_ptr<Part> present(std::shared_ptr<Part> part, const char* name) {
  if (part == nullptr) throw InvalidArgument(name, "an object", "none");
  return part;
}

}  // namespace

struct TransferQueue::Leftovers {
  std::shared_ptr<Device> device;
  Stream to_host;
  Stream to_device;
  std::vector<Keepalive> keepalives;
  std::vector<std::shared_ptr<PinnedBlock>> blocks;
  Leftovers* next_returned = nullptr;
};

TransferQueue::TransferQueue(std::shared_ptr<Device> device, std::shared_ptr<PinnedPool> pool,
                             const QueueOptions& options)
    : device_(present(std::move(device), "device")),
      pool_(present(std::move(pool), "pool")),
      options_(options),
      to_host_(device_->create_stream("vdnn offload")),
      to_device_(device_->create_stream("vdnn reload")) {
  if (pool_->device() != device_) throw DeviceMismatch("pinned pool", device_->info().name);
  if (options_.offload_window_bytes == 0) throw InvalidArgument("offload_window_bytes", "at least 1 byte", "0");
  if (options_.reload_window_bytes == 0) throw InvalidArgument("reload_window_bytes", "at least 1 byte", "0");
  take_leftovers();
}

TransferQueue::~TransferQueue() {
  // In a forked child nothing may be waited for, ever: what is held stays held until the child ends.
  if (closed_ || (in_flight_.empty() && reloads_.empty() && quarantine_.empty())) return;
  auto left = std::make_unique<Leftovers>();
  left->device = device_;
  left->to_host = to_host_;
  left->to_device = to_device_;
  for (Offload& offload : in_flight_) {
    left->keepalives.push_back(std::move(offload.keepalive));
    left->blocks.push_back(offload.copy->block_);
  }
  for (ReloadInFlight& reload : reloads_) {
    left->keepalives.push_back(std::move(reload.keepalive));
    left->blocks.push_back(reload.copy->block_);
  }
  std::move(quarantine_.begin(), quarantine_.end(), std::back_inserter(left->keepalives));
  std::move(quarantined_blocks_.begin(), quarantined_blocks_.end(), std::back_inserter(left->blocks));
  parked<Leftovers>().push(left.release());
}

void TransferQueue::take_leftovers() {
  for (Leftovers* left = parked<Leftovers>().take_all(); left != nullptr;) {
    const std::unique_ptr<Leftovers> owned(left);
    left = owned->next_returned;
    for (const Stream stream : {owned->to_host, owned->to_device}) {
      try {
        owned->device->drain(stream);
      } catch (const Error&) {
        continue;  // closed, and so drained; or lost, and nothing runs on it any more
      }
    }
    std::move(owned->keepalives.begin(), owned->keepalives.end(), std::back_inserter(finished_));
  }
}

std::unique_lock<std::mutex> TransferQueue::lock() {
  fork_guard_.refuse_in_child("transfer queue");
  return std::unique_lock<std::mutex>(mutex_);
}

void TransferQueue::require_open() const {
  if (closed_) throw Closed("transfer queue", "close() was called");
}

std::shared_ptr<HostCopy> TransferQueue::offload(Address source, std::uint64_t bytes, Stream producer, Stream owner,
                                                 Keepalive source_keepalive, Growth growth) {
  require_copy_arguments(source, source, bytes);
  if (bytes == 0) throw InvalidArgument("bytes", "at least 1 byte", "0");
  // Refuses streams of other devices before anything is held.
  static_cast<void>(device_->stream_name(producer));
  static_cast<void>(device_->stream_name(owner));
  collect();  // first, so that the blocks of dropped copies can be had again
  // Outside the lock: this may pin memory, and other threads have copies to wait for.
  std::shared_ptr<PinnedBlock> block = pool_->allocate(bytes, growth);
  const auto locked = lock();
  require_open();
  if (block == nullptr) {
    ++stats_.refused_offloads;
    return nullptr;
  }
  keep_window(bytes);
  auto copy = std::make_shared<HostCopy>(std::move(block), bytes);
  Offload offload{copy, source, producer, owner, std::move(source_keepalive)};
  if (!batch_.empty() && (!is_small(bytes) || !(batch_.front().producer == producer))) flush_batch();
  ++stats_.offloads;
  stats_.offloaded_bytes += bytes;
  stats_.offload_in_flight_bytes += bytes;
  try {
    submit_or_queue(std::move(offload));
  } catch (...) {
    // The caller gets no handle, so the source goes back with the other references that may be dropped.
    finished_.push_back(std::move(copy->kept_source_));
    throw;
  }
  return copy;
}

void TransferQueue::submit_or_queue(Offload offload) {
  const std::uint64_t bytes = offload.copy->bytes_;
  if (!is_small(bytes)) {
    std::vector<Offload> alone;
    alone.push_back(std::move(offload));
    submit(std::move(alone));
    return;
  }
  batch_bytes_ += bytes;
  batch_.push_back(std::move(offload));
  if (batch_bytes_ >= options_.batch_bytes) flush_batch();
}

bool TransferQueue::is_small(std::uint64_t bytes) const {
  return bytes <= options_.small_copy_bytes && bytes < options_.batch_bytes;
}

void TransferQueue::flush_batch() {
  batch_bytes_ = 0;
  if (batch_.empty()) return;
  submit(std::exchange(batch_, {}));
}

void TransferQueue::flush() {
  const auto locked = lock();
  require_open();
  collect_dropped();
  flush_batch();
}

void TransferQueue::put_on_stream(const std::vector<Offload>& batch, std::size_t& copies_issued) {
  device_->wait(to_host_, device_->record(batch.front().producer));
  for (const Offload& offload : batch) {
    const PinnedBlock& block = *offload.copy->block_;
    for (const Event& use : block.last_uses().events()) device_->wait(to_host_, use);
    device_->copy_async(block.address(), offload.source, offload.copy->bytes_, CopyDirection::DeviceToHost, to_host_);
    ++copies_issued;
  }
  const Event done = device_->record(to_host_);
  for (const Offload& offload : batch) {
    offload.copy->state_ = CopyState::Submitted;
    offload.copy->ready_ = done;
    offload.copy->block_->note_use(done);
  }
}

void TransferQueue::submit(std::vector<Offload> batch) {
  std::size_t copies_issued = 0;
  try {
    put_on_stream(batch, copies_issued);
  } catch (const std::exception& error) {
    recover(batch, copies_issued, error.what());
    throw;
  }
  ++stats_.submissions;
  for (Offload& offload : batch) in_flight_.push_back(std::move(offload));
}

// Copies of the batch that the device took may still run, with no event to tell when they end.
void TransferQueue::recover(std::vector<Offload>& batch, std::size_t copies_issued, const std::string& failure) {
  const bool settled = copies_issued == 0 || settle(to_host_);
  for (std::size_t index = 0; index < batch.size(); ++index) {
    Offload& offload = batch[index];
    if (settled && index < copies_issued) {
      // Complete: it has happened, so the empty event says all there is to say.
      offload.copy->state_ = CopyState::Submitted;
      in_flight_.push_back(std::move(offload));
      continue;
    }
    if (!settled && index < copies_issued) {
      quarantine_.push_back(offload.keepalive);
      quarantined_blocks_.push_back(offload.copy->block_);
    }
    mark_failed(offload, failure);
  }
}

void TransferQueue::mark_failed(Offload& offload, const std::string& failure) {
  stats_.offload_in_flight_bytes -= offload.copy->bytes_;
  ++stats_.failed;
  offload.copy->state_ = CopyState::Failed;
  offload.copy->failure_ = failure;
  // Never dropped here: that could run Python code under our lock.
  Keepalive& home = offload.copy.use_count() > 1 ? offload.copy->kept_source_ : finished_.emplace_back();
  home = std::move(offload.keepalive);
}

bool TransferQueue::settle(Stream stream) noexcept {
  try {
    device_->drain(stream);
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

void TransferQueue::release_in_flight(std::deque<Offload>::iterator offload) {
  device_->wait(offload->owner, offload->copy->ready_);
  stats_.offload_in_flight_bytes -= offload->copy->bytes_;
  released_.push_back(std::move(offload->keepalive));
  in_flight_.erase(offload);
}

void TransferQueue::release_oldest() {
  if (in_flight_.empty()) flush_batch();
  release_in_flight(in_flight_.begin());
}

void TransferQueue::keep_window(std::uint64_t bytes) {
  while (stats_.offload_in_flight_bytes > 0 && stats_.offload_in_flight_bytes + bytes > options_.offload_window_bytes) {
    release_oldest();
    ++stats_.window_waits;
  }
}

bool TransferQueue::release(const std::shared_ptr<HostCopy>& copy) {
  const auto locked = lock();
  require_open();
  collect_dropped();
  if (copy->state_ == CopyState::Queued) flush_batch();
  if (copy->state_ == CopyState::Failed) return false;
  const auto found =
      std::find_if(in_flight_.begin(), in_flight_.end(), [&](const Offload& offload) { return offload.copy == copy; });
  if (found != in_flight_.end()) release_in_flight(found);
  return true;
}

std::shared_ptr<Reload> TransferQueue::reload(const std::shared_ptr<HostCopy>& copy, Address target, Stream consumer,
                                              Keepalive target_keepalive, bool demand) {
  const auto locked = lock();
  require_open();
  collect_dropped();
  if (copy->state_ == CopyState::Queued) flush_batch();
  if (copy->state_ == CopyState::Failed) {
    throw InvalidArgument("copy", "a copy that reached the host", "one that failed: " + copy->failure_);
  }
  const std::uint64_t bytes = copy->bytes_;
  const bool full = stats_.reload_in_flight_bytes + bytes > options_.reload_window_bytes;
  if (full && !demand && stats_.reload_in_flight_bytes > 0) {
    ++stats_.refused_reloads;
    return nullptr;
  }
  auto reload = std::make_shared<Reload>(bytes);
  bool issued = false;
  try {
    // The target's memory may have been freed by work that the consumer stream has yet to run.
    device_->wait(to_device_, device_->record(consumer));
    device_->wait(to_device_, copy->ready_);
    device_->copy_async(target, copy->block_->address(), bytes, CopyDirection::HostToDevice, to_device_);
    issued = true;
    reload->done_ = device_->record(to_device_);
  } catch (const std::exception&) {
    if (issued && !settle(to_device_)) {
      quarantine_.push_back(std::move(target_keepalive));
      quarantined_blocks_.push_back(copy->block_);
    }
    ++stats_.failed;
    throw;
  }
  copy->block_->note_use(reload->done_);
  reloads_.push_back({reload, copy, consumer, std::move(target_keepalive)});
  ++stats_.reloads;
  stats_.reloaded_bytes += bytes;
  stats_.reload_in_flight_bytes += bytes;
  return reload;
}

void TransferQueue::finish_reload(std::size_t index, Stream stream) {
  ReloadInFlight& in_flight = reloads_[index];
  device_->wait(stream, in_flight.reload->done_);
  in_flight.reload->waited_ = true;
  stats_.reload_in_flight_bytes -= in_flight.reload->bytes_;
  finished_.push_back(std::move(in_flight.keepalive));
  reloads_.erase(reloads_.begin() + static_cast<std::ptrdiff_t>(index));
}

void TransferQueue::wait(const std::shared_ptr<Reload>& reload, Stream stream) {
  const auto locked = lock();
  require_open();
  for (std::size_t index = 0; index < reloads_.size(); ++index) {
    if (reloads_[index].reload != reload) continue;
    // The consumer stream owns the target, so it must wait even if another stream is the first to use it.
    if (!(reloads_[index].consumer == stream)) device_->wait(reloads_[index].consumer, reload->done_);
    finish_reload(index, stream);
    collect_dropped();
    return;
  }
  device_->wait(stream, reload->done_);  // waited for before, perhaps on another stream
  collect_dropped();
}

void TransferQueue::collect_dropped() {
  // use_count() == 1: only the queue still refers to it. Nobody can get a new reference meanwhile.
  const auto dropped = [](const Offload& offload) { return offload.copy.use_count() == 1; };
  for (std::size_t index = batch_.size(); index-- > 0;) {
    if (!dropped(batch_[index])) continue;
    const std::uint64_t bytes = batch_[index].copy->bytes_;
    batch_bytes_ -= bytes;
    stats_.offload_in_flight_bytes -= bytes;
    released_.push_back(std::move(batch_[index].keepalive));
    batch_.erase(batch_.begin() + static_cast<std::ptrdiff_t>(index));
    ++stats_.cancelled;
  }
  for (std::size_t index = in_flight_.size(); index-- > 0;) {
    const auto offload = in_flight_.begin() + static_cast<std::ptrdiff_t>(index);
    if (dropped(*offload)) release_in_flight(offload);
  }
  for (std::size_t index = reloads_.size(); index-- > 0;) {
    if (reloads_[index].reload.use_count() == 1) finish_reload(index, reloads_[index].consumer);
  }
}

void TransferQueue::collect() {
  const auto locked = lock();
  require_open();
  collect_dropped();
}

Event TransferQueue::ready(const std::shared_ptr<HostCopy>& copy) {
  const auto locked = lock();
  if (copy->state_ == CopyState::Queued) {
    require_open();
    flush_batch();
  }
  return copy->ready_;
}

CopyState TransferQueue::state(const std::shared_ptr<HostCopy>& copy) {
  const auto locked = lock();
  return copy->state_;
}

std::pair<std::string, Keepalive> TransferQueue::failure(const std::shared_ptr<HostCopy>& copy) {
  const auto locked = lock();
  return {copy->failure_, copy->kept_source_};
}

std::vector<Keepalive> TransferQueue::take_released() {
  const auto locked = lock();
  return std::exchange(released_, {});
}

std::vector<Keepalive> TransferQueue::take_finished() {
  if (fork_guard_.in_forked_child()) return {};  // asked on every way out, also of a call that was refused
  const auto locked = lock();
  return std::exchange(finished_, {});
}

QueueStats TransferQueue::stats() {
  const auto locked = lock();
  return stats_;
}

void TransferQueue::close() {
  if (fork_guard_.in_forked_child()) return;
  const auto locked = lock();
  if (closed_) return;
  closed_ = true;
  for (Offload& offload : batch_) mark_failed(offload, "the queue was closed before the copy was submitted");
  batch_.clear();
  std::exception_ptr first_error;
  for (const Stream stream : {to_host_, to_device_}) {
    try {
      if (!device_->closed()) device_->drain(stream);
    } catch (...) {
      if (first_error == nullptr) first_error = std::current_exception();
    }
  }
  for (Offload& offload : in_flight_) released_.push_back(std::move(offload.keepalive));
  for (ReloadInFlight& reload : reloads_) finished_.push_back(std::move(reload.keepalive));
  std::move(quarantine_.begin(), quarantine_.end(), std::back_inserter(finished_));
  in_flight_.clear();
  reloads_.clear();
  quarantine_.clear();
  quarantined_blocks_.clear();
  stats_.offload_in_flight_bytes = 0;
  stats_.reload_in_flight_bytes = 0;
  if (first_error != nullptr) std::rethrow_exception(first_error);
}

}  // namespace vdnn
