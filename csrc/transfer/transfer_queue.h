// Offloads and reloads storages on two copy streams of its own. A window limits the bytes of offloads in flight.
//
// Lifetimes: the queue holds the source of an offload until the owner stream waits for the copy, the target of a reload
// until the consumer stream waits, and a host block until the event of its last use. The queue does not poll, and the
// host does not block on a GPU: to keep the window, the queue makes streams wait. References to sources are returned
// through take_released(); the queue itself does not destroy them.
//
// Small offloads are batched: they share one ready event, one wait and one done event. A batch is submitted when it is
// full or when one of its copies is needed.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "device/fork_guard.h"
#include "transfer/host_copy.h"
#include "transfer/queue_options.h"
#include "transfer/reload_lane.h"
#include "transfer/submission.h"

namespace vdnn {

struct QueueStats {
  std::uint64_t offloads = 0;
  std::uint64_t offloaded_bytes = 0;
  std::uint64_t reloads = 0;
  std::uint64_t reloaded_bytes = 0;
  std::uint64_t submissions = 0;  // batches count once
  std::uint64_t offload_in_flight_bytes = 0;
  std::uint64_t reload_in_flight_bytes = 0;
  std::uint64_t window_waits = 0;      // times that a stream had to wait because the offload window was full
  std::uint64_t refused_offloads = 0;  // no host memory, so the storage stays on the device
  std::uint64_t cancelled = 0;         // dropped before they were submitted
  std::uint64_t failed = 0;
};

class TransferQueue {
 public:
  TransferQueue(std::shared_ptr<Device> device, std::shared_ptr<PinnedPool> pool, const QueueOptions& options);
  TransferQueue(const TransferQueue&) = delete;  // copies in flight refer to it
  TransferQueue& operator=(const TransferQueue&) = delete;
  // Does not call the driver. Without close(), the memory that copies may still access is parked; see leftovers.h.
  // Must not run in a forked child, which can never wait for copies: see LeakInForkedChild.
  ~TransferQueue();

  // Copies [source, +bytes) to the host once `producer` has reached this point. `owner` is the stream on which the
  // source was allocated. Returns null, and holds nothing, if there is no host memory now (see Growth).
  [[nodiscard]] std::shared_ptr<HostCopy> offload(Address source, std::uint64_t bytes, Stream producer, Stream owner,
                                                  Keepalive source_keepalive, Growth growth);
  // Makes the owner stream wait for the copy and releases the source. Idempotent. Returns false if the copy failed.
  bool release(const std::shared_ptr<HostCopy>& copy);
  // Copies back into [target, +bytes), allocated on `consumer`, once `consumer` has reached this point.
  [[nodiscard]] std::shared_ptr<Reload> reload(const std::shared_ptr<HostCopy>& copy, Address target, Stream consumer,
                                               Keepalive target_keepalive);
  // Work issued to `stream` from now on sees the reloaded bytes.
  void wait(const std::shared_ptr<Reload>& reload, Stream stream);
  // Submits the copies that wait in a batch.
  void flush();
  // Releases copies whose handles were dropped. Every offload, reload, release and wait does this too.
  void collect();

  // The next offload applies a smaller window to the copies in flight.
  void set_offload_window(std::uint64_t bytes);

  // The event after which the host may read the block; submits the copy if it still waits in a batch.
  [[nodiscard]] Event ready(const std::shared_ptr<HostCopy>& copy);
  // The events before and after the copy, for a queue that times its copies. Submits the copy if it waits in a batch.
  [[nodiscard]] std::pair<Event, Event> span(const std::shared_ptr<HostCopy>& copy);
  [[nodiscard]] CopyState state(const std::shared_ptr<HostCopy>& copy);
  // For a failed copy: the reason, and the source.
  [[nodiscard]] std::pair<std::string, Keepalive> failure(const std::shared_ptr<HostCopy>& copy);
  // Returns the released sources, in order of release; they may be dropped now.
  [[nodiscard]] std::vector<Keepalive> take_released();
  // False if take_released() would return nothing. Takes no lock, because every hook calls it. True in a forked child,
  // where take_released() throws.
  [[nodiscard]] bool may_have_released() const noexcept {
    return has_released_ || *drops_ != drops_seen_ || fork_guard_.in_forked_child();
  }
  // Returns references that the queue no longer needs; the caller destroys them where that is safe.
  [[nodiscard]] std::vector<Keepalive> take_finished();

  [[nodiscard]] QueueStats stats();
  [[nodiscard]] const ForkGuard& fork_guard() const noexcept { return fork_guard_; }
  [[nodiscard]] Stream offload_stream() const noexcept { return to_host_; }
  [[nodiscard]] Stream reload_stream() const noexcept { return reloads_.stream(); }
  // Waits for all copies, then returns every reference. If the device refuses to wait, copies may still run: the queue
  // keeps the memory that they access, and the next close() tries again. Throws DeviceLost after returning references.
  void close();

 private:
  // Holds the lock. On destruction, publishes whether there is anything to take, for callers that read this without the
  // lock.
  class Locked {
   public:
    explicit Locked(TransferQueue& queue) : queue_(queue), lock_(queue.mutex_) {}
    Locked(const Locked&) = delete;  // unlocks once
    Locked& operator=(const Locked&) = delete;
    ~Locked() {
      queue_.has_released_.store(!queue_.released_.empty(), std::memory_order_release);
      queue_.has_finished_.store(!queue_.finished_.empty(), std::memory_order_release);
    }

   private:
    TransferQueue& queue_;
    const std::lock_guard<std::mutex> lock_;
  };
  [[nodiscard]] Locked lock();
  void require_open() const;
  void flush_batch();
  void submit(std::vector<OutgoingCopy> batch);
  void recover(std::vector<OutgoingCopy>& batch, const Submission& submission, const std::string& failure);
  void mark_failed(OutgoingCopy& offload, const std::string& failure);
  void submit_or_queue(OutgoingCopy offload);
  [[nodiscard]] bool is_small(std::uint64_t bytes) const;
  void keep_window(std::uint64_t bytes);
  void release_oldest();
  void release_in_flight(std::deque<OutgoingCopy>::iterator offload);
  void collect_dropped();

  const std::shared_ptr<Device> device_;
  const std::shared_ptr<PinnedPool> pool_;
  const DropCount drops_;
  const Stream to_host_;
  const ForkGuard fork_guard_;
  std::mutex mutex_;  // guards the members below
  QueueOptions options_;
  std::vector<OutgoingCopy> batch_;
  std::uint64_t batch_bytes_ = 0;
  std::deque<OutgoingCopy> in_flight_;  // submitted copies whose source is still held, oldest first
  ReloadLane reloads_;
  std::vector<Keepalive> released_;
  std::vector<Keepalive> finished_;
  std::vector<Keepalive> quarantine_;  // for copies that may run without an event that marks their end
  std::vector<std::shared_ptr<PinnedBlock>> quarantined_blocks_;
  std::atomic<std::uint64_t> drops_seen_{0};
  std::atomic<bool> has_released_{false};
  std::atomic<bool> has_finished_{true};  // true at first, for the references of parked queues
  QueueStats stats_;
  bool closed_ = false;
};

}  // namespace vdnn
