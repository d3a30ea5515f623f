// Pinned host memory for copies: exact sizes, reused behind events, under a hard cap.
//
// A returned block carries the events of its last uses. The stream that writes it next waits for them, so a CPU that
// runs ahead reuses memory at once and never polls. Growth pins the missing bytes (a slab of at least slab_bytes), on
// the calling thread or, ahead of need, on the pool's own thread. The pool frees idle slabs before growth would exceed
// `slack` times the peak of requested bytes, and before the cap refuses an allocation.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "device/device.h"
#include "device/fork_guard.h"
#include "device/return_stack.h"
#include "memory/slab_space.h"

namespace vdnn {

struct PoolOptions {
  std::uint64_t cap_bytes = 0;  // 0: default_pinned_cap_bytes() of this host
  std::uint64_t slab_bytes = std::uint64_t{1} << 20;
  double slack = 1.05;
};

struct PoolStats {
  std::uint64_t live_bytes = 0;  // as requested
  std::uint64_t live_peak_bytes = 0;
  std::uint64_t pinned_bytes = 0;
  std::uint64_t pinned_peak_bytes = 0;
  std::uint64_t cap_bytes = 0;
  std::uint64_t slabs = 0;
  std::uint64_t blocks_given = 0;
  std::uint64_t growths_awaited = 0;  // an allocation had to wait for pinning
  std::uint64_t growths_ahead = 0;    // pinned by the pool's own thread
  std::uint64_t slabs_given_back = 0;
  std::uint64_t refusals = 0;     // allocations that the cap refused, or that returned null
  std::string last_growth_error;  // of the pool's own thread
};

class PinnedPool;

// A lease of host memory. Dropping the last reference returns it, without a lock or a driver call.
class PinnedBlock {
 public:
  [[nodiscard]] Address address() const noexcept { return range_.address; }
  [[nodiscard]] std::uint64_t bytes() const noexcept { return requested_bytes_; }
  // A stream that writes the block must wait for these events first.
  [[nodiscard]] const LastUses& last_uses() const noexcept { return last_uses_; }
  // Records that a read or write of the block ends at `event`. One thread at a time.
  void note_use(const Event& event) { last_uses_.add(event); }

 private:
  friend class PinnedPool;
  friend class ReturnStack<PinnedBlock>;
  ByteRange range_;
  std::uint64_t requested_bytes_ = 0;
  LastUses last_uses_;
  PinnedBlock* next_returned = nullptr;  // for ReturnStack
  std::shared_ptr<PinnedPool> home_;
};

enum class Growth { Now, Later };

class PinnedPool : public std::enable_shared_from_this<PinnedPool> {
 public:
  // Throws InvalidArgument for a cap, slab size or slack out of range.
  [[nodiscard]] static std::shared_ptr<PinnedPool> create(std::shared_ptr<Device> device, const PoolOptions& options);
  PinnedPool(const PinnedPool&) = delete;  // blocks refer to their pool
  PinnedPool& operator=(const PinnedPool&) = delete;
  // Parks the slabs if close() was not called.
  ~PinnedPool();
  // Frees the slabs of pools that were destroyed without close(). The next pool of the process calls it, too.
  static void free_leftovers();

  // With Growth::Now, blocks while memory is pinned and throws PinnedMemoryFull if that fails. With Growth::Later,
  // never blocks: if the pool is full, it returns null, counts a refusal and lets the pool's thread grow.
  [[nodiscard]] std::shared_ptr<PinnedBlock> allocate(std::uint64_t bytes, Growth growth);
  // Makes the pool's thread pin one slab with the bytes that are missing from `bytes`. Returns at once.
  void reserve(std::uint64_t bytes);
  void wait_for_growth();
  // Frees idle slabs until no more than `kept_bytes` are pinned, those that were idle longest first. Returns the number
  // of freed bytes.
  std::uint64_t trim(std::uint64_t kept_bytes = 0);
  // How many bytes blocks of `block_bytes` can still take under the cap, beside the blocks that are leased: what is not
  // pinned, idle slabs, and free ranges that are large enough.
  [[nodiscard]] std::uint64_t room_bytes(std::uint64_t block_bytes);
  [[nodiscard]] PoolStats stats();
  [[nodiscard]] const std::shared_ptr<Device>& device() const noexcept { return device_; }
  [[nodiscard]] const ForkGuard& fork_guard() const noexcept { return fork_guard_; }
  // Unpins everything. Blocks that are still held lose their memory: a device refuses to use them.
  void close();

 private:
  struct Leftovers;  // the slabs of a pool that was destroyed without close()
  PinnedPool(std::shared_ptr<Device> device, const PoolOptions& options);
  using Lock = std::unique_lock<std::mutex>;
  [[nodiscard]] std::shared_ptr<PinnedBlock> lease(std::uint64_t bytes, SlabSpace::Placement placement);
  static void take_back(PinnedBlock* block) noexcept;
  void collect_returned();
  void require_open() const;
  // These functions release the lock while the device works.
  void grow(Lock& lock, std::uint64_t bytes);
  // Frees the slab that has been idle longest, after its last uses. Returns false if no slab is idle.
  bool give_slab_back(Lock& lock);
  void make_room(Lock& lock, std::uint64_t bytes);
  void grow_ahead();
  void ask_for_growth(std::uint64_t bytes);

  const std::shared_ptr<Device> device_;
  const PoolOptions options_;
  const ForkGuard fork_guard_;
  ReturnStack<PinnedBlock> returned_;
  std::mutex mutex_;  // guards the members below
  std::condition_variable growth_done_;
  std::condition_variable growth_wanted_;
  std::deque<std::uint64_t> wanted_bytes_;
  std::uint64_t growing_bytes_ = 0;
  SlabSpace space_;
  PoolStats stats_;
  bool closed_ = false;
  std::thread grower_;  // started on first use
};

}  // namespace vdnn
