// Submission, window, release and recovery of the TransferQueue.
#include "transfer/transfer_queue.h"

#include <algorithm>
#include <iterator>

#include "device/errors.h"
#include "device/owned_memory.h"
#include "device/parked.h"
#include "transfer/leftovers.h"

namespace vdnn {

namespace {

// Runs before a stream is created: a constructor that throws must leave nothing on the device.
std::shared_ptr<Device> checked(std::shared_ptr<Device> device, const std::shared_ptr<PinnedPool>& pool,
                                const QueueOptions& options) {
  if (device == nullptr || pool == nullptr) throw InvalidArgument("device and pool", "a device and a pool", "none");
  if (pool->device() != device) throw DeviceMismatch("pinned pool", device->info().name);
  require_window(options.offload_window_bytes);
  return device;
}

}  // namespace

TransferQueue::TransferQueue(std::shared_ptr<Device> device, std::shared_ptr<PinnedPool> pool,
                             const QueueOptions& options)
    : device_(checked(std::move(device), pool, options)),
      pool_(std::move(pool)),
      drops_(std::make_shared<std::atomic<std::uint64_t>>(0)),
      to_host_(device_->borrow_stream(Leftovers::kToHost)),
      options_(options),
      reloads_(*device_, device_->borrow_stream(Leftovers::kToDevice), options.timing, drops_),
      finished_(Leftovers::take_all()) {}

TransferQueue::~TransferQueue() {
  if (in_flight_.empty() && reloads_.empty() && quarantine_.empty()) {
    device_->give_back(Leftovers::kToHost, to_host_);
    device_->give_back(Leftovers::kToDevice, reloads_.stream());
    return;
  }
  auto left = std::make_unique<Leftovers>();
  left->device = device_;
  left->to_host = to_host_;
  left->to_device = reloads_.stream();
  for (OutgoingCopy& offload : in_flight_) {
    left->keepalives.push_back(std::move(offload.keepalive));
    left->blocks.push_back(offload.copy->block_);
  }
  reloads_.move_to(*left);
  std::move(quarantine_.begin(), quarantine_.end(), std::back_inserter(left->keepalives));
  std::move(quarantined_blocks_.begin(), quarantined_blocks_.end(), std::back_inserter(left->blocks));
  park(std::move(left));
}

TransferQueue::Locked TransferQueue::lock() {
  fork_guard_.refuse_in_child("transfer queue");
  return Locked(*this);
}

void TransferQueue::require_open() const {
  if (closed_) throw Closed("transfer queue", "close() was called");
}

std::shared_ptr<HostCopy> TransferQueue::offload(Address source, std::uint64_t bytes, Stream producer, Stream owner,
                                                 Keepalive source_keepalive, Growth growth) {
  require_copy_arguments(source, source, bytes);
  if (bytes == 0) throw InvalidArgument("bytes", "at least 1 byte", "0");
  // Throws for streams of other devices before the queue holds anything.
  static_cast<void>(device_->stream_name(producer));
  if (!(owner == producer)) static_cast<void>(device_->stream_name(owner));
  collect();  // first, so that the blocks of dropped copies can be reused
  // Outside the lock: this may pin memory, and other threads may need the queue meanwhile.
  std::shared_ptr<PinnedBlock> block = pool_->allocate(bytes, growth);
  const auto locked = lock();
  require_open();
  if (block == nullptr) {
    ++stats_.refused_offloads;
    return nullptr;
  }
  keep_window(bytes);
  auto copy = std::make_shared<HostCopy>(std::move(block), bytes);
  // Before the queue owns the source: if this throws, the source must not be destroyed under the queue's lock.
  if (!batch_.empty() && (!is_small(bytes) || !(batch_.front().producer == producer))) flush_batch();
  OutgoingCopy offload{copy, source, producer, owner, std::move(source_keepalive)};
  ++stats_.offloads;
  stats_.offloaded_bytes += bytes;
  stats_.offload_in_flight_bytes += bytes;
  try {
    submit_or_queue(std::move(offload));
  } catch (...) {
    // The caller gets no handle. Return the source of a failed copy here; treat a submitted copy as dropped.
    if (copy->kept_source_ != nullptr) finished_.push_back(std::move(copy->kept_source_));
    drops_->fetch_add(1);
    throw;
  }
  return for_users(std::move(copy), drops_);
}

void TransferQueue::submit_or_queue(OutgoingCopy offload) {
  const std::uint64_t bytes = offload.copy->bytes_;
  if (!is_small(bytes)) {
    std::vector<OutgoingCopy> alone;
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

void TransferQueue::submit(std::vector<OutgoingCopy> batch) {
  Submission submission(*device_, to_host_, options_.timing);
  Event done;
  try {
    done = submission.put_on_stream(batch);
  } catch (const std::exception& error) {
    recover(batch, submission, error.what());
    throw;
  }
  ++stats_.submissions;
  for (OutgoingCopy& outgoing : batch) {
    outgoing.copy->state_ = CopyState::Submitted;
    outgoing.copy->began_ = submission.began();
    outgoing.copy->ready_ = done;
    outgoing.copy->block_->note_use(done);
    in_flight_.push_back(std::move(outgoing));
  }
}

// Copies of the batch that the device accepted may still run, and no event marks their end.
void TransferQueue::recover(std::vector<OutgoingCopy>& batch, const Submission& submission,
                            const std::string& failure) {
  const std::size_t copies_issued = submission.copies_issued();
  const bool settled = submission.settle();
  for (std::size_t index = 0; index < batch.size(); ++index) {
    OutgoingCopy& offload = batch[index];
    if (settled && index < copies_issued) {
      // The copy is complete, so the empty event, which has happened, is its ready event.
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

void TransferQueue::mark_failed(OutgoingCopy& offload, const std::string& failure) {
  stats_.offload_in_flight_bytes -= offload.copy->bytes_;
  ++stats_.failed;
  offload.copy->state_ = CopyState::Failed;
  offload.copy->failure_ = failure;
  // Not destroyed here: that could run Python code under the queue's lock.
  Keepalive& home = offload.copy.use_count() > 1 ? offload.copy->kept_source_ : finished_.emplace_back();
  home = std::move(offload.keepalive);
}

void TransferQueue::release_in_flight(std::deque<OutgoingCopy>::iterator offload) {
  device_->wait(offload->owner, offload->copy->ready_);
  offload->copy->in_flight_.store(false, std::memory_order_relaxed);
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
  const auto found = std::find_if(in_flight_.begin(), in_flight_.end(),
                                  [&](const OutgoingCopy& offload) { return offload.copy == copy; });
  if (found != in_flight_.end()) release_in_flight(found);
  return true;
}

std::shared_ptr<Reload> TransferQueue::reload(const std::shared_ptr<HostCopy>& copy, Address target, Stream consumer,
                                              Keepalive target_keepalive) {
  const auto locked = lock();
  require_open();
  collect_dropped();
  if (copy->state_ == CopyState::Queued) flush_batch();
  if (copy->state_ == CopyState::Failed) {
    throw InvalidArgument("copy", "a copy that reached the host", "one that failed: " + copy->failure_);
  }
  try {
    auto reload = reloads_.issue(copy, copy->ready_, target, consumer, std::move(target_keepalive));
    ++stats_.reloads;
    stats_.reloaded_bytes += copy->bytes_;
    return reload;
  } catch (const std::exception&) {
    ++stats_.failed;
    throw;
  }
}

void TransferQueue::wait(const std::shared_ptr<Reload>& reload, Stream stream) {
  const auto locked = lock();
  require_open();
  reloads_.wait(reload, stream, finished_);
  collect_dropped();
}

void TransferQueue::collect_dropped() {
  const std::uint64_t drops = drops_->load(std::memory_order_acquire);
  if (drops == drops_seen_) return;
  // Search from the newest, which is usually dropped first.
  std::uint64_t missing = drops - drops_seen_.exchange(drops);
  // use_count() == 1: only the queue refers to the copy, and no thread can get a new reference.
  const auto dropped = [](const OutgoingCopy& offload) { return offload.copy.use_count() == 1; };
  for (std::size_t index = batch_.size(); index-- > 0 && missing > 0;) {
    if (!dropped(batch_[index])) continue;
    const std::uint64_t bytes = batch_[index].copy->bytes_;
    batch_bytes_ -= bytes;
    stats_.offload_in_flight_bytes -= bytes;
    released_.push_back(std::move(batch_[index].keepalive));
    batch_.erase(batch_.begin() + static_cast<std::ptrdiff_t>(index));
    ++stats_.cancelled;
    --missing;
  }
  for (std::size_t index = in_flight_.size(); index-- > 0 && missing > 0;) {
    if (!dropped(in_flight_[index])) continue;
    release_in_flight(in_flight_.begin() + static_cast<std::ptrdiff_t>(index));
    --missing;
  }
  reloads_.finish_dropped(finished_);
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

std::pair<Event, Event> TransferQueue::span(const std::shared_ptr<HostCopy>& copy) {
  Event done = ready(copy);
  const auto locked = lock();
  return {copy->began_, std::move(done)};
}

void TransferQueue::set_offload_window(std::uint64_t bytes) {
  require_window(bytes);
  const auto locked = lock();
  options_.offload_window_bytes = bytes;
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
  // A graph may have been freed since the last call: release what its copies hold now, because the next call may come
  // late.
  if (!closed_) collect_dropped();
  return std::exchange(released_, {});
}

std::vector<Keepalive> TransferQueue::take_finished() {
  if (fork_guard_.in_forked_child() || !has_finished_) return {};  // called after every queue call, even one that threw
  const auto locked = lock();
  return std::exchange(finished_, {});
}

QueueStats TransferQueue::stats() {
  const auto locked = lock();
  stats_.reload_in_flight_bytes = reloads_.in_flight_bytes();
  return stats_;
}

void TransferQueue::close() {
  if (fork_guard_.in_forked_child()) return;
  const auto locked = lock();
  const bool nothing_held = in_flight_.empty() && reloads_.empty() && quarantine_.empty();
  if (closed_ && nothing_held) return;
  closed_ = true;
  for (OutgoingCopy& offload : batch_) mark_failed(offload, "the queue was closed before the copy was submitted");
  batch_.clear();
  std::exception_ptr lost;
  for (const Stream stream : {to_host_, reloads_.stream()}) {
    try {
      if (!device_->closed()) device_->drain(stream);
    } catch (const DeviceLost&) {
      lost = std::current_exception();  // nothing runs on a lost device any more
    }
    // After any other error copies may still run. The error propagates, and the queue keeps the memory that they access
    // for the next close() or the destructor.
  }
  for (OutgoingCopy& offload : in_flight_) released_.push_back(std::move(offload.keepalive));
  reloads_.hand_back(finished_);
  std::move(quarantine_.begin(), quarantine_.end(), std::back_inserter(finished_));
  in_flight_.clear();
  quarantine_.clear();
  quarantined_blocks_.clear();
  stats_.offload_in_flight_bytes = 0;
  if (lost != nullptr) std::rethrow_exception(lost);
}

}  // namespace vdnn
