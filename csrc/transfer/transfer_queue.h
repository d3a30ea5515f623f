// The mover: offloads and reloads on two copy streams of their own, within byte windows.
//
// What must outlive what is written down: an offload's source is held from offload() until its owner stream has been
// made to wait for the copy; a reload's target until its consumer stream has been made to wait; a host block until
// the event of its last use. Nothing is polled and the host never blocks on a GPU: windows are kept by making streams
// wait. References to sources are handed back through take_released(), never dropped inside.
//
// Small offloads are batched: one ready event, one wait and one done event for all of them, submitted when the batch
// is full or anybody needs one of them.
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
  std::uint64_t window_waits = 0;      // a stream was made to wait because the offload window was full
  std::uint64_t refused_offloads = 0;  // no host memory: the storage stays on the device
  std::uint64_t cancelled = 0;         // dropped before the device was told
  std::uint64_t failed = 0;
};

class TransferQueue {
 public:
  TransferQueue(std::shared_ptr<Device> device, std::shared_ptr<PinnedPool> pool, const QueueOptions& options);
  TransferQueue(const TransferQueue&) = delete;  // copies in flight refer to it
  TransferQueue& operator=(const TransferQueue&) = delete;
  // Calls no driver: without close(), what copies may still touch is parked, and the next queue lets go of it. Not to
  // run in a forked child, where nothing may be waited for, ever: see LeakInForkedChild.
  ~TransferQueue();

  // Copies [source, +bytes) off the device once `producer` has come this far. `owner` is the stream on which the
  // source was allocated. Null when there is no host memory now (see Growth); then nothing is held.
  [[nodiscard]] std::shared_ptr<HostCopy> offload(Address source, std::uint64_t bytes, Stream producer, Stream owner,
                                                  Keepalive source_keepalive, Growth growth);
  // Makes the owner stream wait for the copy and hands the source back. Idempotent. False if the copy failed.
  bool release(const std::shared_ptr<HostCopy>& copy);
  // Copies back into [target, +bytes), allocated on `consumer`, once `consumer` has reached this point.
  [[nodiscard]] std::shared_ptr<Reload> reload(const std::shared_ptr<HostCopy>& copy, Address target, Stream consumer,
                                               Keepalive target_keepalive);
  // Whatever is put on `stream` from now on sees the reloaded bytes.
  void wait(const std::shared_ptr<Reload>& reload, Stream stream);
  // Submits what waits in a batch.
  void flush();
  // Takes care of copies whose handles were dropped. Also done by every offload, reload, release and wait.
  void collect();

  // The next offload applies a smaller window to the copies in flight.
  void set_offload_window(std::uint64_t bytes);

  // The event after which the host may read the block; submits the copy if it still waits in a batch.
  [[nodiscard]] Event ready(const std::shared_ptr<HostCopy>& copy);
  // The copy runs between these two; submits it if it still waits in a batch. For a queue that times its copies.
  [[nodiscard]] std::pair<Event, Event> span(const std::shared_ptr<HostCopy>& copy);
  [[nodiscard]] CopyState state(const std::shared_ptr<HostCopy>& copy);
  // For a failed copy: why, and the source it was made from.
  [[nodiscard]] std::pair<std::string, Keepalive> failure(const std::shared_ptr<HostCopy>& copy);
  // Sources that may be dropped on their owner streams, in order of release.
  [[nodiscard]] std::vector<Keepalive> take_released();
  // False if nothing would be taken now. Takes no lock: every hook asks. In a forked child the answer is the refusal.
  [[nodiscard]] bool may_have_released() const noexcept {
    return has_released_ || *drops_ != drops_seen_ || fork_guard_.in_forked_child();
  }
  // References that the queue itself no longer needs; the caller destroys them where that is safe.
  [[nodiscard]] std::vector<Keepalive> take_finished();

  [[nodiscard]] QueueStats stats();
  [[nodiscard]] const ForkGuard& fork_guard() const noexcept { return fork_guard_; }
  [[nodiscard]] Stream offload_stream() const noexcept { return to_host_; }
  [[nodiscard]] Stream reload_stream() const noexcept { return reloads_.stream(); }
  // Waits for all copies, then hands every reference back. Where the device refuses to be waited for, copies may still
  // run: what they touch is kept and the next close() tries again. Throws DeviceLost after letting go.
  void close();

 private:
  // Says on leaving, to those who ask without a lock, what there is to be taken.
  class Locked {
   public:
    explicit Locked(TransferQueue& queue) : queue_(queue), lock_(queue.mutex_) {}
    Locked(const Locked&) = delete;  // left once
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
  std::mutex mutex_;  // guards what follows
  QueueOptions options_;
  std::vector<OutgoingCopy> batch_;
  std::uint64_t batch_bytes_ = 0;
  std::deque<OutgoingCopy> in_flight_;  // submitted, source still held; oldest first
  ReloadLane reloads_;
  std::vector<Keepalive> released_;
  std::vector<Keepalive> finished_;
  std::vector<Keepalive> quarantine_;  // may be touched by copies whose end nobody can tell
  std::vector<std::shared_ptr<PinnedBlock>> quarantined_blocks_;
  std::atomic<std::uint64_t> drops_seen_{0};
  std::atomic<bool> has_released_{false};
  std::atomic<bool> has_finished_{true};  // what other queues left behind
  QueueStats stats_;
  bool closed_ = false;
};

}  // namespace vdnn
